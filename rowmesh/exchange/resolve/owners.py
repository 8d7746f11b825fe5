"""Owners: all dynamic tables of which a rank has shards, as they answer a batch's requests together.

Most ids of most batches are known. Tables that know all of theirs open the step in one kernel; the others one by one,
with the distinct ids of all ranks in ascending order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np

from rowmesh.errors import RowmeshError
from rowmesh.exchange.resolve.asked import DynamicTable
from rowmesh.exchange.resolve.asking import largest
from rowmesh.exchange.resolve.request_channel import Arrived
from rowmesh.mesh.plain import PlainError, error_to_plain
from rowmesh.ops import dynamic_requests
from rowmesh.ops.dynamic_requests import cpu
from rowmesh.ops.memory import array_at
from rowmesh.tables.dynamic.owned import OwnedTable


class _Opened(NamedTuple):
    """A batch that opened a step, and has not ended on all ranks.

    Attributes:
        number: of the batch.
        step: which step.
        known: of the tables that knew all ids: place, how many requests, how many distinct ids, the last step before.
        before: what these ids were, one table after the other; memory that is used again.
    """

    number: int
    step: int
    known: list[tuple[int, int, int, int]]
    before: np.ndarray


class Owners:
    """The tables of one rank, those of which it has no shard included, and those whose index is on a device.

    The latter are decided by `rowmesh.exchange.resolve.device_tables`.

    Args:
        tables: all of the collection, as requests have them.
    """

    def __init__(self, tables: Sequence[DynamicTable]) -> None:
        self._tables = tables
        self._all = [table.owned for table in tables if table.owned is not None]
        self._owned = [
            (place, table.owned)
            for place, table in enumerate(tables)
            if table.owned is not None and not table.owned.is_on_device
        ]
        self.note_hooks()
        self._described = np.zeros((len(tables), cpu.OWNER_COLUMNS), np.int64)
        for place, owned in self._owned:
            self._described[place] = owned.described
        self._outcome = np.empty((len(tables), cpu.OUTCOME_COLUMNS), np.int64)
        self._scratch = np.empty((3, 0), np.int64)
        self._none = np.empty((0, cpu.BEFORE_COLUMNS), np.int64)
        self._opened: deque[_Opened] = deque()
        self._spare: list[np.ndarray] = []
        self._half_done: PlainError | None = None  # of a table that failed amid a step

    def note_hooks(self) -> None:
        """A table has got hooks, which are told of known ids too."""
        self._is_always_plain = np.zeros(len(self._tables), bool)
        for place, owned in self._owned:
            self._is_always_plain[place] = owned.is_always_plain

    def release(self, first: int) -> PlainError | None:
        """Frees what batches before number `first` held: they have ended on all ranks. Returns what `decide` does."""
        failure: PlainError | None = None
        for owned in self._all:
            try:
                owned.release(first)
            except RowmeshError as error:
                failure = failure or error_to_plain(error)
        if failure is None:  # else a table still has what known ids were
            while self._opened and self._opened[0].number < first:
                self._spare.append(self._opened.popleft().before)
        return failure

    def go_back(self, step: int) -> None:
        """Takes back what batches after a step decided that have not ended on all ranks, the last first."""
        while self._opened and self._opened[-1].step > step:
            opened = self._opened.pop()
            at, known = 0, {place: numbers for place, *numbers in opened.known}
            for place, owned in self._owned:
                if place not in known:
                    owned.go_back(opened.number)
                    continue
                count, num_hits, last = known[place]
                owned.uncount_known(num_hits, last, opened.before[at : at + count])
                at += count
            self._spare.append(opened.before)

    def forget_opened(self) -> None:
        """No batch so far can be taken back."""
        while self._opened:
            self._spare.append(self._opened.pop().before)

    def tell(self, step: int) -> None:
        """Tells hooks what was decided in a step.

        Raises:
            RowmeshError: one failed; names it.
        """
        for owned in self._all:
            owned.tell(step)

    @property
    def is_watched(self) -> bool:
        """Whether there are hooks."""
        return any(owned.hooks for owned in self._all)

    def _room(self, count: int) -> np.ndarray:
        """Memory for what so many ids were before a batch."""
        room = self._spare.pop() if self._spare else self._none
        return room if len(room) >= count else np.empty((count + count // 4, cpu.BEFORE_COLUMNS), np.int64)

    def close(self) -> None:
        """Closes the stores of demoted ids."""
        for owned in self._all:
            owned.close()

    def decide(
        self,
        arrived: Arrived,
        number: int,
        opens: Sequence[bool],
        step: int,
        ahead: Container[int],
        again: Sequence[bool],
    ) -> PlainError | None:
        """Answers all requests, at `arrived.rows_at`.

        Args:
            arrived: the requests.
            number: of the batch.
            opens: of each table, whether its step is opened; else ids are only found.
            step: the number of the step.
            ahead: batches that a pipeline has opened before their turn.
            again: of each table, whether a batch that trains is looked up once more.

        Returns:
            The error of the first table that failed; what the others decided stands until `go_back`.
        """
        if self._half_done is not None:
            return self._half_done
        begins = arrived.sizes.cumsum(axis=1) - arrived.sizes
        if not any(opens):
            return self._decide_each(self._owned, arrived, begins, number, opens, step, ahead, again)
        totals = arrived.sizes.sum(axis=0).tolist()
        before = self._room(sum(totals))
        is_known = self._open_known(arrived, begins, opens, step, before).tolist()
        hits = self._outcome[:, cpu.HITS].tolist()
        known = [
            (place, totals[place], hits[place], owned.count_known(hits[place], step))
            for place, owned in self._owned
            if is_known[place]
        ]
        self._opened.append(_Opened(number, step, known, before))
        others = [each for each in self._owned if not is_known[each[0]]]
        return self._decide_each(others, arrived, begins, number, opens, step, ahead, again)

    def _decide_each(
        self,
        tables: Sequence[tuple[int, OwnedTable]],
        arrived: Arrived,
        begins: np.ndarray,
        number: int,
        opens: Sequence[bool],
        step: int,
        ahead: Container[int],
        again: Sequence[bool],
    ) -> PlainError | None:
        """Answers the requests for some tables, one by one; returns as `decide` does."""
        failure: PlainError | None = None
        for place, _ in tables:
            is_half_done = opens[place]
            try:
                self._decide_one(place, arrived, begins, number, step, ahead, opens=opens[place], again=again[place])
                is_half_done = False
            except RowmeshError as error:  # it has changed nothing
                failure, is_half_done = failure or error_to_plain(error), False
            except (OSError, MemoryError) as error:
                failure = failure or error_to_plain(error)
            finally:
                if is_half_done:
                    self._note_half_done(place, step)
        return failure

    def _note_half_done(self, place: int, step: int) -> None:
        """A table failed amid a step, and cannot go back."""
        text = (
            f"dynamic table {self._tables[place].spec.name!r} failed amid step {step}, and what it knows is of no use; "
            "make a new EmbeddingCollection, and load a checkpoint"
        )
        self._half_done = error_to_plain(RowmeshError(text))

    def _open_known(
        self, arrived: Arrived, begins: np.ndarray, opens: Sequence[bool], step: int, before: np.ndarray
    ) -> np.ndarray:
        """Opens the step of tables that know all ids; bool `[T]`: which did."""
        is_plain = np.array(opens)
        if not self._is_always_plain.all():
            is_plain &= self._is_always_plain
            for place, owned in self._owned:
                is_plain[place] = opens[place] and owned.is_plain(step)
        if not is_plain.any():
            return is_plain
        described = self._described
        if not is_plain.all():
            described = described.copy()
            described[~is_plain, cpu.NUM_HERE] = 0
        most = int(arrived.sizes.sum(axis=0).max())
        if most > self._scratch.shape[1]:
            self._scratch = np.empty((3, most + most // 4), np.int64)
        slots, hashes, shards = self._scratch
        dynamic_requests.open_known(
            described,
            arrived.sizes,
            begins,
            *arrived.columns_at[:2],
            arrived.rows_at,
            step,
            slots,
            hashes.view(np.uint64),
            shards,
            before,
            self._outcome,
        )
        return is_plain & (self._outcome[:, cpu.UNKNOWN] == 0)

    def _decide_one(
        self,
        place: int,
        arrived: Arrived,
        begins: np.ndarray,
        number: int,
        step: int,
        ahead: Container[int],
        *,
        opens: bool,
        again: bool,
    ) -> None:
        """Answers the requests for one table."""
        table = self._tables[place]
        owned = table.owned
        assert owned is not None
        sizes = arrived.sizes[:, place].tolist()
        *columns_at, rows_at = ((at + 8 * begins[:, place]).tolist() for at in (*arrived.columns_at, arrived.rows_at))
        ids, counts, *scored = (
            np.concatenate([array_at(at, np.int64, size) for at, size in zip(each, sizes, strict=True)])
            for each in columns_at
        )
        found = table.merge(ids, counts)
        order = np.argsort(found.ids)
        ascending, rows = found.ids[order], np.empty(len(order), np.int64)
        if opens:
            scores = None
            if owned.is_scored:
                scores = largest(scored[0], found.inverse, len(order))[order]
            rows[order] = owned.open(number, ascending, found.counts[order], step, scores, arrived.time)
        else:
            rows[order] = owned.find(number, ascending, ahead, again=again)
        answers, begin = rows[found.inverse], 0
        for at, size in zip(rows_at, sizes, strict=True):
            array_at(at, np.int64, size)[:] = answers[begin : begin + size]
            begin += size

"""Resolver: replaces the ids of dynamic tables in a batch by frames, before the batch is routed.

A rank's distinct ids and their counts go to the owners of their logical shards. Each owner adds up the counts of all
ranks, takes the ids in ascending order, opens the step, writes the rows of new ids, and answers frames. From there on
the batch is one of dense tables. Where tables have replicas, counts go to the owners in every replica group, which so
decide alike; a rank takes the answers of its own group. Replica groups that are averaged decide for themselves, each
with a resolver of its own, and `merge` makes one of what they know.

Two messages a batch, whatever the number of tables: the ids with their counts, and the answers. Room for ids is as much
as the last batches needed; where it is too small on some rank, ids follow in a message of their own.

Source: FusedRec §3.2 (missing keys are initialized by their owner). Differs: decisions are taken on the whole batch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from rowmesh.counters import CommonCounters
from rowmesh.dynamic.asked import DynamicTable
from rowmesh.dynamic.counters import DynamicCounters
from rowmesh.dynamic.known import ask_statistics
from rowmesh.dynamic.leases import Lease, Leases
from rowmesh.dynamic.merging import Averages, MergedIds
from rowmesh.dynamic.state import Statistics
from rowmesh.errors import ConfigurationError, DataError, NoRoomError, PeerError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.waiting import gather_objects
from rowmesh.ops.distinct_ids import Distinct
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec

_KIND, _FIRST, _LARGEST, _HEAD = 0, 1, 2, 3  # numbers of a header before those of the tables
_FIND, _OPEN = 0, 1


class Resolver:
    """The dynamic tables of a collection. Making one is collective, where there are several ranks.

    Args:
        tables: all of them.
        mesh: the ranks that decide together: all, or those of a replica group.
        averages: of groups that decide for themselves; None where there are no such.

    Attributes:
        tables: by name.
        averages: as given.
        leases: which batches are under way on this rank.
        counters: of its messages.
        step: how many batches were opened for training.
    """

    def __init__(self, tables: Sequence[DynamicTable], mesh: Mesh, averages: Averages | None = None) -> None:
        self.tables, self.averages = {table.spec.name: table for table in tables}, averages
        self._mesh = mesh.with_process_group("dynamic")
        self._channel = Channel.between_hosts(self._mesh)
        self.leases, self.counters, self.step = Leases(), CommonCounters(), 0
        self._lock = threading.Lock()  # ranks number their batches alike
        self._room = 0  # ids that travel with a header; the same on all ranks
        places = {table.spec.name: [table.grid.place(rank) for rank in range(mesh.world_size)] for table in tables}
        self._members = {name: [member for _, member in each] for name, each in places.items()}
        self._is_mine = {name: [group == each[mesh.rank][0] for group, _ in each] for name, each in places.items()}
        self._is_mine_of = list(zip(*self._is_mine.values(), strict=True))  # by rank, then by table

    def __call__(self, batch: SparseBatch, frozen: Mapping[str, bool], *, is_ahead: bool) -> tuple[SparseBatch, Lease]:
        """The batch with frames for ids. Collective.

        Under `torch.no_grad()`, and for frozen tables, nothing is counted or admitted.

        Args:
            batch: with the features of the tables.
            frozen: of each table, whether it is.
            is_ahead: whether a pipeline opens it before its turn.

        Returns:
            The batch, and what keeps its frames until it has ended.

        Raises:
            NoRoomError, DataError: on all ranks alike, where an owner cannot open the step; names it.
            PeerError: a rank died, or did not come; or ranks look up with gradients and without.
        """
        opens = torch.is_grad_enabled()
        with self._lock:
            lease = self.leases.begin()
            try:
                lease.is_ahead = is_ahead
                self.step += opens
                return self._resolve(batch, lease.number, {name: opens and not frozen[name] for name in frozen}), lease
            except BaseException:
                lease.end()
                raise

    def merge(self) -> dict[str, MergedIds]:
        """Makes one of what replica groups know that decide for themselves. Collective among the replicas of this rank.

        Returns:
            Of each table, the ids whose rows must be averaged.
        """
        assert self.averages is not None
        with self._lock:
            return self.averages(self.leases.next - 1, self.step, self.counters)

    def put_back(self, merged: Mapping[str, MergedIds]) -> None:
        """The rows of these ids were not averaged: `merge` returns them again."""
        assert self.averages is not None
        with self._lock:
            for name, each in merged.items():
                self.averages.tables[name].note(each.ids, np.empty(0, np.int64))

    @property
    def decided(self) -> dict[str, DynamicCounters]:
        """Counters of the tables of which this rank has shards."""
        return {name: table.owned.counters for name, table in self.tables.items() if table.owned is not None}

    @property
    def reported(self) -> dict[str, DynamicCounters]:
        """What the counters of all ranks add up to: of each table this rank's, or zeros where others have the same."""
        mine, rank = self.decided, self._mesh.rank
        return {
            name: mine[name] if name in mine and table.grid.place(rank)[0] == 0 else DynamicCounters(name)
            for name, table in self.tables.items()
        }

    def check_idle(self, what: str) -> None:
        """Raises RowmeshError where a pipeline has opened batches before their turn: the index is that after them."""
        if ahead := len(self.leases.ahead):
            raise RowmeshError(
                f"a pipeline has opened {ahead} batch(es) ahead, which the index of dynamic tables knows already: "
                f"{what} when its loop over `windows` has ended"
            )

    def statistics(self, table: str, ids: np.ndarray) -> Statistics:
        """Counts, last steps and scores of any ids, from their owners. Collective.

        Raises:
            ConfigurationError: there is no such dynamic table.
        """
        if table not in self.tables:
            raise ConfigurationError(f"{table!r} is no dynamic table; there are {[*self.tables]}")
        self.check_idle("ask for statistics")
        with self._lock:
            return ask_statistics(self.tables[table], ids, self._channel, self._mesh.rank)

    def _resolve(self, batch: SparseBatch, number: int, opens: Mapping[str, bool]) -> SparseBatch:
        parts = {name: _slices(batch, table.spec) for name, table in self.tables.items()}
        ids = batch.ids.numpy()
        asked = {name: table.ask(_joined(ids, parts[name])) for name, table in self.tables.items()}
        rows = self._exchange(asked, number, opens)
        resolved = batch.ids.clone()
        target = resolved.numpy()
        for name, each in asked.items():
            begin = 0
            for part in parts[name]:
                end = begin + part.stop - part.start
                np.take(rows[name], each.inverse[begin:end], out=target[part], mode="clip")  # which needs no buffer
                begin = end
        return batch.with_ids(resolved)

    def _exchange(self, asked: Mapping[str, Distinct], number: int, opens: Mapping[str, bool]) -> dict[str, np.ndarray]:
        """The rows of the ids asked for, of each table."""
        if self._mesh.world_size == 1:
            return self._decide_alone(asked, number, opens)
        sent, received = self._ask_owners(asked, any(opens.values()))
        doing = "resolving ids"
        answer, back_out, failure = self._answer(received, sent, number, opens)
        back_in = [1 + self._num_answers(asked, rank) for rank in range(self._mesh.world_size)]
        came = self._channel.post(answer, back_out, back_in, self.counters, doing).wait().numpy()
        starts = list(accumulate(back_in, initial=0))
        if any(came[start] for start in starts[:-1]):
            self._raise(failure)
        return self._sorted(came, starts, asked)

    def _decide_alone(
        self, asked: Mapping[str, Distinct], number: int, opens: Mapping[str, bool]
    ) -> dict[str, np.ndarray]:
        """The same without messages."""
        self._release(self.leases.first)
        return {
            name: self._decide(table, asked[name].ids, asked[name].counts, number, opens=opens[name])
            for name, table in self.tables.items()
        }

    def _release(self, first: int) -> None:
        for table in self.tables.values():
            if table.owned is not None:
                table.owned.release(first)

    def _ask_owners(self, asked: Mapping[str, Distinct], opens: bool) -> tuple[np.ndarray, np.ndarray]:
        """Sends ids to their owners; releases what batches held that have ended everywhere.

        Returns:
            How many ids of each table came from each rank, int64 `[W, T]`; and these with their counts, `[n, 2]`.
        """
        size, room, head, doing = self._mesh.world_size, self._room, _HEAD + len(asked), "resolving ids"
        pieces = [
            [(each, self.tables[name].part_for(each, rank)) for name, each in asked.items()] for rank in range(size)
        ]
        message = np.empty((size, head + 2 * room), np.int64)
        message[:, _KIND], message[:, _FIRST] = _OPEN if opens else _FIND, self.leases.first
        message[:, _HEAD:head] = [[part.stop - part.start for _, part in own] for own in pieces]
        sizes_out = message[:, _HEAD:head].sum(axis=1).tolist()
        message[:, _LARGEST] = max(sizes_out)
        for row, own, number in zip(message, pieces, sizes_out, strict=True):
            if number <= room:
                _fill(row[head : head + 2 * number], own)
        came = self._channel.exchange_equal(torch.from_numpy(message), self.counters, doing).numpy()
        self._check_kinds(came[:, _KIND].tolist())
        self._release(int(came[:, _FIRST].min()))
        largest, sent = int(came[:, _LARGEST].max()), came[:, _HEAD:head]
        self._room = max(largest + largest // 4, room - room // 8)
        sizes_in = sent.sum(axis=1).tolist()
        if largest <= room:
            parts = [row[head : head + 2 * number] for row, number in zip(came, sizes_in, strict=True)]
            return sent, np.concatenate(parts).reshape(-1, 2)
        ids = torch.empty((sum(sizes_out), 2), dtype=torch.int64, device="cpu")
        _fill(ids.numpy().reshape(-1), [piece for own in pieces for piece in own])
        return sent, self._channel.post(ids, sizes_out, sizes_in, self.counters, doing).wait().numpy()

    def _check_kinds(self, kinds: Sequence[int]) -> None:
        if len(set(kinds)) > 1:
            training = [self._mesh.name(rank) for rank, kind in enumerate(kinds) if kind == _OPEN]
            raise PeerError(
                f"rank {self._mesh.name(self._mesh.rank)}: ranks {training} look up with gradients, the others "
                "without; every rank must train and evaluate alike"
            )

    def _num_answers(self, asked: Mapping[str, Distinct], rank: int) -> int:
        """Answers that come from a rank: in each replica group one owner answers its own ranks."""
        num = 0
        for name, each in asked.items():
            if self._is_mine[name][rank]:
                part = self.tables[name].part_for(each, rank)
                num += part.stop - part.start
        return num

    def _answer(
        self, received: np.ndarray, sent: np.ndarray, number: int, opens: Mapping[str, bool]
    ) -> tuple[torch.Tensor, list[int], str]:
        """For each rank whether this one failed, then the rows that it asked for; how many; and why this one failed."""
        ends = sent.cumsum().reshape(sent.shape)  # rank by rank, table by table
        begins = ends - sent
        rows, failure = np.empty(len(received), np.int64), ""
        for column, (name, table) in enumerate(self.tables.items()):
            parts = [
                slice(*bounds) for bounds in zip(begins[:, column].tolist(), ends[:, column].tolist(), strict=True)
            ]
            try:
                self._decide_together(table, received, parts, number, rows, opens=opens[name])
            except RowmeshError as error:
                failure = failure or f"{type(error).__name__}\n{error}"
        answers, sizes = [], []
        status = np.array([bool(failure)], np.int64)
        for rank, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            own = [status]
            own += [
                rows[slice(*part)]
                for part, mine in zip(zip(begin, end, strict=True), self._is_mine_of[rank], strict=True)
                if mine
            ]
            answers += own
            sizes.append(sum(map(len, own)))
        message = torch.empty(sum(sizes), dtype=torch.int64, device="cpu")
        np.concatenate(answers, out=message.numpy())
        return message, sizes, failure

    def _decide_together(
        self,
        table: DynamicTable,
        received: np.ndarray,
        parts: Sequence[slice],
        number: int,
        rows: np.ndarray,
        *,
        opens: bool,
    ) -> None:
        """Sets the rows of what all ranks ask of a table."""
        if table.owned is None:
            return
        requests = np.concatenate([received[part] for part in parts])
        found = table.merge(requests[:, 0], requests[:, 1])
        decided = self._decide(table, found.ids, found.counts, number, opens=opens)[found.inverse]
        begin = 0
        for part in parts:
            end = begin + part.stop - part.start
            rows[part] = decided[begin:end]
            begin = end

    def _decide(
        self, table: DynamicTable, ids: np.ndarray, counts: np.ndarray, number: int, *, opens: bool
    ) -> np.ndarray:
        """The rows of distinct ids, in any order, which all ranks together have so often."""
        assert table.owned is not None
        order = np.argsort(ids)
        ascending, rows = ids[order], np.empty(len(ids), np.int64)
        if opens:
            rows[order] = table.owned.open(number, ascending, counts[order], self.step)
        else:
            rows[order] = table.owned.find(number, ascending, self.leases.ahead)
        return rows

    def _sorted(self, came: np.ndarray, starts: Sequence[int], asked: Mapping[str, Distinct]) -> dict[str, np.ndarray]:
        """The answers of all owners, by table."""
        found = {name: np.empty(len(each.ids), np.int64) for name, each in asked.items()}
        for rank, start in enumerate(starts[:-1]):
            place = start + 1
            for name, each in asked.items():
                if self._is_mine[name][rank]:
                    part = self.tables[name].part_for(each, rank)
                    end = place + part.stop - part.start
                    found[name][part] = came[place:end]
                    place = end
        return found

    def _raise(self, failure: str) -> None:
        """Raises on all ranks what one of them could not do."""
        everyone = gather_objects(self._mesh, failure, "resolving ids")
        name, text = next(text.split("\n", 1) for text in everyone if text)
        raise next((kind for kind in (NoRoomError, DataError) if kind.__name__ == name), RowmeshError)(text)


def _slices(batch: SparseBatch, table: TableSpec) -> list[slice]:
    """Where the ids of each feature of a table are."""
    return [slice(*batch.feature_range(batch.features.index(name))) for name in table.features]


def _joined(ids: np.ndarray, parts: Sequence[slice]) -> np.ndarray:
    return ids[parts[0]] if len(parts) == 1 else np.concatenate([ids[part] for part in parts])


def _fill(message: np.ndarray, pieces: Sequence[tuple[Distinct, slice]]) -> None:
    """Writes ids and counts, in turns."""
    columns = message.reshape(-1, 2)
    np.concatenate([each.ids[part] for each, part in pieces], out=columns[:, 0])
    np.concatenate([each.counts[part] for each, part in pieces], out=columns[:, 1])

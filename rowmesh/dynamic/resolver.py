"""Resolver: replaces the ids of dynamic tables in a batch by frames, before the batch is routed.

A rank's distinct ids and their counts go to the owners of their logical shards. Each owner adds up the counts of all
ranks, takes the ids in ascending order, opens the step, writes the rows of new ids, and answers frames. From there on
the batch is one of dense tables. Where tables have replicas, counts go to the owners in every replica group, which so
decide alike; a rank takes the answers of its own group.

Three messages a batch, whatever the number of tables: how many ids, the ids with their counts, the answers.

Source: FusedRec §3.2 (missing keys are initialized by their owner). Differs: decisions are taken on the whole batch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from rowmesh.counters import CommonCounters
from rowmesh.dynamic.asked import Asked, DynamicTable, message_of
from rowmesh.dynamic.counters import DynamicCounters
from rowmesh.dynamic.known import ask_statistics
from rowmesh.dynamic.leases import Lease, Leases
from rowmesh.dynamic.state import Statistics
from rowmesh.errors import ConfigurationError, DataError, NoRoomError, PeerError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.waiting import gather_objects
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec

_KIND, _FIRST, _HEAD = 0, 1, 2  # numbers of a header before those of the tables
_FIND, _OPEN = 0, 1


class Resolver:
    """The dynamic tables of a collection. Making one is collective, where there are several ranks.

    Args:
        tables: all of them.
        mesh: all ranks.

    Attributes:
        tables: by name.
        leases: which batches are under way on this rank.
        counters: of its messages.
        step: how many batches were opened for training.
    """

    def __init__(self, tables: Sequence[DynamicTable], mesh: Mesh) -> None:
        self.tables = {table.spec.name: table for table in tables}
        self._mesh = mesh.with_process_group("dynamic")
        self._channel = Channel.between_hosts(self._mesh)
        self.leases, self.counters, self.step = Leases(), CommonCounters(), 0
        self._lock = threading.Lock()  # ranks number their batches alike

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
        asked = {
            name: table.ask(np.concatenate([ids[part] for part in parts[name]])) for name, table in self.tables.items()
        }
        rows = self._exchange(asked, number, opens)
        resolved = batch.ids.clone()
        target = resolved.numpy()
        for name, each in asked.items():
            values = rows[name][each.inverse]
            ends = list(accumulate((part.stop - part.start for part in parts[name]), initial=0))
            for part, begin, end in zip(parts[name], ends, ends[1:], strict=False):
                target[part] = values[begin:end]
        return batch.with_ids(resolved)

    def _exchange(self, asked: Mapping[str, Asked], number: int, opens: Mapping[str, bool]) -> dict[str, np.ndarray]:
        """The rows of the ids asked for, of each table."""
        size = self._mesh.world_size
        sent = self._announce(asked, any(opens.values()))
        outgoing = [self._requests(asked, rank) for rank in range(size)]
        sizes_out, sizes_in = [len(each) for each in outgoing], sent[:, _HEAD:].sum(axis=1).tolist()
        message = message_of(np.concatenate(outgoing))
        doing = "resolving ids"
        received = self._channel.post(message, sizes_out, sizes_in, self.counters, doing).wait().numpy()
        answers, failure = self._answer(received, sent, number, opens)
        back_in = [1 + sum(self._num_answers(name, each, rank) for name, each in asked.items()) for rank in range(size)]
        back_out = [len(each) for each in answers]
        answer = message_of(np.concatenate(answers))
        came = self._channel.post(answer, back_out, back_in, self.counters, doing).wait().numpy()
        starts = list(accumulate(back_in, initial=0))
        if any(came[start] for start in starts[:-1]):
            self._raise(failure)
        return self._sorted(came, starts, asked)

    def _announce(self, asked: Mapping[str, Asked], opens: bool) -> np.ndarray:
        """Says how many ids go to each rank; releases what batches held that have ended everywhere.

        Returns:
            int64 `[W, 2 + T]`: the headers of all ranks for this one.
        """
        size = self._mesh.world_size
        header = np.zeros((size, _HEAD + len(asked)), np.int64)
        header[:, _KIND], header[:, _FIRST] = _OPEN if opens else _FIND, self.leases.first
        for column, (name, each) in enumerate(asked.items(), start=_HEAD):
            members = [self.tables[name].grid.place(rank)[1] for rank in range(size)]
            header[:, column] = np.diff(each.bounds)[members]
        sent = self._channel.exchange_equal(torch.from_numpy(header), self.counters, "resolving ids").numpy()
        if len(set(sent[:, _KIND].tolist())) > 1:
            training = [self._mesh.name(rank) for rank in range(size) if sent[rank, _KIND] == _OPEN]
            raise PeerError(
                f"rank {self._mesh.name(self._mesh.rank)}: ranks {training} look up with gradients, the others "
                "without; every rank must train and evaluate alike"
            )
        for table in self.tables.values():
            if table.owned is not None:
                table.owned.release(int(sent[:, _FIRST].min()))
        return sent

    def _requests(self, asked: Mapping[str, Asked], rank: int) -> np.ndarray:
        """int64 `[n, 2]`: ids and counts for one rank, table by table."""
        parts = [np.empty((0, 2), np.int64)]
        for name, each in asked.items():
            member = self.tables[name].grid.place(rank)[1]
            own = slice(*each.bounds[member : member + 2])
            parts.append(np.stack([each.ids[own], each.counts[own]], axis=1))
        return np.concatenate(parts)

    def _is_mine(self, name: str, rank: int) -> bool:
        """Whether a rank is in this one's replica group of a table."""
        grid = self.tables[name].grid
        return grid.place(rank)[0] == grid.place(self._mesh.rank)[0]

    def _num_answers(self, name: str, asked: Asked, rank: int) -> int:
        if not self._is_mine(name, rank):
            return 0
        member = self.tables[name].grid.place(rank)[1]
        return int(asked.bounds[member + 1] - asked.bounds[member])

    def _answer(
        self, received: np.ndarray, sent: np.ndarray, number: int, opens: Mapping[str, bool]
    ) -> tuple[list[np.ndarray], str]:
        """For each rank whether this one failed, then the rows that it asked for; and why this one failed."""
        lengths = sent[:, _HEAD:].ravel()
        parts = np.split(received, lengths.cumsum()[:-1])  # rank by rank, table by table
        answers: list[list[np.ndarray]] = [[] for _ in range(self._mesh.world_size)]
        failure = ""
        for column, (name, table) in enumerate(self.tables.items()):
            mine = parts[column :: len(self.tables)]
            try:
                rows = self._decide(table, np.concatenate(mine), number, opens=opens[name])
            except RowmeshError as error:
                failure = failure or f"{type(error).__name__}\n{error}"
                rows = np.zeros(sum(map(len, mine)), np.int64)
            of_ranks = np.split(rows, np.cumsum([len(each) for each in mine])[:-1])
            for rank, own in enumerate(of_ranks):
                if self._is_mine(name, rank):
                    answers[rank].append(own)
        status = np.array([bool(failure)], np.int64)
        return [np.concatenate([status, *each]) for each in answers], failure

    def _decide(self, table: DynamicTable, requests: np.ndarray, number: int, *, opens: bool) -> np.ndarray:
        if table.owned is None:
            return np.empty(0, np.int64)
        ids, inverse = np.unique(requests[:, 0], return_inverse=True)
        if not opens:
            return table.owned.find(number, ids, self.leases.ahead)[inverse]
        counts = np.zeros(len(ids), np.int64)
        np.add.at(counts, inverse, requests[:, 1])
        return table.owned.open(number, ids, counts, self.step)[inverse]

    def _sorted(self, came: np.ndarray, starts: Sequence[int], asked: Mapping[str, Asked]) -> dict[str, np.ndarray]:
        """The answers of all owners, by table."""
        found = {name: np.empty(len(each.ids), np.int64) for name, each in asked.items()}
        for rank, start in enumerate(starts[:-1]):
            place = start + 1
            for name, each in asked.items():
                if not self._is_mine(name, rank):
                    continue
                member = self.tables[name].grid.place(rank)[1]
                begin, end = each.bounds[member : member + 2].tolist()
                found[name][begin:end] = came[place : place + end - begin]
                place += end - begin
        return found

    def _raise(self, failure: str) -> None:
        """Raises on all ranks what one of them could not do."""
        everyone = gather_objects(self._mesh, failure, "resolving ids")
        name, text = next(text.split("\n", 1) for text in everyone if text)
        raise next((kind for kind in (NoRoomError, DataError) if kind.__name__ == name), RowmeshError)(text)


def _slices(batch: SparseBatch, table: TableSpec) -> list[slice]:
    """Where the ids of each feature of a table are."""
    return [slice(*batch.feature_range(batch.features.index(name))) for name in table.features]

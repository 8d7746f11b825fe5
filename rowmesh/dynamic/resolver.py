"""Resolver: replaces the distinct ids of dynamic tables in a batch by frames, before the batch is routed.

A rank's distinct ids and their counts go to the owners of their logical shards. Each owner adds up the counts of all
ranks, opens the step, writes the rows of new ids, and answers frames. From there on the batch is one of dense tables.
Where tables have replicas, counts go to the owners in every replica group, which so decide alike; a rank takes the
answers of its own group. Replica groups that are averaged decide for themselves, each with a resolver of its own, and
`merge` makes one of what they know.

All tables travel together, see `rowmesh.dynamic.mail`.

Source: FusedRec §3.2 (missing keys are initialized by their owner). Differs: decisions are taken on the whole batch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from rowmesh.counters import CommonCounters
from rowmesh.dynamic.asked import DynamicTable
from rowmesh.dynamic.asking import Asked, RequestRouter
from rowmesh.dynamic.averages import Averages
from rowmesh.dynamic.counters import DynamicCounters
from rowmesh.dynamic.device_tables import DeviceAsked, DeviceTables
from rowmesh.dynamic.event_clock import NO_TIME
from rowmesh.dynamic.hooks import DecisionHook, DecisionHooks
from rowmesh.dynamic.known import ask_statistics
from rowmesh.dynamic.layout import rules_of
from rowmesh.dynamic.mail import Arrived, Letter, LocalMail, Mail, MessageMail, SharedMail
from rowmesh.dynamic.merging import MergedIds
from rowmesh.dynamic.owners import Owners
from rowmesh.dynamic.pins import BatchPin, BatchPins
from rowmesh.dynamic.state import Statistics
from rowmesh.errors import ConfigurationError, DataError, PeerError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.plain import PlainError, error_from_plain
from rowmesh.mesh.together import first_failure
from rowmesh.mesh.waiting import gather_objects

_FIND, _OPEN = 0, 1


class Resolver:
    """The dynamic tables of a collection. Making one is collective, where there are several ranks.

    Args:
        tables: all of them, in the order of their groups.
        mesh: the ranks that decide together: all, or those of a replica group.
        averages: of groups that decide for themselves; None where there are no such.
        shares_memory: whether ids travel in memory that the ranks of the mesh share.

    Attributes:
        tables: by name.
        averages: as given.
        pins: which batches are under way on this rank.
        counters: of its messages.
        step: how many batches were opened for training.
        device_tables: names of those whose index is on the device, in their order.
    """

    def __init__(
        self,
        tables: Sequence[DynamicTable],
        mesh: Mesh,
        averages: Averages | None = None,
        *,
        shares_memory: bool = False,
    ) -> None:
        self.tables, self.averages = {table.spec.name: table for table in tables}, averages
        self._mesh = mesh.with_process_group("dynamic")
        self._channel = Channel.between_hosts(self._mesh)
        self.pins, self.counters, self.step = BatchPins(), CommonCounters(), 0
        self._lock = threading.Lock()  # ranks number their batches alike
        self._hooks: dict[str, DecisionHooks] = {}
        self._request_router, self._owners = RequestRouter(tables, mesh.rank, mesh.world_size), Owners(tables)
        on_device = [
            (place, each.owned)
            for place, each in enumerate(tables)
            if each.owned is not None and each.owned.is_on_device
        ]
        self.device_tables = tuple(tables[place].spec.name for place, _ in on_device)
        self._on_device = DeviceTables(on_device) if on_device else None
        scored = [table.spec.takes_scores for table in tables]
        columns = 3 if any(scored) else 2
        self._mail: Mail
        if mesh.world_size == 1:
            self._mail = LocalMail(columns)
        elif shares_memory:
            self._mail = SharedMail(self._mesh, len(tables), self.counters, columns)
        else:
            self._mail = MessageMail(self._channel, self.counters, columns)

    def __call__(
        self,
        asked: Sequence[Asked],
        on_device: DeviceAsked | None = None,
        *,
        time: int | None = None,
        is_ahead: bool = False,
    ) -> BatchPin:
        """Puts frames in the place of ids. Collective.

        Under `torch.no_grad()`, and for frozen tables, nothing is counted or admitted.

        Args:
            asked: the ids of a batch, by group.
            on_device: those of tables whose index is on the device, of which `asked` has none.
            time: of its latest event on this rank, in seconds, where that is known.
            is_ahead: whether a pipeline opens it before its turn.

        Returns:
            What keeps the frames until the batch has ended.

        Raises:
            NoRoomError, DataError, StoreError: on all ranks alike, where an owner cannot open the step; names it.
            PeerError: a rank died, or did not come; or ranks look up with gradients and without.
        """
        opens = torch.is_grad_enabled()
        with self._lock:
            pin = self.pins.begin()
            try:
                pin.is_ahead = is_ahead
                self.step += opens
                self._resolve(asked, on_device, pin.number, NO_TIME if time is None else time, opens=opens)
                return pin
            except BaseException:
                pin.end()
                raise

    def merge(self) -> dict[str, MergedIds]:
        """Makes one of what replica groups know that decide for themselves. Collective among the replicas of this rank.

        Returns:
            Of each table, the ids whose rows must be averaged.

        Raises:
            NoRoomError, StoreError: on all ranks alike, where ids do not fit, or a store does not answer; nothing has
                changed then.
        """
        assert self.averages is not None
        with self._lock:
            return self.averages(self.pins.next - 1, self.step, self.counters, self._agree)

    def _agree(self, failure: PlainError | None) -> None:
        """Raises on all ranks what one of them cannot do."""
        flag = torch.tensor([int(failure is not None)])
        if self._channel.post_gather(flag, self.counters, "averaging dynamic tables").wait().any():
            self._raise(failure)

    def _raise(self, failure: PlainError | None) -> None:
        """Raises on all ranks what the first of them could not do; some rank has failed."""
        first = first_failure(self._mesh, failure, "resolving ids")
        assert first is not None
        raise error_from_plain(first)

    def put_back(self, merged: Mapping[str, MergedIds]) -> None:
        """The rows of these ids were not averaged: `merge` returns them again."""
        assert self.averages is not None
        with self._lock:
            for name, each in merged.items():
                self.averages.tables[name].note(each.ids)

    def keep_undo(self) -> None:
        """From here on `go_back` takes back what batches decide that have not ended on all ranks."""
        with self._lock:
            self._owners.keep_undo()

    @property
    def is_opening(self) -> bool:
        """Whether a thread resolves a batch now."""
        return self._lock.locked()

    def go_back(self, step: int) -> None:
        """Takes back what batches that were opened after a step decided. Local, when no thread looks anything up."""
        with self._lock:
            self._owners.go_back(step)
            self.step = step

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

    def close(self) -> None:
        """Closes the stores of demoted ids."""
        self._owners.close()

    def check_idle(self, what: str) -> None:
        """Raises RowmeshError where a pipeline has opened batches before their turn: the index is that after them."""
        if ahead := len(self.pins.ahead):
            raise RowmeshError(
                f"a pipeline has opened {ahead} batch(es) ahead, which the index of dynamic tables knows already: "
                f"{what} when its loop over `windows` has ended"
            )

    def statistics(self, table: str, ids: np.ndarray) -> Statistics:
        """Counts, last steps and scores of any ids, from their owners. Collective.

        Raises:
            ConfigurationError: there is no such dynamic table.
        """
        self._check_dynamic(table)
        self.check_idle("ask for statistics")
        with self._lock:
            return ask_statistics(self.tables[table], ids, self._channel, self._mesh.rank)

    def guests(self, doing: str) -> dict[str, np.ndarray]:
        """Rows of each table that no id keeps, int64: of guests of batches whose steps have not come. Collective.

        Args:
            doing: what they are for, for messages.

        Raises:
            PeerError: a rank died, or did not come within the mesh's timeout; names it.
        """
        with self._lock:
            owned = {name: table.owned for name, table in self.tables.items()}
            mine = {name: each.guests.tolist() for name, each in owned.items() if each is not None}
            everyone = gather_objects(self._mesh, mine, doing)
        return {
            name: np.array(sorted({row for theirs in everyone for row in theirs.get(name, ())}), np.int64)
            for name in self.tables
        }

    def register_hook(self, table: str, hook: DecisionHook) -> RemovableHandle:
        """Tells a hook what this rank decides of a table from the next batch on; local.

        Raises:
            ConfigurationError: there is no such dynamic table.
        """
        self._check_dynamic(table)
        with self._lock:
            hooks = self._hooks.setdefault(table, DecisionHooks(table, str(self._mesh.name(self._mesh.rank))))
            handle = hooks.add(hook)
            owned, grid = self.tables[table].owned, self.tables[table].grid
            if owned is not None and grid.place(self._mesh.rank)[0] == 0:  # other replicas decide the same
                owned.hooks = hooks
                self._owners.note_hooks()
            return handle

    def _check_dynamic(self, table: str) -> None:
        if table not in self.tables:
            raise ConfigurationError(f"{table!r} is no dynamic table; there are {[*self.tables]}")

    def _resolve(
        self, asked: Sequence[Asked], on_device: DeviceAsked | None, number: int, time: int, *, opens: bool
    ) -> None:
        opened = [opens and not each.is_frozen for each in asked for _ in each.offsets[1:]]
        self._check_scores(asked, opened)
        sizes = self._request_router.count(asked)
        letter = Letter(_OPEN if any(opened) else _FIND, self.pins.first, sizes, self._request_router.answers, time)
        arrived = self._mail.send(letter, partial(self._request_router.fill, asked, sizes))
        self._check_kinds(arrived)
        failure = self._owners.release(arrived.first)
        failure = failure or self._owners.decide(arrived, number, opened, self.step, self.pins.ahead)
        if self._on_device is not None and on_device is not None:
            failure = failure or self._on_device.decide(on_device, number, opened, self.step, self.pins.ahead)
        has_failed, rows_at = self._mail.answer(failed=failure is not None)
        if has_failed:
            self._raise(failure)
        self._request_router.take(asked, rows_at)
        if not all(opened):
            self._note_shared(asked, opened)

    def _check_scores(self, asked: Sequence[Asked], opened: Sequence[bool]) -> None:
        specs = iter(zip(self.tables.values(), opened, strict=True))
        for each in asked:
            of_group = [next(specs) for _ in each.offsets[1:]]
            for table, is_opened in of_group:
                if is_opened and each.scores is None and table.spec.takes_scores:
                    raise DataError(
                        f"dynamic table {table.spec.name!r} evicts by scores of the caller, and the batch has none; "
                        "give SparseBatch(…, scores=…), or take another eviction"
                    )

    def _note_shared(self, asked: Sequence[Asked], opened: Sequence[bool]) -> None:
        """Notes where unknown ids may share a row of zeros."""
        tables, place = [*self.tables.values()], 0
        for each in asked:
            of_group = range(place, place + len(each.offsets) - 1)
            each.is_distinct = all(opened[i] or rules_of(tables[i].spec).missing != "zero" for i in of_group)
            place = of_group.stop

    def _check_kinds(self, arrived: Arrived) -> None:
        if len(set(arrived.kinds)) > 1:
            self._mail.answer(failed=True)  # all have read what they were sent
            training = [self._mesh.name(rank) for rank, kind in enumerate(arrived.kinds) if kind == _OPEN]
            raise PeerError(
                f"rank {self._mesh.name(self._mesh.rank)}: ranks {training} look up with gradients, the others "
                "without; every rank must train and evaluate alike"
            )

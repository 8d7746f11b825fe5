"""Resolver: replaces the distinct ids of dynamic tables in a batch by frames, before the batch is routed.

A rank's distinct ids and their counts go to the owners of their logical shards. Each owner adds up the counts of all
ranks, opens the step, writes the rows of new ids, and answers frames. From there on the batch is one of dense tables.
Where tables have replicas, counts go to the owners in every replica group, which so decide alike; a rank takes the
answers of its own group. Replica groups that are averaged decide for themselves, each with a resolver of its own, and
`merge` makes one of what they know.

[Note: a batch is decided on all ranks, or on none]
A batch may be refused: by an owner that has no room, by a rank that cannot route it, by a hook, or as its rows do not
come. Then `step`, index, statistics and counters of every owner are as before it.

    before the request      the rank sends a request without ids, of a kind that says so (`pass_over`): all ranks raise,
                            nothing was decided
    in an owner             the answers say so: all ranks raise, every owner goes back
    later, on all ranks     each goes back by itself (`take_back`)
    later, on one rank      it goes back; the request of the next batch has the step of each rank, and the others, for
                            whom that batch can have no step, go back before they open it

Owners keep what batches changed until these have ended on all ranks. So a pipeline too can take back what it has opened
ahead (`go_back`). Hooks are told when the batch is not refused any more (`tell`).

All tables travel together, see `rowmesh.exchange.resolve.request_channel`.

Source: FusedRec §3.2 (missing keys are initialized by their owner). Differs: decisions are taken on the whole batch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from rowmesh._support.counters import CommonCounters
from rowmesh.errors import ConfigurationError, DataError, PeerError, RefusedError, RowmeshError
from rowmesh.exchange.resolve.asked import DynamicTable
from rowmesh.exchange.resolve.asking import Asked, RequestRouter
from rowmesh.exchange.resolve.averages import Averages
from rowmesh.exchange.resolve.device_tables import DeviceAsked, DeviceTables
from rowmesh.exchange.resolve.known import ask_statistics
from rowmesh.exchange.resolve.merging import MergedIds
from rowmesh.exchange.resolve.owners import Owners
from rowmesh.exchange.resolve.pins import BatchPin, BatchPins
from rowmesh.exchange.resolve.request_channel import (
    Arrived,
    BatchRequest,
    LocalRequestChannel,
    MessageRequestChannel,
    RequestChannel,
    SharedRequestChannel,
)
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.plain import PlainError, error_from_plain, error_to_plain
from rowmesh.mesh.together import first_failure
from rowmesh.mesh.waiting import gather_objects
from rowmesh.tables.dynamic.counters import DynamicCounters
from rowmesh.tables.dynamic.event_clock import NO_TIME
from rowmesh.tables.dynamic.hooks import DecisionHook, DecisionHooks
from rowmesh.tables.dynamic.layout import rules_of
from rowmesh.tables.dynamic.state import Statistics

_FIND, _OPEN, _AGAIN, _NONE, _REFUSED = range(5)  # kinds of requests


class Resolving:
    """The calls of a resolver for one batch, or for its items in turn; all are refused where a rank cannot route it.

    Args:
        resolver: of all dynamic tables.
        times: of the batch, or of each item, as for `Resolver.__call__`.
        is_ahead, again: as for `Resolver.__call__`.
        is_short: whether other batches have more items, so that ranks have to agree that this one has no more.
    """

    def __init__(
        self, resolver: Resolver, times: Sequence[int | None], *, is_ahead: bool, again: bool, is_short: bool = False
    ) -> None:
        self._resolver, self._options = resolver, {"is_ahead": is_ahead, "again": again}
        self._times, self._is_short = times, is_short
        self._num_begun, self._pins = 0, list[BatchPin]()

    def __call__(self, asked: Sequence[Asked], on_device: DeviceAsked | None = None) -> BatchPin:
        """Puts frames in the place of ids; see `Resolver.__call__`."""
        self._num_begun += 1
        pin = self._resolver(asked, on_device, time=self._times[len(self._pins)], **self._options)
        self._pins.append(pin)
        return pin

    def end(self) -> None:
        """There are fewer items than in other batches, and all are resolved. Collective.

        Raises:
            RefusedError: another rank has more; names it.
        """
        self._num_begun += 1
        self._resolver.pass_over()

    def refuse(self, error: Exception) -> None:
        """The batch cannot be routed: tells ranks that wait for this one, and takes back what was decided together."""
        has_failed_alone = self._num_begun == len(self._pins)
        if has_failed_alone and self._num_begun < len(self._times) + self._is_short:
            self._resolver.refuse(error)
        self._resolver.take_back(self._pins)
        for pin in self._pins:
            pin.end()


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
        merge_is_due: whether averaged replicas make one of what they know after the next batch.
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
        self._hook_mesh = mesh.with_process_group("decision hooks")  # they may be told while another thread resolves
        self._hook_channel = Channel.between_hosts(self._hook_mesh)
        self.pins, self.counters, self.step = BatchPins(), CommonCounters(), 0
        self.merge_is_due, self._fixed = False, 0  # up to this step nothing can be taken back
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
        self._request_channel: RequestChannel
        if mesh.world_size == 1:
            self._request_channel = LocalRequestChannel(columns)
        elif shares_memory:
            self._request_channel = SharedRequestChannel(self._mesh, len(tables), self.counters, columns)
        else:
            self._request_channel = MessageRequestChannel(self._channel, self.counters, columns)

    def __call__(
        self,
        asked: Sequence[Asked],
        on_device: DeviceAsked | None = None,
        *,
        time: int | None = None,
        is_ahead: bool = False,
        again: bool = False,
    ) -> BatchPin:
        """Puts frames in the place of ids. Collective: the other ranks call it too, or `pass_over`.

        Under `torch.no_grad()`, and for frozen tables, nothing is counted or admitted. Hooks are told by `tell`, which
        must follow, unless the batch is taken back. See [Note: a batch is decided on all ranks, or on none].

        Args:
            asked: the ids of a batch, by group.
            on_device: those of tables whose index is on the device, of which `asked` has none.
            time: of its latest event on this rank, in seconds, where that is known.
            is_ahead: whether a pipeline opens it before its turn.
            again: whether it is a batch under way that is computed again, which opens no step.

        Returns:
            The pin that keeps the frames until the batch has ended; its `step` is the one that was opened.

        Raises:
            NoRoomError, DataError, StoreError: on all ranks alike, where an owner cannot open the step; names it.
            RefusedError: a rank has no batch, or cannot route it; names it.
            PeerError: a rank died, or did not come; or ranks look up with gradients and without.
        """
        kind = _FIND if not torch.is_grad_enabled() else _AGAIN if again else _OPEN
        with self._lock:
            pin = self.pins.begin(is_ahead=is_ahead)
            try:
                self._resolve(asked, on_device, pin, NO_TIME if time is None else time, kind)
                return pin
            except BaseException:
                self._take_back(pin)
                pin.end()
                raise

    def pass_over(self, error: PlainError | None = None) -> None:
        """Takes the place of `__call__` on a rank that has no further batch, or cannot route it.

        Collective with `__call__` and `pass_over` of the other ranks, in the place of that batch: it takes part in the
        first message of the batch, by a request without ids. No rank decides anything. Where no rank has a batch, it
        returns, on all ranks; else it raises, and `__call__` on the other ranks raises the same.

        Args:
            error: why the batch cannot be routed, as `error_to_plain` gives it; None: there is no further batch.

        Raises:
            RefusedError: on all ranks alike, where some have no batch and others have one, or some batch is refused:
                its attributes name the ranks, and have the first error.
            PeerError: a rank died, or did not come.
        """
        with self._lock:
            pin = self.pins.begin()  # which ranks number alike
            try:
                arrived = self._send(_NONE if error is None else _REFUSED, NO_TIME)
                if arrived.kinds.count(_NONE) == len(arrived.kinds):
                    self._request_channel.answer(failed=True)
                    return
                self._check_kinds(arrived, error)
            finally:
                pin.end()

    def refuse(self, error: Exception) -> None:
        """Tells the other ranks that this one cannot look up its batch, in the place of `__call__`.

        Collective as `pass_over` is; the others raise, and the caller goes on to raise the error.
        """
        if self._mesh.world_size > 1:
            with contextlib.suppress(PeerError):  # the error itself says more
                self.pass_over(plain_of(error))

    def tell(self, pin: BatchPin, refuses: RowmeshError | None = None) -> None:
        """Tells hooks what was decided of a batch, which nothing but a hook refuses from here on.

        Collective where some rank has hooks, else no message. Messages are in a process group of their own: another
        thread may resolve later batches meanwhile. Each batch once, in the order of the batches: a plain look-up when
        its rows are there, a pipeline when it gives the batch to the loop.

        Args:
            pin: of the batch.
            refuses: why this rank does not go on with it, so that none does; its hooks are not told.

        Raises:
            RowmeshError: on all ranks alike, where a hook raised an error; names it. Nothing is taken back yet: all
                ranks must call `take_back`, or `go_back(pin.step - 1)`, before the next batch is opened. Hooks may
                have been told of the step, and are told of it again by the batch that has it then.
            PeerError: a rank died, or did not come.
        """
        if not pin.take_watched():
            return
        failure: PlainError | None = ["RowmeshError", f"rank {self._name}: telling hooks was interrupted"]
        first: PlainError | None = None
        try:
            if refuses is not None:
                raise refuses
            self._owners.tell(pin.step)
            failure = None
        except RowmeshError as error:
            failure = error_to_plain(error)
        finally:  # the others wait
            flag = torch.tensor([int(failure is not None)])
            if self._hook_channel.post_gather(flag, self.counters, "telling hooks").wait().any():
                first = first_failure(self._hook_mesh, failure, "telling hooks")
        if first is not None:
            raise error_from_plain(first)

    def merge(self) -> dict[str, MergedIds]:
        """Makes one of what replica groups know that decide for themselves. Collective among the replicas of this rank.

        Returns:
            By table, the ids whose rows must be averaged.

        Raises:
            NoRoomError, StoreError: on all ranks alike, where ids do not fit, or a store does not answer; nothing has
                changed then.
        """
        assert self.averages is not None
        with self._lock:
            merged = self.averages(self.pins.next - 1, self.step, self.counters, self._agree)
            self._fixed = self.step
            return merged

    def pass_over_merge(self) -> None:
        """Takes the place of `merge` on ranks of a replica group that has not opened the last batch.

        Collective with `merge`, which then raises RefusedError, and changes nothing.
        """
        assert self.averages is not None
        with self._lock:
            self.averages.pass_over(self.counters)

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

    @property
    def is_opening(self) -> bool:
        """Whether a thread resolves a batch now."""
        return self._lock.locked()

    def expect_merge(self, *, is_due: bool) -> None:
        """Takes whether replicas merge what they know after the next batch."""
        self.merge_is_due = is_due

    @property
    def can_undo(self) -> bool:
        """Whether the next batch, if it is opened now, could be taken back by `go_back`.

        Not where an index is on a device, and not where averaged replicas make one of what they know after it
        (`merge_is_due`). A pipeline opens such a batch only when it is the next to be given to the loop.
        """
        return self._on_device is None and not self.merge_is_due

    def go_back(self, step: int) -> None:
        """Takes back what batches that were opened after a step decided, as if they had never been.

        Local: the other ranks do the same, when no thread looks anything up. None of these batches may have ended: it
        is called before their routes are dropped. `step` is that of the last batch that stands, `BatchPin.step`; with
        none of them opened it does nothing. Index, counts, scores, sketches, clocks, demoted ids, counters and what
        hooks were not told yet go back; hooks that were told are told of the step again.

        Args:
            step: from here on as many batches were opened.
        """
        with self._lock:
            assert self.can_go_back(step), "these batches cannot be taken back, see `can_undo`"
            if step < self.step:
                self._go_back(step)

    def go_back_where_possible(self, step: int) -> None:
        """As `go_back`, but for batches that cannot be taken back, which stand on all ranks alike."""
        self.go_back(next(each for each in range(step, max(step, self.step) + 1) if self.can_go_back(each)))

    def take_back(self, pins: Sequence[BatchPin]) -> None:
        """Batches that follow each other are refused after all.

        They opened no step, where none was opened since and undo is not missing.
        """
        with self._lock:
            for pin in reversed(pins):
                self._take_back(pin)

    def _take_back(self, pin: BatchPin) -> None:
        if pin.step == self.step > 0 and not pin.is_taken_back and self.can_go_back(pin.step - 1):
            self._go_back(pin.step - 1)
        pin.take_watched()  # a batch that stands is refused all the same

    def _go_back(self, step: int) -> None:
        self._owners.go_back(step)
        self.pins.take_back(step)
        self.step = step

    def can_go_back(self, step: int) -> bool:
        """Whether what was decided since a step can be taken back."""
        return step >= min(self._fixed, self.step)

    def set_dynamic_step(self, step: int) -> None:
        """Goes on from a step whose knowledge was loaded: nothing before it can be taken back."""
        with self._lock:
            self._owners.forget_opened()
            self.step = self._fixed = step

    @property
    def decided(self) -> dict[str, DynamicCounters]:
        """Counters of the tables of which this rank has shards."""
        return {name: table.owned.counters for name, table in self.tables.items() if table.owned is not None}

    @property
    def reported(self) -> dict[str, DynamicCounters]:
        """Counters that add up over all ranks: this rank's for each table, or zeros where others have the same."""
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
                f"{what} when every rank has called its pause(), or its loop over `windows` has ended and nothing "
                "holds its batches, as the traceback of an error in it may"
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

    def guests_of(self, pins: Sequence[BatchPin]) -> dict[str, list[int]]:
        """Rows of each table that this rank's shards gave guests of some batches; local, in any thread."""
        numbers, owned = [pin.number for pin in pins], {name: table.owned for name, table in self.tables.items()}
        return {name: [] if each is None else each.guests_of(numbers).tolist() for name, each in owned.items()}

    def register_hook(self, table: str, hook: DecisionHook) -> RemovableHandle:
        """Tells a hook what this rank decides of a table from the next batch on, see `tell`; local.

        Raises:
            ConfigurationError: there is no such dynamic table.
        """
        self._check_dynamic(table)
        with self._lock:
            hooks = self._hooks.setdefault(table, DecisionHooks(table, str(self._mesh.name(self._mesh.rank))))
            handle = hooks.add(hook)
            owned, grid = self.tables[table].owned, self.tables[table].grid
            if owned is not None and grid.place(self._mesh.rank)[0] == 0:  # other replicas decide the same
                owned.tell_hooks(hooks)
                self._owners.note_hooks()
            return handle

    def _check_dynamic(self, table: str) -> None:
        if table not in self.tables:
            raise ConfigurationError(f"{table!r} is no dynamic table; there are {[*self.tables]}")

    def _send(self, kind: int, time: int, asked: Sequence[Asked] = ()) -> Arrived:
        """Sends the request of a batch, and waits for those of the others."""
        router = self._request_router
        sizes = router.count(asked)
        is_watched = kind == _OPEN and self._owners.is_watched
        request = BatchRequest(kind, self.pins.first, sizes, router.answers, time, self.step, is_watched)
        return self._request_channel.send(request, partial(router.fill, asked, sizes))

    def _resolve(
        self, asked: Sequence[Asked], on_device: DeviceAsked | None, pin: BatchPin, time: int, kind: int
    ) -> None:
        is_frozen = [each.is_frozen for each in asked for _ in each.offsets[1:]]
        if kind != _FIND:
            try:
                self._check_scores(asked, is_frozen)
            except DataError as error:
                self._refuse(error)
                raise
        arrived = self._send(kind, time, asked)
        self._check_kinds(arrived)
        failure = self._go_back_with(arrived)
        is_again = kind == _AGAIN and _OPEN not in arrived.kinds
        opened = [kind != _FIND and not is_again and not each for each in is_frozen]
        again = [is_again and not each for each in is_frozen]
        if kind != _FIND and not is_again:
            self.step += 1
            pin.open(self.step, is_watched=arrived.is_watched)
        found = [] if all(opened) else [(each, each.found, each.missing) for each in self.decided.values()]
        failure = failure or self._owners.release(arrived.first)
        ahead = self.pins.ahead
        failure = failure or self._owners.decide(arrived, pin.number, opened, self.step, ahead, again)
        if self._on_device is not None and on_device is not None and failure is None:
            failure = self._on_device.decide(on_device, pin.number, opened, self.step, ahead, again)
            self._fixed = self.step if failure is None else self._fixed
        has_failed, rows_at = self._request_channel.answer(failed=failure is not None)
        if has_failed or is_again:
            for counters, *numbers in found:
                counters.set_found(*numbers)
        if has_failed:
            self._raise(failure)
        self._request_router.take(asked, rows_at)
        if not all(opened):
            self._note_shared(asked, [one or other for one, other in zip(opened, again, strict=True)])

    def _refuse(self, error: BaseException) -> None:
        """Tells the others that this rank cannot look up its batch; they raise, and the caller does."""
        with contextlib.suppress(RefusedError):
            self._check_kinds(self._send(_REFUSED, NO_TIME), error_to_plain(error))

    def _check_scores(self, asked: Sequence[Asked], is_frozen: Sequence[bool]) -> None:
        specs = iter(zip(self.tables.values(), is_frozen, strict=True))
        for each in asked:
            of_group = [next(specs) for _ in each.offsets[1:]]
            for table, is_passed_over in of_group:
                if not is_passed_over and each.scores is None and table.spec.takes_scores:
                    raise DataError(
                        f"dynamic table {table.spec.name!r} evicts by scores of the caller, and the batch has none; "
                        "give SparseBatch(…, scores=…), or take another eviction"
                    )

    def _note_shared(self, asked: Sequence[Asked], has_own: Sequence[bool]) -> None:
        """Notes where unknown ids may share a row of zeros: of tables whose ids do not all have rows of their own."""
        tables, place = [*self.tables.values()], 0
        for each in asked:
            of_group = range(place, place + len(each.offsets) - 1)
            are_distinct = (has_own[i] or rules_of(tables[i].spec).missing != "zero" for i in of_group)
            each.note_rows(are_distinct=all(are_distinct))
            place = of_group.stop

    @property
    def _name(self) -> str:
        return str(self._mesh.name(self._mesh.rank))

    def _check_kinds(self, arrived: Arrived, refused: PlainError | None = None) -> None:
        """Raises on all ranks alike where they do not look up a batch together.

        Args:
            arrived: what came.
            refused: why this rank cannot look up its batch.
        """
        kinds = set(arrived.kinds)
        if kinds in ({_FIND}, {_OPEN}, {_AGAIN}, {_OPEN, _AGAIN}):
            return
        self._request_channel.answer(failed=True)  # all have read what they were sent
        ranks = {kind: [rank for rank, each in enumerate(arrived.kinds) if each == kind] for kind in kinds}
        names = {kind: [self._mesh.name(rank) for rank in of_kind] for kind, of_kind in ranks.items()}
        if _REFUSED in kinds:
            first = first_failure(self._mesh, refused, "resolving ids")
            assert first is not None
            raise RefusedError(
                f"rank {self._name}: no rank looks up this batch, which ranks {names[_REFUSED]} cannot look up: "
                f"{error_from_plain(first)}",
                ranks.get(_NONE, []),
                ranks[_REFUSED],
                first,
            )
        if _NONE in kinds:
            raise RefusedError(
                f"rank {self._name}: no rank looks up this batch, as ranks {names[_NONE]} have no further one; every "
                "rank must bring equally many batches",
                ranks[_NONE],
            )
        training = [self._mesh.name(rank) for rank, kind in enumerate(arrived.kinds) if kind != _FIND]
        raise PeerError(
            f"rank {self._name}: ranks {training} look up with gradients, the others without; every rank must train "
            "and evaluate alike"
        )

    def _go_back_with(self, arrived: Arrived) -> PlainError | None:
        """Takes back a batch that was refused on another rank alone, after its last message; returns why it cannot."""
        step = min(arrived.steps)
        if step == max(arrived.steps):
            return None
        if max(arrived.steps) > step + 1 or not self.can_go_back(step):
            steps = ", ".join(f"rank {self._mesh.name(rank)} {each}" for rank, each in enumerate(arrived.steps))
            text = f"rank {self._name}: ranks have opened differently many batches of dynamic tables: {steps}"
            return error_to_plain(PeerError(f"{text}; begin anew, or load a checkpoint on all ranks"))
        if step < self.step:
            self._go_back(step)
        return None


def plain_of(error: Exception) -> PlainError:
    """An error of this rank for the others: those of rowmesh and the system as they are, and others by their name."""
    is_known = isinstance(error, RowmeshError | OSError | MemoryError)
    return error_to_plain(error if is_known else RowmeshError(f"{type(error).__name__}: {error}"))

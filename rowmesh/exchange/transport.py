"""Transport: the contract between routing and the wires, and the transport of one rank.

    fetch             afterwards the rows of every unique id of every group can be read
    a push            owners merge the gradients of all ranks and update their rows
    windows           of a pipeline, which travel whole or by micro-batch (`rowmesh.exchange.windows`)

[Note: a step is taken by all ranks or by none]
A push has three parts, each of which a step does for all its groups of tables before the next one begins:

    prepare   what may fail for want of memory, room or ids, without messages: requests are merged, tiered rows pinned,
              room is made
    agree     ranks say whether they can go on, in a message that is sent anyway (or beside a barrier). Where one
              cannot, all raise; no row has changed, gradients are kept, and the same step may be tried again
    apply     gradients travel, rows change. Nothing is undone: where a rank fails now, the tables are of no use any
              more, which all ranks learn (`rowmesh.mesh.failures`)

Messages may bring more than a rank can know before. It has as much room for them as steps before needed; where ranks
see that one needs more, they make it and agree once more.

All are collective: every rank calls them equally often and in the same order, or all ranks get a PeerError that says
which rank does what. The routes that ranks push need not be the same, nor as many: a rank whose loss did not use a
look-up has none to push, and adds nothing.

All transports give the same results to the bit: requests are merged in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from rowmesh._support.counters import CommonCounters
from rowmesh.errors import IdRangeError, RefusedError
from rowmesh.exchange.device_group import DeviceGroupExchange, DeviceRouteGroup
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.micro_batch import windows_on_hosts
from rowmesh.exchange.route import AnyRouteGroup, Routed
from rowmesh.exchange.windows import PrefetchedWindows, StoredTables, WindowOptions, Windows
from rowmesh.mesh import Mesh
from rowmesh.ops.memory import Buffer, Memory
from rowmesh.ops.transfer import Late
from rowmesh.tables import TableGroup
from rowmesh.tables.update_rules import Update

X = TypeVar("X", bound=GroupExchange)
Meanwhile = Callable[[AnyRouteGroup], None]
"""Work for each group while its rows travel."""


class Pushes(Protocol):
    """Tables that can take a step by themselves, see [Note: a step is taken by all ranks or by none]."""

    def agree(self, step: Step, refusal: Exception | None) -> Exception | None: ...
    def withdraw(self) -> None: ...


def collect(pushes: Pushes, prepare: Callable[[], None], step: Step) -> None:
    """The first two parts of a push; `apply` may follow. Collective.

    Args:
        pushes: what agrees.
        prepare: its first part.
        step: of this rank.

    Raises:
        Exception: why no rank takes the step; nothing has changed then.
    """
    refusal = None
    try:
        prepare()
    except Exception as error:
        refusal = error
    if (refusal := pushes.agree(step, refusal)) is not None:
        pushes.withdraw()
        raise refusal


class Transport(Generic[X]):
    """How rows and gradients reach other ranks.

    Attributes:
        name: as it is asked for.
        reason: why this transport was chosen.
        common: counts the messages that serve all groups.
    """

    name: Literal["local", "one_sided", "collective"]

    def __init__(self, reason: str = "") -> None:
        self.common, self.reason = CommonCounters(), reason
        self._exchanges: Sequence[X] = ()
        self._pushed: tuple[Sequence[Routed], Sequence[Update], Step] | None = None  # what is prepared

    def count_into(self, common: CommonCounters) -> None:
        """Counts the messages that serve all groups there, before any is sent."""
        self.common = common

    @property
    def num_bytes(self) -> int:
        """Memory of this rank that messages need, beside what batches hold."""
        return 0

    def make_room(self) -> None:
        """Takes the memory that the transport itself needs, before rows have theirs.

        Raises:
            MemoryError: there is none.
        """

    def rows_for(self, group: TableGroup, num_slots: Sequence[int], rank: int) -> Tensor | None:
        """Memory for a rank's rows, `[slots, D]`, where other ranks must be able to read them; None: any memory.

        Args:
            group: whose.
            num_slots: of every rank.
            rank: this one.
        """
        return None

    def allocate(self, num_bytes: int) -> Memory:
        """On the host, memory for what is sent: requests and gradients."""
        return Buffer(num_bytes)

    def connect(self, exchanges: Sequence[X]) -> None:
        """Connects the ranks; collective, once, after all rows have their values."""
        self._exchanges = exchanges

    def windows(self, tables: StoredTables, options: WindowOptions) -> Windows:
        """Makes the windows of a pipeline: whole, where a transport cannot send them by micro-batch. Collective.

        Args:
            tables: the shard group that this serves.
            options: what the pipeline asks for.
        """
        return Windows(tables, options, f"the transport is {self.name}, which reads rows in place")

    def fetch(self, route: Routed, meanwhile: Meanwhile) -> None:
        """Makes the route's rows readable; calls `meanwhile` for each group while its rows travel."""
        raise NotImplementedError

    # The parts of a push, see [Note: a step is taken by all ranks or by none]

    def prepare(self, routes: Sequence[Routed], updates: Sequence[Update], step: Step) -> None:
        """Does what may fail of a push, without messages; changes no row."""
        self._pushed = routes, updates, step

    def agree(self, step: Step, refusal: Exception | None) -> Exception | None:
        """Ranks tell each other whether they can go on. Collective.

        Args:
            step: of this rank.
            refusal: why this rank cannot, which has prepared nothing then.

        Returns:
            Why no rank may; None where all can.

        Raises:
            PeerError: a rank does something else, or none answers.
        """
        return refusal

    def apply(self) -> None:
        """Does what was prepared. Collective."""
        raise NotImplementedError

    def withdraw(self) -> None:
        """Forgets what was prepared; rows that were pinned for it may leave fast memory."""
        self._pushed = None

    def fail(self, step: int) -> None:
        """Notes that this rank failed amid a step: others stop waiting for it, where a transport can tell them."""

    def publish(self) -> None:
        """Notes that rows of all ranks changed other than by a push; the next fetch reads the new values."""

    def barrier(self) -> None:
        """Waits for all ranks."""

    def close(self) -> None:
        """Frees the transport's memory and connections."""


class LocalTransport(Transport[GroupExchange]):
    """A rank alone: rows are read and updated in place.

    Args:
        reason: why there is one.
        rank: its name, for messages.
    """

    name = "local"

    def __init__(self, reason: str = "there is one rank", rank: int = 0) -> None:
        super().__init__(reason)
        self._late = LateChecks(rank)

    def windows(self, tables: StoredTables, options: WindowOptions) -> Windows:
        """Windows whose tiered rows are pinned ahead; rows of one rank do not travel."""
        on_device = [each for each in self._exchanges if isinstance(each, DeviceGroupExchange)]
        if not any(exchange.is_tiered for exchange in self._exchanges):
            return super().windows(tables, options)
        if on_device:
            return PrefetchedWindows(tables, options, on_device)
        return windows_on_hosts(tables, options, self._exchanges, self.common)

    def fetch(self, route: Routed, meanwhile: Meanwhile) -> None:
        """Puts rows of cached tables into fast memory; all other rows are readable already."""
        self._late.add(route)
        for group in route.groups:
            if group.exchange.device is not None:
                meanwhile(group)
        for group in route.groups:
            if group.exchange.is_tiered:
                group.exchange.prefetch(group)

    def prepare(self, routes: Sequence[Routed], updates: Sequence[Update], step: Step) -> None:
        """Merges requests and pins their rows."""
        self._late.read()
        for index, exchange in enumerate(self._exchanges):
            if not exchange.is_frozen:
                exchange.prepare_alone([route.groups[index] for route in routes])
        self._pushed = routes, updates, step

    def apply(self) -> None:
        """Updates."""
        assert self._pushed is not None
        routes, updates, _ = self._pushed
        for index, (exchange, update) in enumerate(zip(self._exchanges, updates, strict=True)):
            groups = [route.groups[index] for route in routes]
            if exchange.is_frozen:
                for group in groups:
                    group.unpin()
            else:
                exchange.update_alone(groups, update)
        self._pushed = None

    def withdraw(self) -> None:
        """Forgets what was prepared."""
        super().withdraw()
        for exchange in self._exchanges:
            exchange.withdraw()

    def barrier(self) -> None:
        """Checks batches that the host has not looked at yet; there is no other rank to wait for."""
        self._late.read()

    def close(self) -> None:
        """Forgets batches that the host has not looked at."""
        self._late.clear()


# Ids that are no rows, on a device: counted there, looked at by the host before anything is updated


def count_unique(group: DeviceRouteGroup, numbers: Sequence[int]) -> None:
    """Counts unique ids, which the numbers add up to."""
    count = sum(numbers)
    group.look_up.note_found(count)
    group.exchange.counters.add_unique(count)


def _num_unique(group: DeviceRouteGroup) -> Tensor:
    return group.look_up.count


class LateChecks:
    """Batches on a device whose numbers the host has not looked at: ids outside their tables, and some of each group.

    On the host, where ids are checked when they are routed, there are none.

    Args:
        rank: this one, for messages.
        numbers: int64 `[n]` of a group, on the device: by default how many unique ids it has.
        take: is given them when the host knows them.
    """

    def __init__(
        self,
        rank: int,
        numbers: Callable[[DeviceRouteGroup], Tensor] = _num_unique,
        take: Callable[[DeviceRouteGroup, list[int]], None] = count_unique,
    ) -> None:
        self._rank, self._numbers, self._take = rank, numbers, take
        self._waiting: list[tuple[Routed, list[int], Late]] = []

    def add(self, route: Routed) -> None:
        """Checks earlier batches and starts copying this one's numbers; waits for them where no later call may check.

        Raises:
            IdRangeError: a batch had ids that are no rows.
        """
        if route.late is None:
            return
        self.read()
        self.post(route)
        if not torch.is_grad_enabled():
            self.read()

    def post(self, route: Routed) -> None:
        """Starts copying a batch's numbers to the host."""
        assert route.late is not None
        parts = [route.late.outside, *(self._numbers(group) for group in route.groups)]
        self._waiting.append((route, [len(part) for part in parts], Late(torch.cat(parts))))

    def read(self) -> None:
        """Checks all waiting batches; waits for the device's work up to their numbers, not for later work.

        Raises:
            IdRangeError: a batch had ids that are no rows; the numbers of the others were taken.
        """
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        errors = [error for route, sizes, numbers in waiting for error in self._read(route, sizes, numbers)]
        if errors:
            raise errors[0]

    def _read(self, route: Routed, sizes: Sequence[int], coming: Late) -> list[IdRangeError]:
        late, numbers = route.late, iter(coming.read())
        assert late is not None
        outside, *of_groups = (list(islice(numbers, size)) for size in sizes)
        for group, mine in zip(route.groups, of_groups, strict=True):
            self._take(group, mine)
        try:
            late.check(outside, self._rank)
        except IdRangeError as error:
            return [error]
        return []

    def clear(self) -> None:
        """Forgets them."""
        self._waiting.clear()


def check_everywhere(route: Routed, mesh: Mesh, outside: Sequence[int], refused: Sequence[int]) -> None:
    """Raises on all ranks where one of them has ids that are no rows.

    Args:
        route: of this rank.
        mesh: the ranks.
        outside: what the route has on the device.
        refused: how many ids each rank refuses.

    Raises:
        IdRangeError: this rank does.
        RefusedError: another one does.
    """
    assert route.late is not None
    route.late.check(outside, mesh.name(mesh.rank))
    check_peers(mesh, refused)


def check_peers(mesh: Mesh, refused: Sequence[int]) -> None:
    """Raises RefusedError where a rank refuses a batch; names it."""
    if any(refused):
        guilty = ", ".join(f"rank {mesh.name(rank)}" for rank, count in enumerate(refused) if count)
        raise RefusedError(
            f"rank {mesh.name(mesh.rank)}: {guilty} refused a batch with ids outside their tables; its own output says "
            "which",
            refused=[rank for rank, count in enumerate(refused) if count],
        )

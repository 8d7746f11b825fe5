"""CoreShardGroup: the tensor-train tables of a collection, whose cores every rank holds.

Nothing travels to look rows up: each rank computes those of its own distinct ids from the cores. Their gradients become
gradients of the cores, which all ranks add up in one fused vector for all tables (`rowmesh.mesh.ordered_sums`): they
are dense, since a batch reads most slices, at 1 M rows about a hundred of each core. Then every rank makes the same
update. Plans and replicas do not concern them.

Source: EL-Rec §III (fused update) and §V (cores on every worker, data-parallel).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rowmesh._support.counters import CommonCounters
from rowmesh._support.faults import reach
from rowmesh.errors import ConfigurationError
from rowmesh.exchange.core_group import CoreGroup, DeviceCoreGroup, HostCoreGroup
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.handshake import Handshake, Step, StepRefusedError, after_hearing, check_rates
from rowmesh.exchange.migration import Moved
from rowmesh.exchange.route import AnyRouteGroup, Route, ShardGroupRoute
from rowmesh.exchange.transport import LateChecks, check_everywhere, collect, count_unique
from rowmesh.exchange.transports import TransportName, transport_for
from rowmesh.exchange.windows import WindowOptions, Windows
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.ordered_sums import CollectiveSums, OrderedSums, SharedSums
from rowmesh.ops.memory import round_up
from rowmesh.ops.tensor_train import Lookup
from rowmesh.tables import TableGroup
from rowmesh.tables.cores import Cores

_Found = tuple[int, int, tuple[Lookup, Tensor]]
USE = "cores"  # what the process group of sums is for
_TABLE_ALIGNMENT = 16  # elements: a cache line of float32


class CoreShardGroup:
    """Groups of tensor-train tables on one rank. Takes part in a collection as `ShardGroup` does.

    Args:
        device: of this rank; None: the host.
        mesh: all ranks.
        groups: of the collection.
        indices: numbers of those with tensor-train tables.
        transport: how gradients travel; on a device always by messages.
        common: counts the messages.

    Attributes:
        mesh: all ranks.
        transport_name: "local", "one_sided" or "collective".
        reason: why that.
        exchanges: of the groups, in their order; made by `allocate`.
        indices: their numbers in the collection.
    """

    title = "tensor-train tables"  # for people

    def __init__(
        self,
        device: torch.device | None,
        mesh: Mesh,
        groups: Sequence[TableGroup],
        indices: Sequence[int],
        transport: TransportName,
        common: CommonCounters,
    ) -> None:
        self.mesh, self.indices, self._device = mesh, list(indices), device
        self.transport_name, self.reason = transport_for(transport if device is None else "collective", mesh)
        self.exchanges: list[GroupExchange] = []
        self._groups: list[CoreGroup] = []
        self._tables, self._common = [groups[index] for index in indices], common
        self._sums: OrderedSums | None = None
        self._channel: Channel | None = None
        self._updated: int | None = 0  # after which step cores are; None: amid an update
        self._late = LateChecks(mesh.name(mesh.rank))
        self._gradients: list[_Found] = []  # of rows, of this rank, in the push under way
        self._total: Tensor | None = None  # the gradients of the cores, of all ranks
        self._pushed: tuple[list[list[AnyRouteGroup]], Step] | None = None  # what is prepared
        # On devices. Where there are dense tables, their messages bring what ranks must know of each other.
        self._compares = device is not None and mesh.world_size > 1 and len(indices) == len(groups)
        self._num_fetches = self._num_pushes = 0
        if device is not None and mesh.world_size > 1:
            self._channel = Channel.between_devices(mesh, device)
            self.reason = self._channel.reason
            if transport == "one_sided":
                self.reason += "; not one_sided: devices add gradients of cores up by messages"
        elif device is not None:
            self.reason = f"there is one rank, on {device}"

    def allocate(self) -> None:
        """Makes room for the cores.

        Raises:
            MemoryError: a device has none.
        """
        device = self._device
        self._groups = [
            HostCoreGroup(group) if device is None else DeviceCoreGroup(group, device) for group in self._tables
        ]
        self.exchanges = [group.exchange for group in self._groups]

    def connect(self) -> None:
        """Makes ranks known to each other. Collective."""
        self._layout = CoreLayout([cores for group in self._groups for cores in group.arena.tables])
        self._sums = self._make_sums(self._layout.size, self._tables[0].dtype)
        if self._compares:
            hosts = Channel.between_hosts(self.mesh)
            self._handshake = Handshake(self.mesh, hosts, 2, self._common)

    def _make_sums(self, size: int, dtype: torch.dtype) -> OrderedSums | None:
        """Makes the sums of vectors of so many elements over ranks; None where a rank is alone."""
        if self.transport_name == "local":
            return None
        if self.transport_name == "one_sided":
            return SharedSums(self.mesh, size, dtype)
        channel = self._channel
        if channel is None:
            # A group of its own: other threads may send those of the network meanwhile.
            group = self.mesh.subgroup([range(self.mesh.world_size)], USE)
            channel = Channel(self.mesh, group, self.mesh.rank, self.mesh.world_size)
        what = "gradients of cores"
        return CollectiveSums(self.mesh, channel, size, dtype, self._common, self._device, what)

    def cores(self, table: str) -> Cores:
        """The cores of one of the tables, by its name."""
        (found,) = (cores for group in self._groups for cores in group.arena.tables if cores.table == table)
        return found

    def fill_from(self, before: CoreShardGroup) -> Moved:
        """Takes the cores and states of another part for the same tables; nothing moves between ranks."""
        for mine, theirs in zip(self._groups, before._groups, strict=True):
            mine.arena.copy_from(theirs.arena)
        return Moved(rows=0, num_bytes=0)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        own = 0 if self._sums is None else self._sums.num_bytes
        return own + sum(group.exchange.num_bytes + group.arena.buffer_bytes for group in self._groups)

    def fetch(self, route: Route, meanwhile: Callable[[AnyRouteGroup], None]) -> None:
        """Computes the rows of this rank's distinct ids; no communication, but between devices without dense tables.

        Raises:
            IdRangeError: on a device, a batch of this rank has ids that are no rows.
            PeerError: on devices, one of another rank has.
        """
        mine = ShardGroupRoute(route, self.indices)
        if self._compares:
            self._late.read()
            self._compare(mine)
        else:
            self._late.add(mine)
        for group, of_group in zip(self._groups, mine.groups, strict=True):
            group.fetch(of_group)

    def _compare(self, route: ShardGroupRoute) -> None:
        """All ranks learn which of them refuse their batch; the host waits for this rank's numbers."""
        assert route.late is not None
        self._num_fetches += 1
        unique = [group.look_up.unique.num_unique for group in route.groups]
        refused, *numbers = torch.cat([route.late.refused, route.late.outside, *unique]).tolist()
        everyone = self._handshake(self._num_fetches, None, [np.array([[refused]])])[:, 1].tolist()
        check_everywhere(route, self.mesh, numbers[: len(route.late.outside)], everyone)
        for group, count in zip(route.groups, numbers[len(route.late.outside) :], strict=True):
            count_unique(group, [count])

    def windows(self, options: WindowOptions) -> Windows:
        """The windows of a pipeline over these tables. Collective."""
        return Windows(self, options, "tensor-train rows are computed where they are looked up")

    def collect(self, routes: Sequence[Route], step: Step) -> None:
        """As `ShardGroup.collect` does. Collective."""
        collect(self, partial(self.prepare, routes, step), step)

    # The parts of a push, see [Note: a step is taken by all ranks or by none] in `rowmesh.exchange.transport`. On
    # devices all is launched when it is applied.

    def prepare(self, routes: Sequence[Route], step: Step) -> None:
        """Computes the gradients of rows, and where other ranks have a part those of the cores; changes no core."""
        pushed = [[route.groups[index] for route in routes] for index in self.indices]
        if self._device is None:
            reach("cores.prepare")
            self._gradients = list(self._found(pushed))
            if self._sums is not None:
                self._fill(self._sums.begin(), step)
            else:
                for number, table, (lookup, _) in self._gradients:
                    lookup.make_room_to_update(self._groups[number].arena.tables[table].cores)
        else:
            self._late.read()
        self._pushed = pushed, step

    def agree(self, step: Step, refusal: Exception | None) -> Exception | None:
        """Adds up the gradients of all ranks, beside which each says whether it can go on. Collective."""
        if self._device is not None:
            return self._agree_on_hosts(step, refusal) if self._compares else refusal
        if (sums := self._sums) is None:
            return refusal
        if refusal is not None:
            self._layout.write_word(sums.begin(), step.digest, refuses=True)
        self._total = sums.finish()
        if not self._layout.has_one_digest(self._total, self.mesh.world_size):
            try:
                check_rates(self.mesh, [0, 1], step)
            except ConfigurationError as error:
                refusal = refusal or error
        if refusal is None and self._layout.is_refused(self._total):
            refusal = StepRefusedError(f"rank {self.mesh.name(self.mesh.rank)}: another rank cannot take this step")
        return refusal

    def _agree_on_hosts(self, step: Step, refusal: Exception | None) -> Exception | None:
        """The same for devices, whose hosts compare what they do."""
        self._num_pushes += 1
        try:
            rows = self._handshake(-self._num_pushes, step, refuses=refusal is not None)
        except ConfigurationError as error:
            return refusal or error
        return after_hearing(self.mesh, rows[:, 0].tolist(), refusal)

    def apply(self) -> None:
        """Updates the cores."""
        assert self._pushed is not None
        (pushed, step), scaling = self._pushed, 1.0 / self.mesh.world_size
        rates = [step.rates[index] for index in self.indices]
        numbers = [
            group.optimizer.numbers(rate.lr, scaling * rate.factor, step.number)
            for group, rate in zip(self._tables, rates, strict=True)
        ]
        if self._sums is None:
            gradients_found = self._gradients if self._device is None else self._found(pushed)
            for number, table, (lookup, gradients) in gradients_found:
                self._groups[number].arena.update(table, lookup, gradients, numbers[number])
        else:
            self._update_together(self._sums, pushed, numbers, step)
        self.forget()
        for group, of_group in zip(self._groups, pushed, strict=True):
            group.finish(of_group)
        self.withdraw()

    def withdraw(self) -> None:
        """Forgets what was prepared."""
        self._pushed = self._total = None
        self._gradients = []

    def fail(self, step: int) -> None:
        """Notes that this rank failed amid a step: others stop waiting for it, where they wait in shared memory."""
        if self._sums is not None:
            self._sums.fail(step)

    is_half_done = False

    def begin_after(self, steps: int) -> None:
        """Says after how many steps the cores are."""
        self._updated = steps

    def rows_after(self, steps: int) -> bool:
        """Whether the cores here are those after so many steps, wherever this is asked."""
        return self._updated == steps

    def gradients(self, routes: Sequence[Route]) -> list[Tensor]:
        """Gradients of all cores by the ids of this rank, flat, in float64 and in the host's memory; for their norm."""
        pushed = [[route.groups[index] for route in routes] for index in self.indices]
        found = {(number, table): (lookup, rows) for number, table, (lookup, rows) in self._found(pushed)}
        gradients: list[Tensor] = []
        for number, group in enumerate(self._groups):
            for table, cores in enumerate(group.arena.tables):
                of_cores: Sequence[Tensor] = [torch.zeros_like(core) for core in cores.cores]
                if (number, table) in found:
                    lookup, rows = found[number, table]
                    of_cores = lookup.gradients(cores.cores, rows, sparse=False)
                gradients += [gradient.flatten().cpu().double() for gradient in of_cores]
        return gradients

    def _found(self, pushed: Sequence[Sequence[AnyRouteGroup]]) -> Iterator[_Found]:
        """Tables with gradients here: number of the group, number of the table in it, look-up and gradients of rows."""
        for number, (group, of_group) in enumerate(zip(self._groups, pushed, strict=True)):
            if group.exchange.is_frozen:
                continue
            for table in range(len(group.arena.tables)):
                if (found := group.gradients(of_group, table)) is not None:
                    yield number, table, found

    def _fill(self, vector: Tensor, step: Step) -> None:
        """Writes the gradients of the cores that were found here."""
        views = self._layout.views(vector)
        if self._device is None:  # for devices hosts compare what they do
            self._layout.write_word(vector, step.digest, refuses=False)
        for number, table, (lookup, found) in self._gradients:
            cores = self._groups[number].arena.tables[table]
            gradients, touched = views[cores.table]
            lookup.fill_gradients(cores.cores, found, gradients)
            lookup.prefixes.mark_touched(touched)

    def _update_together(
        self,
        sums: OrderedSums,
        pushed: Sequence[Sequence[AnyRouteGroup]],
        numbers: Sequence[tuple[float, ...]],
        step: Step,
    ) -> None:
        total = self._total
        if total is None:
            self._gradients = list(self._found(pushed))
            self._fill(sums.begin(), step)
            total = sums.finish()
        totals, self._updated = self._layout.views(total), None
        for group, of_group in zip(self._groups, numbers, strict=True):
            for table, cores in enumerate(group.arena.tables):
                group.arena.apply(table, *totals[cores.table], of_group)
        self._updated = step.number

    def forget(self) -> None:
        """The cores change: products made of them before are stale."""
        for group in self._groups:
            group.arena.note_change()

    def flush_own(self) -> None:
        """Cores are always up to date."""

    def barrier(self) -> None:
        """Waits for all ranks and their devices; raises what is wrong with batches that the host did not look at."""
        self._late.read()
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._sums is not None:
            self._sums.barrier()

    def close(self) -> None:
        """Gives back what is held for other ranks."""
        self._late.clear()
        if self._sums is not None:
            self._sums.close()


class CoreLayout:
    """Where the gradients of each table are in the fused vector, and which slices a rank read.

    Args:
        tables: in the order of the vector.

    Attributes:
        size: elements of the vector.
    """

    def __init__(self, tables: Sequence[Cores]) -> None:
        self.size = 0
        self._gradients = {cores.table: [self._place(tuple(core.shape)) for core in cores.cores] for cores in tables}
        self._touched = {cores.table: [self._place((len(core),)) for core in cores.cores] for cores in tables}
        self._digest = self.size
        self._refusals = self.size + _TABLE_ALIGNMENT
        self.size += 2 * _TABLE_ALIGNMENT
        self._views: dict[int, dict[str, tuple[list[Tensor], list[Tensor]]]] = {}

    def _place(self, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        begin = self.size
        self.size += round_up(math.prod(shape), _TABLE_ALIGNMENT)
        return begin, shape

    def views(self, vector: Tensor) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
        """For each table the gradients of its cores, and for each core an element a slice, not 0 where a rank read it.

        Views of a vector are kept: vectors come again and again.
        """
        if vector.data_ptr() not in self._views:
            self._views[vector.data_ptr()] = {
                table: (_cut(vector, places), _cut(vector, self._touched[table]))
                for table, places in self._gradients.items()
            }
        return self._views[vector.data_ptr()]

    def write_word(self, vector: Tensor, digest: int, *, refuses: bool) -> None:
        """Writes what ranks compare: a digest, and whether this rank refuses the step."""
        self.write_digest(vector, digest)
        vector[self._refusals] = float(refuses)

    def is_refused(self, total: Tensor) -> bool:
        """Whether some rank refuses."""
        return bool(total[self._refusals] != 0)

    def write_digest(self, vector: Tensor, digest: int) -> None:
        """Lays out 32 bits so that from sums over ranks it can be told whether all had the same: four bits each, x
        and x², whose sums over W ranks are (Σx)² = W · Σx² only where all x are equal. Small numbers are added exactly.
        """
        parts = [digest >> shift & 15 for shift in range(0, 32, 4)]
        values = torch.tensor([*parts, *(part * part for part in parts)], dtype=vector.dtype, device="cpu")
        vector[self._digest : self._digest + _TABLE_ALIGNMENT] = values

    def has_one_digest(self, total: Tensor, world_size: int) -> bool:
        """Whether all ranks wrote the same.

        >>> layout = CoreLayout([])
        >>> vectors = torch.zeros(3, layout.size)
        >>> for vector, digest in zip(vectors, (7, 7, 6)):
        ...     layout.write_digest(vector, digest)
        >>> layout.has_one_digest(vectors[:2].sum(0), 2), layout.has_one_digest(vectors.sum(0), 3)
        (True, False)
        """
        sums = total[self._digest : self._digest + _TABLE_ALIGNMENT].tolist()
        return all(x * x == world_size * squares for x, squares in zip(sums[:8], sums[8:], strict=True))


def _cut(vector: Tensor, places: Sequence[tuple[int, tuple[int, ...]]]) -> list[Tensor]:
    return [vector[begin : begin + math.prod(shape)].view(shape) for begin, shape in places]

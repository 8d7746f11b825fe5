"""CorePart: the tensor-train tables of a collection, whose cores every rank holds.

Nothing travels to look rows up: each rank computes those of its own distinct ids from the cores. Their gradients become
gradients of the cores, which all ranks add up in one fused vector for all tables (`rowmesh.exchange.core_sums`); then
every rank makes the same update. Plans and replicas do not concern them.

Source: EL-Rec §III (look-up, gradients, fused update) and §V (cores on every worker, data-parallel).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.core_layout import CoreLayout
from rowmesh.exchange.core_sums import USE, CollectiveSums, CoreSums, SharedSums
from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.handshake import Step, check_rates
from rowmesh.exchange.migration import Moved
from rowmesh.exchange.route import GroupExchange, Route, RouteGroup
from rowmesh.exchange.transports import TransportName, transport_for
from rowmesh.exchange.workspace import private_outbox
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.ops.memory import array_at
from rowmesh.placement import AddressMap, Plan, TableShape
from rowmesh.placement.address_map import MAX_KEY
from rowmesh.tables import TableGroup
from rowmesh.tensor_train.arena import CoreArena
from rowmesh.tensor_train.lookup import Lookup


def core_map(group: TableGroup) -> AddressMap:
    """Addresses of rows that are nowhere: as if one rank held them all.

    Raises:
        ConfigurationError: there are more than can be told apart.
    """
    names = [table.name for table in group.tables]
    if (rows := sum(table.num_rows for table in group.tables)) > MAX_KEY:
        raise ConfigurationError(
            f"group {group.name} of tensor-train tables {names} has {rows:,} rows, and at most {MAX_KEY:,} can be "
            "told apart; give some of them another optimizer or initializer, which makes a group of their own"
        )
    return AddressMap(Plan.dealt([TableShape.of(table) for table in group.tables], world_size=1), names, rank=0)


class CoreExchange(GroupExchange):
    """A group of tensor-train tables, routed as if one rank held all their rows; slots are row numbers."""

    arena: CoreArena  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, group: TableGroup) -> None:
        address_map = core_map(group)
        super().__init__(
            group, address_map, cast("Any", CoreArena(group)), partial(private_outbox, 1, address_map.num_segments)
        )
        self._first_slots = [next(address_map.held(number)).slots.start for number in range(len(group.tables))]

    def fetch(self, group: RouteGroup, version: int) -> None:
        """Computes the rows of a batch's distinct ids."""
        workspace, outbox = group.workspace, group.workspace.outbox
        rows = workspace.received.reserve(group.num_unique * self.row_bytes)
        addresses = array_at(workspace.addresses.reserve(8 * group.num_unique), np.int64, group.num_unique)
        addresses[:] = rows + self.row_bytes * np.arange(group.num_unique)
        slots = outbox.lists.array(np.uint32, group.num_unique, offset=outbox.slots_offset).astype(np.int64)
        keep, lookups = torch.is_grad_enabled(), []
        for table, first in enumerate(self._first_slots):
            begin, end = outbox.segment_offsets[0, table : table + 2].tolist()
            ids = torch.from_numpy(slots[begin:end] - first)
            lookups.append(self.arena.look_up(table, ids, rows + begin * self.row_bytes, keep=keep))
        group.incoming = Fetched(lookups, version)

    def gradients(self, groups: Sequence[RouteGroup], table: int, version: int) -> tuple[Lookup, Tensor] | None:
        """The distinct ids of a table in all batches, and the gradients of their rows; None where there are none."""
        taken = []
        for group in groups:
            fetched: Fetched = group.incoming
            outbox = group.workspace.outbox
            begin, end = outbox.segment_offsets[0, table : table + 2].tolist()
            if end == begin:
                continue
            lookup = fetched.lookups[table]
            if fetched.version != version:
                lookup.release_products()  # gradients go through the cores as they are now
            dtype, dim = self.group.dtype, self.group.dim
            at = begin * self.gradient_bytes
            taken.append((lookup, outbox.gradients.tensor(dtype, end - begin, dim, offset=at)))
        if len(taken) < 2:
            return taken[0] if taken else None
        return Lookup.merged(taken)

    def finish(self, groups: Sequence[RouteGroup]) -> None:
        """Counts what this rank's batches asked for, distinct within each, and forgets what was looked up."""
        for group in groups:
            outbox = group.workspace.outbox
            self.counters.count_tables(outbox.accesses[0], outbox.segment_offsets[0])
            group.incoming = None


@dataclass(frozen=True)
class Fetched:
    """What a batch looked up, table by table, and after how many updates of the cores."""

    lookups: list[Any]
    version: int


class CorePart:
    """Groups of tensor-train tables on one rank. Takes part in a collection as `ShardGroup` does.

    Args:
        mesh: all ranks.
        groups: of the collection.
        indices: numbers of those with tensor-train tables.
        transport: how gradients travel.
        common: counts the messages.

    Attributes:
        mesh: all ranks.
        transport_name: "local", "one_sided" or "collective".
        reason: why that.
        exchanges: of the groups, in their order; made by `allocate`.
        indices: their numbers in the collection.
    """

    def __init__(
        self,
        mesh: Mesh,
        groups: Sequence[TableGroup],
        indices: Sequence[int],
        transport: TransportName,
        common: CommonCounters,
    ) -> None:
        self.mesh, self.indices = mesh, list(indices)
        self.transport_name, self.reason = transport_for(transport, mesh)
        self.exchanges: list[CoreExchange] = []
        self._groups, self._common = [groups[index] for index in indices], common
        self._sums: CoreSums | None = None
        self._version = 0  # of the cores

    @property
    def title(self) -> str:
        """What it holds, for people."""
        return "tensor-train tables"

    def allocate(self) -> None:
        """Makes room for the cores."""
        self.exchanges = [CoreExchange(group) for group in self._groups]

    def connect(self) -> None:
        """Makes ranks known to each other. Collective."""
        self._layout = CoreLayout([cores for exchange in self.exchanges for cores in exchange.arena.tables])
        self._sums = self._make_sums(self._layout.size, self._groups[0].dtype)

    def _make_sums(self, size: int, dtype: torch.dtype) -> CoreSums | None:
        """What adds vectors of so many elements up; None where one rank is alone."""
        if self.transport_name == "local":
            return None
        if self.transport_name == "one_sided":
            return SharedSums(self.mesh, size, dtype)
        # A group of its own: other threads may send those of the network meanwhile.
        group = self.mesh.subgroup([range(self.mesh.world_size)], USE)
        channel = Channel(self.mesh, group, self.mesh.rank, self.mesh.world_size)
        return CollectiveSums(self.mesh, channel, size, dtype, self._common)

    def fill_from(self, before: CorePart) -> Moved:
        """Takes the cores and states of another part for the same tables; nothing moves between ranks."""
        for mine, theirs in zip(self.exchanges, before.exchanges, strict=True):
            mine.arena.copy_from(theirs.arena)
        return Moved(rows=0, num_bytes=0)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        own = 0 if self._sums is None else self._sums.num_bytes
        return own + sum(exchange.num_bytes + exchange.arena.buffer_bytes for exchange in self.exchanges)

    def fetch(self, route: Route, meanwhile: Callable[[RouteGroup], None]) -> None:
        """Computes the rows of this rank's distinct ids; no communication."""
        for exchange, index in zip(self.exchanges, self.indices, strict=True):
            exchange.fetch(route.groups[index], self._version)

    def push(self, routes: Sequence[Route], step: Step) -> None:
        """Updates the cores by the gradients of all ranks. Collective.

        Args:
            routes: with gradients.
            step: of all groups of the collection.
        """
        groups = [[route.groups[index] for route in routes] for index in self.indices]
        scaling = 1.0 / self.mesh.world_size
        rates = [step.rates[index] for index in self.indices]
        numbers = [
            exchange.group.optimizer.numbers(rate.lr, scaling * rate.factor, step.number)
            for exchange, rate in zip(self.exchanges, rates, strict=True)
        ]
        if self._sums is None:
            for exchange, table, found, index in self._found(groups):
                exchange.arena.update(table, *found, numbers[index])
        else:
            self._update_together(self._sums, groups, numbers, step)
        self._version += 1
        for exchange, pushed in zip(self.exchanges, groups, strict=True):
            exchange.finish(pushed)

    def _found(
        self, groups: Sequence[Sequence[RouteGroup]]
    ) -> Iterator[tuple[CoreExchange, int, tuple[Lookup, Tensor], int]]:
        """Tables with gradients here: exchange, number of the table there, the gradients, number of the exchange."""
        for index, (exchange, pushed) in enumerate(zip(self.exchanges, groups, strict=True)):
            for table in range(len(exchange.arena.tables)):
                found = exchange.gradients(pushed, table, self._version)
                if found is not None:
                    yield exchange, table, found, index

    def _update_together(
        self, sums: CoreSums, groups: Sequence[Sequence[RouteGroup]], numbers: Sequence[tuple[float, ...]], step: Step
    ) -> None:  # fmt: skip
        vector = sums.begin()
        views = self._layout.views(vector)
        self._tell(vector, step)
        for exchange, table, (lookup, gradients), _ in self._found(groups):
            cores = exchange.arena.tables[table]
            view = views[cores.table]
            lookup.fill_gradients(cores.cores, gradients, view.gradients)
            lookup.fill_touched(view.touched)
        total = sums.finish()
        self._check_told(total, step)
        totals = self._layout.views(total)
        for exchange, of_group in zip(self.exchanges, numbers, strict=True):
            for table, cores in enumerate(exchange.arena.tables):
                total = totals[cores.table]
                exchange.arena.apply(table, total.gradients, total.touched, of_group)

    def _tell(self, vector: Tensor, step: Step) -> None:
        self._layout.write_digest(vector, step.digest)

    def _check_told(self, total: Tensor, step: Step) -> None:
        if not self._layout.has_one_digest(total, self.mesh.world_size):
            check_rates(self.mesh, [0, 1], step)

    def forget(self) -> None:
        """Somebody sets the cores."""
        self._version += 1

    def flush_own(self) -> None:
        """Cores are always up to date."""

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self._sums is not None:
            self._sums.barrier()

    def close(self) -> None:
        """Gives back what is held for other ranks."""
        if self._sums is not None:
            self._sums.close()

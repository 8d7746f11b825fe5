"""Shard groups: the tables of a collection that have equally many replicas, as one rank sees them.

Rows travel within this rank's replica group, by a transport of its own; replicas are synchronized with the ranks that
hold what this one holds, its *replicate group*. Tensor-train tables, which are not sharded, are a `CoreShardGroup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh._support.counters import CommonCounters
from rowmesh.errors import ConfigurationError
from rowmesh.exchange.cores import CoreShardGroup
from rowmesh.exchange.device_group import DeviceGroupExchange
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.host_group import HostGroupExchange
from rowmesh.exchange.migration import Moved, move_rows
from rowmesh.exchange.replica_keys import ReplicaKeys
from rowmesh.exchange.replica_sync import ReplicaSync, make_synchronizer
from rowmesh.exchange.route import Route, Routed, ShardGroupRoute
from rowmesh.exchange.squares import sum_of_squares, sum_of_squares_by_key
from rowmesh.exchange.summing import SummingExchange, summed_features
from rowmesh.exchange.synchronizer import Synchronizer
from rowmesh.exchange.transport import Meanwhile, Transport, collect
from rowmesh.exchange.transports import TransportName, common_name, make_transport
from rowmesh.exchange.windows import WindowOptions, Windows
from rowmesh.mesh import Mesh
from rowmesh.mesh.grid import Grid
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.mesh.waiting import barrier, gather_objects
from rowmesh.placement import AddressMap, Piece, Plan
from rowmesh.tables import DenseArena, TableGroup, TableSpec, Tiers
from rowmesh.tables.update_rules import Update


@dataclass(frozen=True, eq=False)
class ShardOptions:
    """Options that all shard groups of a collection have in common.

    Attributes:
        transport: what was asked for.
        synchronization: how replicas are kept together.
        tiers: where rows of tiered tables are.
        common: counts the messages that serve all groups of tables.
        device: where rows are; None for the host's memory.
        wire_dtype: how rows and gradients travel between ranks, where that is narrower than they are.
    """

    transport: TransportName
    synchronization: Synchronization
    tiers: Tiers
    common: CommonCounters
    device: torch.device | None
    wire_dtype: torch.dtype | None = None


def check_wire(wire_dtype: torch.dtype | None, tables: Sequence[TableSpec]) -> None:
    """Raises ConfigurationError where rows cannot travel in a dtype."""
    if wire_dtype not in (None, torch.bfloat16):
        raise ConfigurationError(
            f"wire_dtype (parallel.wire_dtype of a configuration) must be torch.bfloat16 or None, got {wire_dtype!r}"
        )
    wide = [table.name for table in tables if table.dtype == torch.float64]
    if wire_dtype is not None and wide:
        raise ConfigurationError(
            f"wire_dtype=torch.bfloat16 (parallel.wire_dtype of a configuration): tables {wide} are of float64, which "
            "bfloat16 would cut to 8 bits; leave wire_dtype out, or give these tables dtype float32"
        )


class ShardGroup:
    """Tables with equally many replicas, their rows on this rank, their transport and their synchronization.

    Making one is collective and so is `connect`, which must follow `allocate`.

    Args:
        mesh: all ranks.
        plan: of all tables, for all ranks.
        replicas: M of these tables.
        groups: of all tables.
        indices: numbers of the groups that these tables are.
        options: of all shard groups.

    Attributes:
        mesh: the ranks of this rank's replica group.
        plan: of these tables, for those ranks.
        transport: between them; `transport_name` is its name.
        reason: why that transport.
        device: where rows are; None for the host's memory.
        exchanges: of the groups, in their order; made by `allocate`.
        indices: their numbers in the collection.
        averages: whether replicas differ between two averages.
        scaling: what summed gradients are multiplied by: their mean, as DistributedDataParallel takes it. Over all
            ranks where gradients are summed over them, over those of the replica group where groups update for
            themselves.
        needs_flush: whether `flush` must update rows before the next look-up.
    """

    def __init__(
        self,
        mesh: Mesh,
        plan: Plan,
        replicas: int,
        groups: Sequence[TableGroup],
        indices: Sequence[int],
        options: ShardOptions,
    ) -> None:
        self._grid = grid = plan.grid(replicas)
        self.replicas, self.plan, self.indices = replicas, plan.part(replicas), list(indices)
        self.device, self._options = options.device, options
        self._groups = [groups[index] for index in indices]
        self._is_tiered = self._groups[0].storage == "tiered"
        self._replica = grid.place(mesh.rank)[0]
        self.mesh = mesh.part(grid.groups, grid.ranks_per_node(plan.ranks_per_node))
        self._replicate_group = mesh.part(grid.replicate_groups) if replicas > 1 else None
        self.averages = replicas > 1 and options.synchronization.mode == "average"
        self.scaling = 1.0 / (self.mesh.world_size if self.averages else mesh.world_size)
        self._is_whole = self.device is None and len(indices) == len(groups)
        self._second: dist.ProcessGroup | None = None
        if self.device is None and replicas == 2 and len(grid.replicate_groups) > 1:
            # Process groups are known by the order in which their ranks are named.
            self._second = mesh.subgroup([ranks[::-1] for ranks in grid.replicate_groups])
        self.transport, self.reason = self._make_transport(mesh, grid)
        self.transport.count_into(options.common)
        self.transport_name = self.transport.name
        self.exchanges: list[GroupExchange] = []
        self.synchronizer = Synchronizer()
        self.needs_flush = self._has_failed = False
        self._exact: ReplicaSync | None = None  # what keeps replicas on hosts equal, where it has a part in each step
        self._pushed: tuple[Sequence[Routed], list[Update], Step] | None = None  # what is prepared

    def _make_transport(self, mesh: Mesh, grid: Grid) -> tuple[Transport, str]:
        """The transport within the replica group, and why that one."""
        name = self._options.transport
        if self._is_tiered:
            self._check_tiers()
        if self.device is None:
            name = common_name("collective" if self._is_tiered else name, mesh, grid)
        transport, reason = make_transport(name, self.mesh, len(self._groups), self.device, is_tiered=self._is_tiered)
        ranges = (part for table in self.plan.tables for part in table.ranges)
        is_one_hop = self.device is not None or self._is_tiered
        if is_one_hop and self.plan.num_nodes > 1 and any(part.two_hop for part in ranges):
            reason += "; rows planned for two hops go in one"
        if self._options.wire_dtype is not None:
            how = "rounded to bfloat16" if transport.name == "collective" else "not rounded: none travels in a message"
            reason += f"; rows and gradients are {how}"
        return transport, reason

    def _check_tiers(self) -> None:
        """Raises ConfigurationError where these tables are what tiers cannot do yet; all of that is refused here."""
        names = [table.name for group in self._groups for table in group.tables]
        nodes = self.plan.num_nodes > 1
        refused = ("replicated", "node") if self.device is not None else ("node",) if nodes else ()
        copied = [
            table.shape.name
            for table in self.plan.tables
            if table.shape.name in names and any(part.rule in refused for part in table.ranges)
        ]
        if copied:
            which = f"copied rows on {self.device}" if self.device is not None else "rows with a copy on each node"
            raise ConfigurationError(
                f"tiered tables {copied} have {which}; give them a plan that keeps rows cyclic (leave placement.plan "
                "and placement.strategy out), or storage='dense'"
            )
        if self.replicas > 1 and self.device is not None:
            raise ConfigurationError(
                f"tiered tables {names} on {self.device} have {self.replicas} replicas; give them one, device='cpu', "
                "or storage='dense'"
            )
        if self.averages and self._options.synchronization.dense:
            raise ConfigurationError(
                f"averages of whole tables, with replicas, would read all rows of the tiered tables {names} from slow "
                "memory each time; average the rows that were touched (leave synchronization dense out)"
            )

    def allocate(self) -> None:
        """Makes room for the rows that this rank holds.

        Raises:
            ConfigurationError: a rank would hold more rows than slots have numbers.
            MemoryError, OSError: there is no room.
        """
        self.transport.make_room()
        plan = self.plan if self.device is None and not self._is_tiered else one_hop(self.plan)
        self.exchanges = [self._make_exchange(group, plan) for group in self._groups]

    def _make_exchange(self, group: TableGroup, plan: Plan) -> GroupExchange:
        try:
            address_map = AddressMap(plan, [table.name for table in group.tables], self.mesh.rank)
        except ConfigurationError as error:
            raise ConfigurationError(f"group {group.name} of {error}") from error
        num_slots = address_map.num_slots[self.mesh.rank]
        if self._is_tiered:
            is_shared, kept = self.replicas > 1, address_map.copied_slots
            where = self.mesh.rank, self.device
            arena = self._options.tiers.make_arena(group, num_slots, *where, is_shared=is_shared, kept=kept)
        else:
            rows = self.transport.rows_for(group, address_map.num_slots, self.mesh.rank)
            arena = DenseArena(group, num_slots, self.device, rows)
        how, wire_dtype = (group, address_map, arena), self._options.wire_dtype
        if self.device is None:
            owned = summed_features(group, address_map)
            if self.transport_name == "collective" and any(each.features for each in owned):
                return SummingExchange(*how, self.transport.allocate, owned=owned, wire_dtype=wire_dtype)
            return HostGroupExchange(*how, self.transport.allocate, wire_dtype=wire_dtype)
        asks_owners = self.transport_name != "one_sided"
        return DeviceGroupExchange(*how, self.device, asks_owners=asks_owners, wire_dtype=wire_dtype)

    def connect(self) -> None:
        """Connects the ranks, when all rows have their values. Collective."""
        self.transport.connect(self.exchanges)
        if self._replicate_group is None:
            return
        how = self._options.synchronization
        self.synchronizer = make_synchronizer(how, self.exchanges, self._replicate_group, self.device, self._second)
        if isinstance(self.synchronizer, ReplicaSync) and self.device is None and not self.averages:
            self._exact = self.synchronizer

    @property
    def title(self) -> str:
        """A title of its tables, for people."""
        return f"tables of {self.replicas} replica(s)" + ("" if self.device is None else f" on {self.device}")

    def fill_from(self, before: ShardGroup, everyone: Mesh) -> Moved:
        """Copies all rows and states from those of another plan. Collective; returns what came to this rank."""
        return move_rows(before.exchanges, self.exchanges, self.mesh, everyone=everyone)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        buffers = self.synchronizer.num_bytes + self.transport.num_bytes
        return buffers + sum(exchange.num_bytes for exchange in self.exchanges)

    def fetch(self, route: Route, meanwhile: Meanwhile) -> None:
        """Makes the rows of these groups readable. Collective.

        Args:
            route: of a batch.
            meanwhile: is called for each group while its rows travel.
        """
        if self.needs_flush:
            self.flush()
        self.transport.fetch(route if self._is_whole else ShardGroupRoute(route, self.indices), meanwhile)

    def windows(self, options: WindowOptions) -> Windows:
        """The windows of a pipeline over these tables; its transport makes them. Collective."""
        return self.transport.windows(self, options)

    def collect(self, routes: Sequence[Route], step: Step) -> None:
        """Has ranks agree on a step of these tables alone, which `apply` then takes. Collective.

        Args:
            routes: with gradients.
            step: of all groups of the collection.

        Raises:
            Exception: why no rank takes it; no row has changed.
        """
        if self.needs_flush:
            self.flush()
        collect(self, partial(self.prepare, routes, step), step)

    # The parts of a push, see [Note: a step is taken by all ranks or by none] in `rowmesh.exchange.transport`

    def prepare(self, routes: Sequence[Route], step: Step) -> None:
        """Does what may fail of a push, without messages; changes no row. Messages of replicas have been waited for."""
        mine = routes if self._is_whole else [ShardGroupRoute(route, self.indices) for route in routes]
        updates = self.updates(step)
        self.transport.prepare(mine, updates, step)
        self._pushed = mine, updates, step

    def agree(self, step: Step, refusal: Exception | None) -> Exception | None:
        """Ranks tell each other whether they can go on, see `Transport.agree`. Collective.

        Exact replicas tell each other, too. By then each has its gradients together, and has changed no row.
        """
        refusal = self.transport.agree(step, refusal)
        if self._exact is None:
            return refusal
        if refusal is None:
            self.transport.apply()
        return self._exact.agree(self.updates(step), step, refusal)

    def apply(self) -> None:
        """Does what was prepared. Collective."""
        pushed, self._pushed = self._pushed, None
        assert pushed is not None
        mine, updates, step = pushed
        if self._exact is not None:
            self._exact.post()
            self.needs_flush = True
            return
        self.transport.apply()
        if self.replicas > 1:
            self.begin_synchronization(updates, step)
        if self.device is not None:
            for route in mine:
                for group in route.groups:
                    group.look_up.drop_gradients()

    def withdraw(self) -> None:
        """Forgets what was prepared."""
        self._pushed = None
        self.transport.withdraw()
        if self._exact is not None:
            self._exact.withdraw()

    def fail(self, step: int) -> None:
        """Notes that this rank failed amid a step: others stop waiting for it, where a transport can tell them."""
        self.transport.fail(step)
        self._has_failed = True

    @property
    def is_half_done(self) -> bool:
        """Whether `flush` failed when rows had changed, or had been asked of other ranks."""
        return self.synchronizer.is_half_done

    def updates(self, step: Step) -> list[Update]:
        """How the rows of these groups change."""
        updates, scaling = [], self.scaling
        for index in self.indices:
            lr, factor = step.rates[index]
            updates.append(Update(lr, scaling * factor, step.number))
        return updates

    def squares(self, slots: Tensor, sums: Tensor) -> float:
        """The sum of squares of gradients of rows in some slots, `[M]`; what exact replicas have is added up first.

        Collective where there are exact replicas, whose gradients travel once more for it.

        Args:
            slots: of this rank, distinct.
            sums: `[M, D]`, over the ranks of the replica group.
        """
        if self._replicate_group is None or self.averages:
            return sum_of_squares(sums)
        return sum_of_squares_by_key(self._replicate_group, slots.cpu(), sums.cpu())

    def replica_keys(self) -> ReplicaKeys | None:
        """What tells exact replicas which rows a window changes; None where there are none. Collective."""
        if self._replicate_group is None or self.averages:
            return None
        return ReplicaKeys(self._replicate_group, self._grid.groups, self._options.common)

    def begin_synchronization(self, updates: Sequence[Update], step: Step) -> None:
        """Sends the other replicas what was pushed, if that is due; `flush` waits for theirs. Collective."""
        self.needs_flush = self.synchronizer.begin(updates, step)

    def synchronize(self) -> None:
        """Makes replicas equal now, if they are only averaged now and then. Collective."""
        self.flush()
        if self.averages:
            self.transport.barrier()  # ranks of this group may still read the rows that are about to change
            self.synchronizer.start()
            self.needs_flush = True
            self.flush()

    def forget(self) -> None:
        """Takes the rows of this rank, which the program sets, as equal to those of the other replicas."""
        self.flush_own()
        self.synchronizer.forget()

    def flush(self) -> None:
        """Waits for messages of other replicas and updates the rows of this replica group. Collective."""
        if self.needs_flush:
            self.synchronizer.finish()
            self.needs_flush = False
            if self.transport_name == "one_sided":  # with the others, a rank that replies with rows has flushed before
                self.transport.publish()

    def flush_own(self) -> None:
        """Waits for messages of other replicas and updates the rows that this rank holds."""
        self.synchronizer.finish()

    def begin_after(self, steps: int) -> None:
        """Says after how many steps the rows are, with nothing under way."""
        self.synchronizer.begin_after(steps)

    def rows_after(self, steps: int) -> bool:
        """Whether the rows here are those after so many steps; see `Synchronizer.rows_after`."""
        return self.synchronizer.rows_after(steps)

    def share(self, piece: Piece) -> Piece:
        """The rows of a piece that count as this replica's: each row counts for one replica only."""
        first, end = (len(piece.rows) * number // self.replicas for number in (self._replica, self._replica + 1))
        return Piece(piece.rows[first:end], piece.slots[first:end])

    def barrier(self) -> None:
        """Waits for all ranks of the replica group, whose rows are then up to date."""
        self.flush()
        self.transport.barrier()

    def close(self) -> None:
        """Frees rows and the transport; before that, rows are brought up to date where that needs no other rank."""
        if self.replicas == 2 and not self._has_failed:
            self.flush_own()
        for exchange in self.exchanges:
            exchange.arena.close()
        self.transport.close()


class ShardGroups:
    """A `ShardGroup` for each storage and number of replicas, and a `CoreShardGroup` for all tensor-train tables.

    Making them is collective, as are `allocate` and `connect`, which follow.

    Args:
        mesh: all ranks.
        plan: of all tables with rows.
        groups: of tables that have equally many replicas, or are tensor-train tables.
        options: of all shard groups.

    Attributes:
        stored: those whose rows are stored.
        computed: those whose rows are computed from cores.
        exchanges: of all groups, in their order; made by `allocate`.
    """

    def __init__(self, mesh: Mesh, plan: Plan, groups: Sequence[TableGroup], options: ShardOptions) -> None:
        self._mesh, self._plan = mesh, plan
        self.stored: list[ShardGroup] = []
        self.computed: list[CoreShardGroup] = []
        self.exchanges: list[GroupExchange] = []
        replicas = plan.replicas
        stored: dict[tuple[str, int], list[int]] = {}
        for index, group in enumerate(groups):
            if group.storage != "tensor_train":
                stored.setdefault((group.storage, replicas[group.tables[0].name]), []).append(index)
        computed = [index for index, group in enumerate(groups) if group.storage == "tensor_train"]
        try:
            for (_, count), indices in sorted(stored.items()):
                self.stored.append(ShardGroup(mesh, plan, count, groups, indices, options))
            if computed:
                how = options.transport, options.common
                self.computed.append(CoreShardGroup(options.device, mesh, groups, computed, *how))
        except BaseException:
            self.close()
            raise

    @property
    def all(self) -> list[ShardGroup | CoreShardGroup]:
        """Shard groups whose rows are stored, then those whose rows are computed."""
        return [*self.stored, *self.computed]

    def allocate(self, outcome: str = "") -> None:
        """Makes room for the rows of this rank.

        Args:
            outcome: the end of the message.

        Raises:
            ConfigurationError: on all ranks alike, where one would hold more rows than slots have numbers, or cannot
                make the file of a tiered table; names it.
            MemoryError: on all ranks alike, where one has no room; names it.
        """
        obstacle: tuple[str, str] | None = None
        try:
            for each in self.all:
                each.allocate()
        except ConfigurationError as error:
            obstacle = "configuration", str(error)
        except (MemoryError, OSError) as error:  # anonymous memory fails with the second
            obstacle = "memory", str(error)
        for rank, theirs in enumerate(gather_objects(self._mesh, obstacle, "making room for rows")):
            if theirs is None:
                continue
            kind, text = theirs
            if kind == "configuration":
                raise ConfigurationError(f"rank {self._mesh.name(rank)}: {text}")
            raise MemoryError(
                f"rank {self._mesh.name(rank)} has no room for the {self._plan.memory_bytes[rank]:,} bytes of rows and "
                f"optimizer state that the plan gives it: {text}{outcome}"
            )
        numbered: dict[int, GroupExchange] = {}
        for each in self.all:
            numbered.update(zip(each.indices, each.exchanges, strict=True))
        self.exchanges = [numbered[index] for index in sorted(numbered)]

    def connect(self) -> None:
        """Connects the ranks, when all rows have their values."""
        for each in self.all:
            each.connect()

    def fill_from(self, old: ShardGroups) -> list[Moved]:
        """Copies all rows and states from those of another plan. Collective; returns what came to this rank."""
        return [
            *(after.fill_from(before, self._mesh) for before, after in zip(old.stored, self.stored, strict=True)),
            *(after.fill_from(before) for before, after in zip(old.computed, self.computed, strict=True)),
        ]

    @property
    def transport(self) -> str:
        """The transport's name; several joined by "+"."""
        return "+".join(dict.fromkeys(each.transport_name for each in self.all))

    @property
    def reason(self) -> str:
        """Why that one."""
        if len({each.reason for each in self.all}) == 1:
            return self.all[0].reason
        return "; ".join(f"{each.title}: {each.reason}" for each in self.all)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(each.num_bytes for each in self.all)

    def find(self, table: str) -> tuple[ShardGroup | CoreShardGroup, GroupExchange, int]:
        """Where a table is: its shard group, its group, its number there; what this rank holds of it is up to date.

        Raises:
            KeyError: there is no such table.
        """
        found = self.place_of(table)
        found[0].flush_own()
        return found

    def place_of(self, table: str) -> tuple[ShardGroup | CoreShardGroup, GroupExchange, int]:
        """The same, with what this rank holds of it as it is, and no waiting."""
        for each in self.all:
            for exchange in each.exchanges:
                for number, spec in enumerate(exchange.group.tables):
                    if spec.name == table:
                        return each, exchange, number
        names = [spec.name for exchange in self.exchanges for spec in exchange.group.tables]
        raise KeyError(f"no table {table!r}; there are {names}")

    def barrier(self) -> None:
        """Waits for all ranks, whose rows are then up to date."""
        for each in self.all:
            each.barrier()
        if any(each.replicas > 1 for each in self.stored):  # those waited for their own replica group alone
            barrier(self._mesh, "waiting at a barrier")

    def close(self) -> None:
        """Frees rows and transports."""
        for each in self.all:
            each.close()


def one_hop(plan: Plan) -> Plan:
    """The plan with all rows in one hop, as devices and tiers run it; it holds rows at the same places."""
    tables = []
    for table in plan.tables:
        ranges = tuple(replace(part, two_hop=False) for part in table.ranges)
        tables.append(replace(table, ranges=ranges))
    return replace(plan, tables=tuple(tables))

"""EmbeddingCollection: embedding tables spread over the ranks, as one module.

The four verbs `route`, `fetch`, `pool` and `push` are one training step of its tables; `forward` is the first three,
and `rowmesh.collection.optimizer.EmbeddingOptimizer.step` is the last. `rowmesh.collection.engine` carries them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from rowmesh._support.background_saves import wait_for_background_saves
from rowmesh._support.counters import CommonCounters, GroupCounters
from rowmesh.collection import table_shards
from rowmesh.collection.driven_engine import DrivenEngine
from rowmesh.collection.engine import Engine, FetchedRows, check_sums, stored_shapes
from rowmesh.collection.module_hooks import TableModule, all_frozen, frozen_or_not
from rowmesh.collection.outputs import Embeddings
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.exchange.handshake import agree_on_tables
from rowmesh.exchange.migration import Moved
from rowmesh.exchange.resolve.collected import check_dynamic
from rowmesh.exchange.resolve.known import KnownRows
from rowmesh.exchange.resolve.resolver import Resolver
from rowmesh.exchange.route import Route
from rowmesh.exchange.shard_group import ShardOptions, check_wire
from rowmesh.exchange.transports import TransportName, check_name
from rowmesh.mesh import Mesh
from rowmesh.mesh.devices import usable_device
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.mesh.threads import warn_of_threads
from rowmesh.ops.untraced import untraced
from rowmesh.placement import Plan
from rowmesh.placement.frames import framed, replicas_of_dynamic, with_frames
from rowmesh.sparse import SparseBatch
from rowmesh.sparse.convert import KeyedJagged, as_batch, with_empty_bags
from rowmesh.sparse.whole import whole_numbers
from rowmesh.tables import TableSpec, Tiers
from rowmesh.tables.cache import TierCounters
from rowmesh.tables.cached import CachedArena
from rowmesh.tables.cores import Cores
from rowmesh.tables.dynamic.counters import DynamicCounters
from rowmesh.tables.dynamic.hooks import DecisionHook
from rowmesh.tables.dynamic.state import Statistics
from rowmesh.tables.shard import LocalRows, TableShard, Which
from rowmesh.tables.spec import check_tables, with_moment_scale
from rowmesh.tables.update_rules import Rate


class EmbeddingCollection(TableModule):
    """Embedding tables, their rows spread over the ranks, or computed on every rank from cores (`TableSpec.storage`).

    Its rows are not `nn.Parameter`s: `EmbeddingOptimizer` updates them in place, and DistributedDataParallel leaves
    them alone. On one rank `state_dict()` has copies of them; `rowmesh.save` writes them on any number. Every rank must
    construct it, and call `forward`, `backward` and the optimizer's `step`, equally often. As with `nn.EmbeddingBag`,
    `eval()` changes nothing; `torch.no_grad()` does.

    Under `torch.no_grad()` any number of threads may look up at once; on one rank also while another thread trains:
    each finds rows as they are between two steps. On several ranks threads look up between two steps only, equally
    often on every rank. The rows that they look up in tiered tables must fit into fast memory together. One thread at
    a time trains: `step` raises RowmeshError where two do. While a pipeline runs, its thread alone looks up. On a GPU
    all work is launched on the current stream.

    Args:
        tables: what to store.
        mesh: the ranks; default: this process alone.
        seed: of the initial values, which are the same for every number of ranks.
        transport: how rows travel: "one_sided" (ranks of one host read each other's memory), "collective"
            (torch.distributed), or "auto": one-sided where that is possible; between GPUs collective.
        plan: which ranks hold each row (`rowmesh plan` makes one); default: cyclic over all ranks. Any plan trains the
            same model. Tensor-train tables are in none: every rank has their cores.
        replicas: without a plan: how many replicas of each table to keep, on as many groups of ranks; a look-up reads
            rows within its group; one number, or one for each table by name. It must divide the number of ranks.
        synchronization: how replicas are kept together; "exact" trains the same model as one replica does.
        tiers: how much of tiered tables is in fast memory, and where the rest is.
        device: where rows live and look-ups run, "cpu" or "cuda" (the current GPU); equal to rounding. Batches stay in
            the host's memory, best pinned; vectors come out on the device.
        wire_dtype: `torch.bfloat16` rounds rows and gradients in messages to half their bytes; it changes the model.
            Rows that do not travel are not rounded: one-sided none are, so with transport "auto" the ranks of one host
            train another model than those of two; `transport_reason` says which.

    Raises:
        ConfigurationError: tables clash, the transport cannot work here, replicas do not divide the ranks, ranks
            disagree about any of these, or the device cannot be used, or not for this; says what to do.
        MemoryError: a rank has no room for its rows.

    Example:
        >>> from rowmesh import EmbeddingOptimizer, SparseBatch
        >>> tables = [TableSpec(name="user", num_rows=10, dim=4), TableSpec(name="item", num_rows=5, dim=4)]
        >>> embeddings = EmbeddingCollection(tables)
        >>> optimizer = EmbeddingOptimizer(embeddings)
        >>> out = embeddings(SparseBatch.from_bags({"user": [[7], [7, 9]], "item": [[3], []]}))
        >>> out.stacked().shape
        torch.Size([2, 2, 4])
        >>> out.values.sum().backward()
        >>> optimizer.step()
        >>> embeddings
        EmbeddingCollection(dim4_row_wise_adagrad: 2 tables, 15 rows; local on 1 ranks, cpu)
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        *,
        mesh: Mesh | None = None,
        seed: int = 0,
        transport: TransportName = "auto",
        plan: Plan | None = None,
        replicas: int | Mapping[str, int] = 1,
        synchronization: Synchronization | None = None,
        tiers: Tiers | None = None,
        device: str | torch.device = "cpu",
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_name(transport)
        place, tables = usable_device(device), tuple(tables)
        check_tables(tables)
        check_wire(wire_dtype, tables)
        self.mesh, self.tiers = mesh or Mesh(), tiers or Tiers()
        self.synchronization = synchronization or Synchronization()
        size, per_node = self.mesh.world_size, self.mesh.ranks_per_node
        if plan is not None and replicas != 1:
            raise ConfigurationError("give replicas or a plan, which has replicas of its own, not both")
        counts = replicas_of_dynamic(tables, replicas if plan is None else plan.replicas)
        check_dynamic(tables, counts, self.synchronization, place, transport)
        framed_tables = framed(tables, counts, size)
        if plan is None:
            plan = Plan.cyclic(stored_shapes(framed_tables), size, per_node, replicas=replicas)
        plan = with_frames(plan, framed_tables, counts)
        warn_of_threads(self.mesh)
        agree_on_tables(self.mesh, tables, seed, transport, self.synchronization, plan, wire_dtype)
        plan.check_fits(stored_shapes(framed_tables), size, per_node)
        check_sums(plan, tables, place)
        averaged = plan.replicas if self.synchronization.mode == "average" else {}
        self.tables = tuple(with_moment_scale(table, averaged.get(table.name, 1)) for table in tables)
        self.common_counters = CommonCounters()
        options = ShardOptions(transport, self.synchronization, self.tiers, self.common_counters, place, wire_dtype)
        self.engine = Engine(framed(self.tables, counts, size), plan, self.mesh, options, seed)
        self.driven = DrivenEngine(self.engine, str(device))
        self.device, self.groups, self.is_frozen = self.engine.device, self.engine.groups, all_frozen(self.engine)
        self.features, self.dims = self.engine.outputs.features, self.engine.outputs.dims

    @property
    def plan(self) -> Plan:
        """Which ranks hold each row now."""
        return self.engine.plan

    @property
    def transport(self) -> str:
        """Transport: "local", "one_sided" or "collective"; several, joined by "+", where tables differ in replicas."""
        return self.engine.shard_groups.transport

    @property
    def transport_reason(self) -> str:
        """The reason for that transport."""
        return self.engine.shard_groups.reason

    @property
    def step_count(self) -> int:
        """How many steps were taken."""
        return self.engine.step_count

    @property
    def counters(self) -> list[GroupCounters]:
        """Counters of the traffic of each group since the start, on this rank."""
        return [exchange.counters for exchange in self.engine.exchanges]

    @property
    def tier_counters(self) -> dict[str, TierCounters]:
        """Counters of hits in fast memory, reads and write-backs of each tiered group since the start, on this rank."""
        arenas = {exchange.group.name: exchange.arena for exchange in self.engine.exchanges}
        return {name: arena.counters for name, arena in arenas.items() if isinstance(arena, CachedArena)}

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Memory of this rank in bytes, by use: rows, optimizer state, and buffers, whether in use or idle."""
        found = self.engine.num_bytes
        return found | {"buffers": found["buffers"] + self.driven.num_bytes}

    @untraced
    def forward(self, batch: SparseBatch | KeyedJagged, features: Sequence[str] | None = None) -> Embeddings:
        """Looks up a batch, or some features of it, in the order given; collective, each rank passes its own samples.

        Given `features=["user"]` the batch may lack the others, and may have more. Tables without a feature in the list
        take part with empty bags: ranks may pass different lists, no row of these tables is read or updated, and the
        cost of their part of the pooled output remains.

        Args:
            batch: what to look up.
            features: which of its features; all by default.

        Raises:
            DataError: the batch's features are not the tables', a feature of the list belongs to no table or is not in
                the batch, or an id is out of range. Where there are dynamic tables, the other ranks then raise
                RefusedError, and none has decided anything.
        """
        try:
            sparse = batch if isinstance(batch, SparseBatch) else as_batch(batch)
            if features is not None:
                sparse = with_empty_bags(sparse, features, [name for table in self.tables for name in table.features])
        except Exception as error:
            self.engine.refuse(error)
            raise
        found = self._look_up_frozen(batch, sparse) if self.is_frozen else self.engine.look_up(sparse)
        return found if features is None else found.select(features)

    @frozen_or_not
    def _look_up_frozen(self, batch: SparseBatch | KeyedJagged, sparse: SparseBatch) -> Embeddings:
        return self.engine.look_up(sparse)

    @frozen_or_not
    def route(self, batch: SparseBatch | KeyedJagged) -> Route:
        """Finds the unique ids of a batch, their owners, and the way back; no communication."""
        return self.engine.route(as_batch(batch))

    @frozen_or_not
    def fetch(self, route: Route) -> FetchedRows:
        """Makes the rows of a route readable; collective."""
        return self.engine.fetch(route)

    @frozen_or_not
    def pool(self, rows: FetchedRows) -> Embeddings:
        """The vectors of the batch; differentiable, without communication.

        Raises:
            RowmeshError: rows were updated since they were fetched.
        """
        return self.engine.pool(rows)

    def push(self, routes: Sequence[Route], lrs: Sequence[float]) -> None:
        """Sends the gradients of routes to the owners, which update their rows; collective.

        Args:
            routes: routes whose backward has run, not the same on all ranks; the gradients of several add up.
            lrs: the learning rate of each group, the same on all ranks.

        Raises:
            RowmeshError: a route has no gradients, or they were pushed already; or two threads train at once.
            ConfigurationError: ranks have different learning rates; names them.
            PeerError: a rank died, or did not call forward and push as the others did; names it.
        """
        if len(lrs) != len(self.groups):
            raise RowmeshError(f"{len(self.groups)} groups need as many learning rates, got {len(lrs)}")
        self.engine.push(routes, [Rate(lr) for lr in lrs])

    def push_pending(self, lrs: Sequence[float]) -> None:
        """Pushes every route whose backward has run since the last push; `lrs` as for `push`."""
        self.engine.push_pending([Rate(lr) for lr in lrs])

    def synchronize(self) -> None:
        """Makes all replicas of all rows equal where they are averaged; fetched rows are then stale. Collective."""
        self.engine.synchronize()

    def forget_differences(self) -> None:
        """Takes the rows of this rank as equal to those of other replicas: before `held_rows` are set on all of them.

        `rowmesh.checkpoint.load` calls it. The call waits for a checkpoint that is being written beside
        training, whose rows are those of its moment. Raises RowmeshError while a pipeline runs: it has rows of later
        batches.
        """
        wait_for_background_saves([self])
        self.engine.forget_differences()

    def migrate(self, plan: Plan) -> Moved:
        """Goes over to another plan between two steps, with all rows and optimizer states; training goes on unchanged.

        Collective and blocking: every rank calls it with the same plan, of as many replicas as before, when gradients
        are pushed and no batch is under way. Replicas that are averaged now and then are averaged first. Views from
        `local_rows` and `held_rows` show rows under the old plan, which are not updated any more. Until it is done a
        rank has the rows of both plans in memory, and buffers of about 64 MiB.

        Returns:
            The rows that moved, on all ranks together.

        Raises:
            RowmeshError: a batch is under way on some rank; names it. The old plan goes on, as with the next two.
            ConfigurationError: the plan is for other tables, ranks or replicas, or ranks have different ones.
            MemoryError: a rank has no room for the rows of both plans.
            IdRangeError: on a device, an earlier batch that was not checked yet had ids that are no rows.
            PeerError: a rank died, or did not come within the mesh's timeout; names it.

        Example:
            >>> from rowmesh.placement import RowRange, TablePlan
            >>> embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4)])
            >>> shape = embeddings.plan.tables[0].shape
            >>> halves = (RowRange(0, 5, "replicated"), RowRange(5, 10))
            >>> embeddings.migrate(Plan((TablePlan(shape, halves),), world_size=1, ranks_per_node=1)).rows
            0
        """
        return self.engine.migrate(plan)

    def local_rows(self, table: str) -> list[LocalRows]:
        """The rows of a table that this rank owns, and their optimizer state, as views.

        Every row of a table is among the local rows of one rank; replicas share them. Copies of rows are not: to change
        values in place, change those of `held_rows`. Where tables have replicas, ask again after a step; between two
        averages they differ: `synchronize` first. Where there are more than two, every rank must call this alike.

        Raises:
            KeyError: there is no such table.
            ConfigurationError: it is a tensor-train table, whose rows are nowhere; see `cores`.
        """
        return table_shards.stored_shard(self.engine, table, "owned").views

    def shards(self, which: Which) -> list[TableShard]:
        """The shards of all tables on this rank, in their order, until the next step: to save, load or publish.

        Every rank must call it alike.

        Args:
            which: "owned": every row of a table is in the shards of one rank, and replicas share them (`synchronize`
                first); "held": all rows that are here, copies too, which can be set after `forget_differences`;
                "group": those that this rank owns within its replica group, without waiting for anything.

        Raises:
            RowmeshError: a pipeline has opened batches of dynamic tables whose steps have not come.
        """
        return table_shards.shards(self.engine, self.tables, which)

    @property
    def row_epoch(self) -> tuple[int, int]:
        """Changes where rows changed otherwise than by updates: they were set, or migrated."""
        return self.engine.num_migrations, self.engine.num_sets

    def held_rows(self, table: str) -> list[LocalRows]:
        """All rows of a table that this rank holds, copies of others' included, as views.

        For errors see `local_rows`. To set values, on all replicas alike, call `forget_differences` first.
        """
        return table_shards.stored_shard(self.engine, table, "held").views

    def known_rows(self, table: str) -> KnownRows:
        """The ids that a dynamic table knows on this rank, with their rows, optimizer state and statistics: copies.

        Every id of a table is on one rank (with replicas, on one of each group). They are those after the last step;
        while a pipeline has opened later batches this raises RowmeshError.

        Raises:
            ConfigurationError: there is no such dynamic table.
        """
        return table_shards.known_ids(self.engine, table)

    def statistics(self, table: str, ids: Sequence[int] | np.ndarray | torch.Tensor) -> Statistics:
        """How often ids of a dynamic table occurred, when last, and their scores. Collective; ranks may ask for others.

        Args:
            table: its name.
            ids: int64 `[N]`, in any order; they need not be known.

        Raises:
            ConfigurationError: there is no such dynamic table.
            DataError: an id is no whole number of 64 bits.
            RowmeshError: a pipeline has opened batches that it cannot take back.

        Example:
            >>> from rowmesh import SparseBatch
            >>> from rowmesh.tables import Dynamic, Uniform
            >>> table = TableSpec(
            ...     name="item", dim=4, storage="dynamic", dynamic=Dynamic(capacity=100), initializer=Uniform(bound=0.1)
            ... )
            >>> embeddings = EmbeddingCollection([table])
            >>> _ = embeddings(SparseBatch.from_bags({"item": [[-7, 5], [5]]}))
            >>> found = embeddings.statistics("item", [5, 6])
            >>> found.known.tolist(), found.count.tolist()
            ([True, False], [2, 0])
        """
        numbers = whole_numbers(ids, f"the ids of table {table!r}").flatten()
        resolver = self._resolver_of(table)
        self.engine.pause()
        return resolver.statistics(table, numbers.cpu().numpy())

    def register_decision_hook(self, table: str, hook: DecisionHook) -> RemovableHandle:
        """Calls a function at every training step with what this rank decided of the ids of a dynamic table. Local.

        Each id of a step is told of on one rank, the owner of its shard; of exact replicas on the first, of averaged
        ones in each, which decide for themselves. It is called before the look-up returns, when nothing but a hook can
        refuse the batch any more; not by evaluation. It must not use the collection.

        Args:
            table: its name.
            hook: is given a `rowmesh.tables.dynamic.hooks.Decisions`, whose arrays it may keep. An error that it raises
                refuses the batch on all ranks, as a RowmeshError that names it: nothing was decided then, and hooks
                that had been told of the step are told of one of that number again, which holds.

        Returns:
            A handle, whose `remove()` takes the hook away again.

        Raises:
            ConfigurationError: there is no such dynamic table.

        Example:
            >>> from rowmesh import SparseBatch
            >>> from rowmesh.tables import Dynamic, Uniform
            >>> table = TableSpec(
            ...     name="item", dim=4, storage="dynamic", dynamic=Dynamic(capacity=100), initializer=Uniform(bound=0.1)
            ... )
            >>> embeddings = EmbeddingCollection([table])
            >>> new = []
            >>> handle = embeddings.register_decision_hook("item", lambda each: new.append(each.ids[each.admitted]))
            >>> _ = embeddings(SparseBatch.from_bags({"item": [[-7, 5], [5]]}))
            >>> handle.remove()
            >>> [ids.tolist() for ids in new]
            [[-7, 5]]
        """
        return self._resolver_of(table).register_hook(table, hook)

    def _resolver_of(self, table: str) -> Resolver:
        if self.engine.resolver is None:
            raise ConfigurationError(f"{table!r} is no dynamic table; this collection has none")
        return self.engine.resolver

    @property
    def dynamic_counters(self) -> dict[str, DynamicCounters]:
        """Counters of each dynamic table of which this rank has shards, since the start: what its owner decided."""
        return {} if self.engine.resolver is None else self.engine.resolver.decided

    @property
    def reported_dynamic_counters(self) -> dict[str, DynamicCounters]:
        """Counters of each dynamic table; those of all ranks add up to what was decided, also with replicas."""
        return {} if self.engine.resolver is None else self.engine.resolver.reported

    def cores(self, table: str) -> Cores:
        """The cores of a tensor-train table and their optimizer state where they are, as views; equal on all ranks.

        To set values, call `forget_differences` before, on all ranks alike. `Cores.rows` computes rows.

        Raises:
            KeyError: there is no such table.
            ConfigurationError: it is a dense table, see `held_rows`.

        Example:
            >>> from rowmesh import AdaGrad
            >>> table = TableSpec(name="item", num_rows=1000, dim=8, storage="tensor_train", optimizer=AdaGrad())
            >>> cores = EmbeddingCollection([table]).cores("item")
            >>> [tuple(core.shape) for core in cores.cores], cores.rows(torch.tensor([999])).shape
            ([(10, 2, 16), (10, 16, 2, 16), (10, 2, 16)], torch.Size([1, 8]))
        """
        return table_shards.cores(self.engine, table)

    def barrier(self) -> None:
        """Waits for all ranks; needed after changing `local_rows` in place."""
        self.engine.barrier()

    def close(self) -> None:
        """Lets no further rank map this one's memory, which is freed with its last view; closes stores of records."""
        self.engine.close()

    def extra_repr(self) -> str:
        groups = ", ".join(f"{each.name}: {len(each.tables)} tables, {each.num_rows:,} rows" for each in self.groups)
        return f"{groups}; {self.transport} on {self.mesh.world_size} ranks, {self.device or 'cpu'}"

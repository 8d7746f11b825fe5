"""EmbeddingCollection: embedding tables spread over the ranks, as one module.

The four verbs `route`, `fetch`, `pool` and `push` are one training step of its tables; `forward` is the first three,
and `rowmesh.optim.EmbeddingOptimizer.step` is the last.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, count
from threading import Event
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rowmesh.embeddings import Embeddings, LocalRows, Outputs, views_of
from rowmesh.errors import ConfigurationError, DataError, RowmeshError
from rowmesh.exchange.backend import backend_for
from rowmesh.exchange.choice import TransportName, check_name
from rowmesh.exchange.core_part import CoreExchange, CorePart
from rowmesh.exchange.counters import CommonCounters, GroupCounters
from rowmesh.exchange.handshake import Step, agree_on_tables, agree_to_migrate
from rowmesh.exchange.micro_batch import Windows
from rowmesh.exchange.migration import Moved
from rowmesh.exchange.part import Part
from rowmesh.exchange.parts import Parts
from rowmesh.exchange.pending import Pending
from rowmesh.exchange.route import GroupExchange, Route, RouteGroup
from rowmesh.exchange.window import Form, Window, WindowLookUp, WindowMaker
from rowmesh.faults import reach
from rowmesh.gate import Gate
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.mesh.waiting import gather_objects
from rowmesh.ops.untraced import untraced
from rowmesh.optim.rules import Rate
from rowmesh.placement import Plan, TableShape
from rowmesh.placement.drift import Traffic
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableGroup, TableSpec, Tiers, fuse
from rowmesh.tables.cache import TierCounters
from rowmesh.tables.cached import CachedArena
from rowmesh.tables.spec import check_tables, with_moment_scale
from rowmesh.tensor_train.arena import Cores

logger = logging.getLogger("rowmesh")


class Rows:
    """The fetched rows of a route; valid until the next push, which `pool` checks."""

    __slots__ = ("num_pushes", "route")

    def __init__(self, route: Route, num_pushes: int) -> None:
        self.route = route
        self.num_pushes = num_pushes


class Driver(NamedTuple):
    """A pipeline, as the collection whose rows it moves sees it.

    Attributes:
        step: takes the learning rates of a step.
        settle: returns when the steps so far are done and no thread uses the tables.
        cancelled: when it is set, whoever waits for rows of other ranks gives up.
    """

    step: Callable[[Sequence[Rate]], None]
    settle: Callable[[], None]
    cancelled: Event


class _LookUp:
    """A route whose rows are fetched, as autograd sees it."""

    def __init__(self, collection: EmbeddingCollection, route: Route) -> None:
        self._collection, self._route = collection, route

    def pool(self) -> tuple[Tensor, ...]:
        """The vectors of the batch."""
        return self._collection._pool(self._route)

    def take_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Sums the gradients of equal ids; the route then waits for push."""
        self._collection._take_gradients(self._route, gradients)


class EmbeddingCollection(nn.Module):
    """Embedding tables, their rows spread over the ranks, or computed on every rank from cores (`TableSpec.storage`).

    Its rows are not `nn.Parameter`s: `EmbeddingOptimizer` updates them in place, and DistributedDataParallel leaves
    them alone. Nor are they in `state_dict()`: `rowmesh.checkpoint` saves them, by table and row. Every rank must
    construct it, and call `forward`, `backward` and the optimizer's `step`, equally often. As with `nn.EmbeddingBag`,
    `eval()` changes nothing; `torch.no_grad()` does.

    Under `torch.no_grad()` any number of threads may look up at once; on one rank also while another thread trains:
    each finds rows as they are between two steps. On several ranks threads look up between two steps only, equally
    often on every rank. Batches of tiered tables that threads look up at once must fit into fast memory together. On a
    GPU all is asked of the stream that is current. One thread at a time trains: `step` raises RowmeshError where two
    do. While a pipeline runs, its thread alone looks up.

    Args:
        tables: what to store.
        mesh: the ranks; default: this process alone.
        seed: of the initial values, which are the same for every number of ranks.
        transport: how rows travel: "one_sided" (ranks of one host read each other's memory), "collective"
            (torch.distributed), or "auto": one-sided where that is possible; between GPUs collective.
        plan: which ranks hold each row (`rowmesh plan` makes one); default: dealt over all ranks. Any plan trains the
            same model. Tensor-train tables are in none: every rank has their cores.
        replicas: without a plan: how many replicas of each table to keep, on as many groups of ranks, between which no
            row travels to be looked up; one number for all tables, or one for each by name. It must divide the number
            of ranks.
        synchronization: how replicas are kept together; "exact" trains the same model as one replica does.
        tiers: how much of tiered tables is in fast memory, and where the rest is.
        device: where rows live and look-ups run, "cpu" or "cuda" (the current GPU). Batches stay in the host's memory,
            best pinned; vectors come out on the device. It trains the same model, equal to rounding.

    Raises:
        ConfigurationError: tables clash, the transport cannot work here, replicas do not divide the ranks, ranks
            disagree about any of these, or the device cannot be used, or not for this; says what can be.
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
    ) -> None:
        super().__init__()
        check_name(transport)
        self._backend = backend_for(device)
        self.tables = tuple(tables)
        self.mesh = mesh or Mesh()
        self._rows_mesh = self.mesh.apart("tables")  # a pipeline moves rows while the program sends what it likes
        self.synchronization = synchronization or Synchronization()
        self.tiers = tiers or Tiers()
        self._transport_name: TransportName = transport
        self.plan = self._planned(plan, replicas)
        agree_on_tables(self.mesh, self.tables, seed, transport, self.synchronization, self.plan)
        self.plan.check_fits(self._shapes, self.mesh.world_size, self.mesh.ranks_per_node)
        self.tables = self._scaled(self.tables)
        self.groups: tuple[TableGroup, ...] = fuse(self.tables, self.plan.replicas)
        self._group_names = tuple(group.name for group in self.groups)
        self._outputs = Outputs(self.tables, self.groups, self._backend)
        self._router = self._backend.make_router(self.groups, self._outputs.layouts, self.mesh.rank)
        self.features, self.dims = self._outputs.features, self._outputs.dims
        self._common = CommonCounters()
        self._parts = self._make_parts(self.plan)
        self._parts.allocate()
        self._exchanges = self._parts.exchanges
        self._initialize(seed)
        self._parts.connect()
        self._pending = Pending()
        self._gate = Gate(is_shared=self._backend.look_ups_overlap)
        self._fetching = threading.Lock()  # ranks number their fetches alike
        self._driver: Driver | None = None
        self._windows: weakref.WeakSet[Windows] = weakref.WeakSet()
        self._window_maker = WindowMaker()
        self.traffic: Traffic | None = None  # where requests of batches that train are counted, if anybody asks
        self._num_fetches = self._num_pushes = 0
        self._look_ups = count(1)  # numbers them for messages
        self.step_count = self.num_migrations = 0
        logger.info("transport %s: %s", self.transport, self.transport_reason)

    @property
    def _shapes(self) -> list[TableShape]:
        return [TableShape.of(table) for table in self.tables if table.storage != "tensor_train"]

    def _planned(self, plan: Plan | None, replicas: int | Mapping[str, int]) -> Plan:
        check_tables(self.tables)
        if plan is None:
            size, per_node = self.mesh.world_size, self.mesh.ranks_per_node
            return Plan.dealt(self._shapes, size, per_node, replicas=replicas)
        if replicas != 1:
            raise ConfigurationError("give replicas or a plan, which has replicas of its own, not both")
        return plan

    def _scaled(self, tables: Sequence[TableSpec]) -> tuple[TableSpec, ...]:
        """Tables whose update rules know by what to scale moments, which depends on the replicas."""
        replicas = self.plan.replicas if self.synchronization.mode == "average" else {}
        return tuple(with_moment_scale(table, replicas.get(table.name, 1)) for table in tables)

    def _make_parts(self, plan: Plan) -> Parts:
        how = (self._transport_name, self.synchronization, self.tiers)
        makers = self._backend.make_part, self._backend.make_core_part
        return Parts(self._rows_mesh, plan, self.groups, *how, self._common, *makers)

    def _initialize(self, seed: int) -> None:
        for exchange in self._exchanges:
            held = exchange.address_map.held
            exchange.arena.initialize(seed, [list(held(number)) for number in range(len(exchange.group.tables))])

    @property
    def device(self) -> torch.device:
        """Where rows are and vectors come out: the CPU too, where kernels of a GPU are interpreted."""
        return self._backend.device

    @property
    def transport(self) -> str:
        """One of "local", "one_sided" and "collective"; several, joined by "+", where tables differ in replicas."""
        return self._parts.transport

    @property
    def transport_reason(self) -> str:
        """Why that one."""
        return self._parts.reason

    @property
    def counters(self) -> list[GroupCounters]:
        """What each group moved since the start, on this rank."""
        return [exchange.counters for exchange in self._exchanges]

    @property
    def tier_counters(self) -> dict[str, TierCounters]:
        """What each tiered group found in fast memory, read and wrote back since the start, on this rank."""
        arenas = {exchange.group.name: exchange.arena for exchange in self._exchanges}
        return {name: arena.counters for name, arena in arenas.items() if isinstance(arena, CachedArena)}

    @property
    def common_counters(self) -> CommonCounters:
        """What the messages that serve all groups at once moved since the start, on this rank."""
        return self._common

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Memory of this rank in bytes, by use: rows, optimizer state, and buffers, whether in use or idle."""
        rows = state = 0
        buffers = self._outputs.pooling.num_bytes + self._router.num_bytes
        buffers += self._parts.num_bytes + self._window_maker.num_bytes
        buffers += sum(windows.num_bytes for windows in self._windows)
        for exchange in self._parts.exchanges:
            of_rows, of_state = exchange.arena.num_bytes
            rows, state = rows + of_rows, state + of_state
            buffers += exchange.arena.bookkeeping_bytes if isinstance(exchange.arena, CachedArena) else 0
        return {"rows": rows, "optimizer state": state, "buffers": buffers}

    @untraced
    def forward(self, batch: SparseBatch) -> Embeddings:
        """Looks a batch up; collective, each rank passes its own samples.

        Raises:
            DataError: the batch's features are not the tables', or an id is out of range.
        """
        self._settle_replicas()
        with self._gate.reading:
            self.settle()
            route = self._route(batch, self._moment())
            self._fetch(route)
            reach("collection.fetched")
            return self._pool_route(route)

    def _settle_replicas(self) -> None:
        """Brings rows up to date that a look-up would change otherwise, while others read them."""
        if self._parts.is_behind:
            with self._gate.writing:
                self.settle()
                self._parts.settle()

    def route(self, batch: SparseBatch) -> Route:
        """Finds the unique ids of a batch, their owners, and the way back; no communication."""
        with self._gate.reading:
            self.settle()
            return self._route(batch, self._moment())

    def _moment(self) -> tuple[int, int]:
        return next(self._look_ups), self.step_count

    def _route(self, batch: SparseBatch, moment: tuple[int, int] | None = None) -> Route:
        if batch.weights is not None and batch.weights.requires_grad:
            raise DataError("weights of a SparseBatch get no gradient; detach them")
        route = self._router(batch, self._exchanges, moment)
        if self.traffic is not None and torch.is_grad_enabled():
            for group in route.groups:
                group.count_into(self.traffic)
        return route

    def fetch(self, route: Route) -> Rows:
        """Brings the rows of a route within reach; collective."""
        self._settle_replicas()
        with self._gate.reading:
            self.settle()
            self._fetch(route)
            return Rows(route, self._num_pushes)

    def _fetch(self, route: Route) -> None:
        meanwhile = self._outputs.pooling.compress if torch.is_grad_enabled() else _nothing
        with self._fetching:
            self._num_fetches += 1
            route.number = self._num_fetches
            self._parts.fetch(route, meanwhile)
        self._parts.compute(route, meanwhile)

    def pool(self, rows: Rows) -> Embeddings:
        """The vectors of the batch; differentiable, without communication.

        Raises:
            RowmeshError: rows were updated since they were fetched.
        """
        with self._gate.reading:
            if rows.num_pushes != self._num_pushes:
                raise RowmeshError("rows were fetched before a push and are stale; fetch the route again")
            return self._pool_route(rows.route)

    def _pool_route(self, route: Route) -> Embeddings:
        if torch.is_grad_enabled():
            route.thread, route.num_pushes = threading.get_ident(), self._num_pushes
        return self._outputs(_LookUp(self, route), route.groups, route.batch, slice(0, route.batch.batch_size))

    def _pool(self, route: Route) -> tuple[Tensor, ...]:
        return self._outputs.pooling.forward(route.groups, route.batch, route.batch.batch_size)

    def _take_gradients(self, route: Route, gradients: Sequence[Tensor]) -> None:
        if route.has_gradients:
            raise RowmeshError("backward ran twice through one forward of an EmbeddingCollection; call forward again")
        self._outputs.pooling.backward(route.groups, gradients)
        route.has_gradients = True
        self._pending.add(route)

    def push(self, routes: Sequence[Route], lrs: Sequence[float]) -> None:
        """Sends the gradients of routes to the owners, which update their rows; collective.

        Ranks need not push the same routes: one without gradients adds nothing.

        Args:
            routes: routes whose backward has run; the gradients of several add up.
            lrs: the learning rate of each group, the same on all ranks.

        Raises:
            RowmeshError: a route has no gradients, or they were pushed already; or two threads train at once.
            ConfigurationError: ranks have different learning rates; names them.
            PeerError: a rank died, or did not call forward and push as the others did; names it.
        """
        if len(lrs) != len(self.groups):
            raise RowmeshError(f"{len(self.groups)} groups need as many learning rates, got {len(lrs)}")
        self._push(routes, [Rate(lr) for lr in lrs])

    def _push(self, routes: Sequence[Route] | None, rates: Sequence[Rate]) -> None:
        self._check_no_driver("rows are updated")
        with self._gate.writing:
            step = self.make_step(rates, self.step_count + 1)
            taken = self._pending.take(routes)
            self._num_pushes += 1
            self._pending.note_push(self._num_pushes)
            reach("collection.push")
            self._parts.push(taken, step)
            self.step_count += 1
            for exchange in self._exchanges:
                exchange.counters.pushes += 1

    def make_step(self, rates: Sequence[Rate], number: int = -1) -> Step:
        """A step of all groups."""
        return Step(number, rates, self._group_names)

    @property
    def num_backwards(self) -> int:
        """How many look-ups had their backward so far, on this rank."""
        return self._pending.num_added

    def check_pending(self) -> bool:
        """Whether the gradients that wait for a push are finite on all ranks; where not, the next backward drops them.

        Collective: a message of its own, for those who ask.

        Raises:
            RowmeshError: a pipeline runs, which has sent gradients already.
        """
        self._check_no_driver("a GradScaler checks gradients, which a pipeline sends before the step")
        self._pending.drop_refused()
        pooling = self._outputs.pooling
        mine = all(pooling.is_finite(route.groups) for route in self._pending.routes)
        is_finite = all(gather_objects(self.mesh, mine, "checking gradients"))
        if not is_finite:
            self._pending.refuse()
        return is_finite

    def push_pending(self, lrs: Sequence[float], factors: Sequence[float] | None = None) -> None:
        """Pushes every route whose backward has run since the last push; under a pipeline, steps its batch.

        Args:
            lrs: the learning rate of each group.
            factors: what the gradients of each group are multiplied by first; default: 1.
        """
        rates = list(map(Rate, lrs, factors)) if factors is not None else [Rate(lr) for lr in lrs]
        if self._driver is None:
            self._push(None, rates)
            return
        if self._pending:
            raise RowmeshError(
                f"{len(self._pending)} batch(es) were looked up and had their backward beside the pipeline; take all "
                "gradients of a step from the pipeline's micro-batches"
            )
        self._driver.step(rates)

    # What a pipeline (rowmesh.pipeline) drives, in place of the four verbs

    def windows(self, form: Form, *, finds_final: bool, verifies: bool) -> list[Windows]:
        """How the windows of each part travel. Collective."""
        how = {"finds_final": finds_final, "verifies": verifies}
        made = [self._backend.make_windows(part, form, **how) for part in self._parts.parts]
        self._windows.update(made)
        return made

    def take_over(self, driver: Driver) -> None:
        """Gives the rows and the steps of the optimizer to a pipeline.

        Raises:
            RowmeshError: another one has them, or runs on the same mesh.
        """
        with self._gate.writing:
            self._check_no_driver("another one begins")
            self.mesh.claim("pipeline")
            self._driver, self._rows_mesh.cancellation.event = driver, driver.cancelled

    def prepare_to_take_back(self) -> None:
        """Says that `take_back` follows as soon as the threads of the pipeline have ended."""
        self.mesh.end_claim("pipeline")

    def take_back(self) -> None:
        """Takes rows and steps back, when no thread of the pipeline uses them."""
        self._driver = self._rows_mesh.cancellation.event = None
        self.mesh.unclaim("pipeline")

    def settle(self) -> None:
        """Waits until a pipeline, if one runs, has done the steps so far; the four verbs do so by themselves.

        Raises:
            RowmeshError: one of its batches is half way, or it failed.
        """
        if self._driver is not None:
            self._driver.settle()

    def _check_no_driver(self, what: str) -> None:
        if self._driver is not None:
            raise RowmeshError(f"a pipeline runs, and has rows of later batches; leave its loop before {what}")

    def make_window(self, batch: SparseBatch, sizes: Sequence[int]) -> Window:
        """Routes a batch that is looked up by micro-batch; no communication."""
        route = self._route(batch)
        bounds = list(accumulate(sizes, initial=0))
        layouts = self._outputs.layouts.parts(route.batch, [group.layout for group in route.groups], bounds)
        return self._window_maker(route, bounds, layouts)

    def pool_part(self, window: Window, part: int, finished: Callable[[], None]) -> Embeddings:
        """The vectors of a micro-batch whose rows are here; differentiable.

        Args:
            window: its batch.
            part: which of its micro-batches.
            finished: is called when the gradients of its rows are summed.
        """
        pooling: Any = self._outputs.pooling
        look_up = WindowLookUp(window, part, pooling, finished)
        groups: Any = [group.parts[part] for group in window.groups]
        return self._outputs(look_up, groups, window.route.batch, slice(window.bounds[part], window.bounds[part + 1]))

    def update_window(self, windows: Sequence[Windows], window: Window, rates: Sequence[Rate]) -> None:
        """Applies the gradients of a window, which all are on their way. Collective."""
        self.step_count += 1
        self._num_pushes += 1
        step = self.make_step(rates, self.step_count)
        for each in windows:
            each.update(window, step)
        for exchange in self._exchanges:
            exchange.counters.pushes += 1

    def discard_pending(self) -> None:
        """Forgets gradients that were not pushed."""
        self._pending.clear()

    def synchronize(self) -> None:
        """Makes all replicas of all rows equal, for an evaluation or a checkpoint between two averages. Collective.

        Does nothing where they always are: without replicas, and under exact synchronization. Where it does something,
        rows that were fetched before are stale.
        """
        self.settle()
        with self._gate.writing:
            self._synchronize()

    def _synchronize(self) -> None:
        self._num_pushes += self._parts.averages
        self._parts.synchronize()

    def forget_differences(self) -> None:
        """Takes the rows of this rank as equal to those of other replicas: for whoever sets `held_rows` on all of them.

        `rowmesh.checkpoint.load` calls it.

        Raises:
            RowmeshError: a pipeline runs, which has rows of later batches already.
        """
        self._check_no_driver("rows are set")
        with self._gate.writing:
            self._num_pushes += 1
            self._parts.forget()

    def migrate(self, plan: Plan) -> Moved:
        """Goes over to another plan between two steps, with all rows and optimizer states; training goes on unchanged.

        Replicas that are averaged now and then are averaged first.

        Collective and blocking: every rank calls it with the same plan, when gradients are pushed and no batch is
        under way. Views that `local_rows` and `held_rows` gave show the rows under the old plan, which are not
        updated any more. Counters go on.

        Until it is done a rank has the rows of both plans in memory, and buffers of about 64 MiB. Every row that a
        rank comes to hold moves once: its values, and its states.

        Args:
            plan: for the same tables, ranks and replicas.

        Returns:
            What moved, on all ranks together.

        Raises:
            RowmeshError: a batch is under way on some rank; names it. The old plan goes on.
            ConfigurationError: the plan is for other tables, ranks or replicas, or the device cannot run it, or ranks
                have different ones. The old plan goes on.
            IdRangeError: on a device, an earlier batch that nobody looked at had ids that are no rows.
            MemoryError: a rank has no room for the rows of both plans. The old plan goes on.
            PeerError: a rank died, or did not come within the mesh's timeout; names it.

        Example:
            >>> from rowmesh.placement import RowRange, TablePlan
            >>> embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4)])
            >>> shape = embeddings.plan.tables[0].shape
            >>> halves = (RowRange(0, 5, "replicated"), RowRange(5, 10))
            >>> embeddings.migrate(Plan((TablePlan(shape, halves),), world_size=1, ranks_per_node=1)).rows
            0
        """
        self._check_no_driver("rows migrate")
        with self._gate.writing:
            return self._migrate(plan)

    def _migrate(self, plan: Plan) -> Moved:
        began = time.perf_counter()
        self._parts.barrier()  # whose devices may hold batches that they have not looked at
        agree_to_migrate(self.mesh, plan, max(exchange.num_lent for exchange in self._exchanges))
        plan.check_fits(self._shapes, self.mesh.world_size, self.mesh.ranks_per_node)
        if tiered := [table.name for table in self.tables if table.storage == "tiered"]:
            raise ConfigurationError(f"tables {tiered} are tiered, and rows of such cannot migrate; load a checkpoint")
        if (plan.replicas, plan.together) != (self.plan.replicas, self.plan.together):
            raise ConfigurationError("the plan has other replicas than the one in use; load a checkpoint under it")
        self._synchronize()
        parts = self._make_parts(plan)
        try:
            parts.allocate("; the old plan goes on")
            mine = parts.fill_from(self._parts)
            for old, new in zip(self._exchanges, parts.exchanges, strict=True):
                new.counters = old.counters  # now: what keeps replicas together goes on with those that it finds
            parts.connect()
        except BaseException:
            parts.close()
            raise
        self._replace(plan, parts)
        everyone = gather_objects(self.mesh, [(moved.rows, moved.num_bytes) for moved in mine], "migrating")
        rows, num_bytes = map(sum, zip(*(moved for each in everyone for moved in each), strict=True))
        return Moved(rows, num_bytes, elapsed_s=time.perf_counter() - began)

    def _replace(self, plan: Plan, parts: Parts) -> None:
        self._parts.close()
        self.plan, self._parts, self._exchanges = plan, parts, parts.exchanges
        self._window_maker = WindowMaker()  # the memory of windows knows where rows were
        self._num_pushes += 1  # rows that were fetched are stale
        self.num_migrations += 1
        gc.collect()  # a transport and its exchanges refer to each other, and hold the old rows

    def local_rows(self, table: str) -> list[LocalRows]:
        """The rows of a table whose home is this rank, and their optimizer state, as views.

        Every row of a table is among the local rows of one rank; replicas share them. Where the plan copies rows, their
        copies are not: who changes values in place changes those of `held_rows`.

        Where tables have replicas, ask again after a step: what others tell may still be on its way to views that were
        made before. Between two averages replicas differ; `synchronize` first. Where there are more than two, every
        rank must call this equally often.

        Raises:
            KeyError: there is no such table.
            ConfigurationError: it is a tensor-train table, whose rows are nowhere; see `cores`.
        """
        part, exchange, number = self._found_rows(table)
        pieces = [part.share(piece) for piece in exchange.address_map.homed(number)]
        return [view for piece in pieces for view in views_of(exchange, piece)]

    def held_rows(self, table: str) -> list[LocalRows]:
        """All rows of a table that this rank holds, copies of others' included, as views.

        For tables with replicas see `local_rows`. Who sets their values, on all replicas alike, calls
        `forget_differences` before.

        Raises:
            KeyError: there is no such table.
            ConfigurationError: it is a tensor-train table, whose rows are nowhere; see `cores`.
        """
        _, exchange, number = self._found_rows(table)
        return [view for piece in exchange.address_map.held(number) for view in views_of(exchange, piece)]

    def _found_rows(self, table: str) -> tuple[Part, GroupExchange, int]:
        part, exchange, number = self._find(table)
        if isinstance(part, CorePart):
            raise ConfigurationError(
                f"table {table!r} is a tensor-train table: its rows are computed where they are looked up, and stored "
                f"nowhere; cores({table!r}) gives what they are computed from"
            )
        return part, exchange, number

    def _find(self, table: str) -> tuple[Part | CorePart, GroupExchange, int]:
        self.settle()
        with self._gate.writing:  # what replicas told may be on its way
            return self._parts.find(table)

    def cores(self, table: str) -> Cores:
        """The cores of a tensor-train table and their optimizer state where they are, as views; equal on all ranks.

        Who sets their values, on all ranks alike, calls `forget_differences` before. `Cores.rows` computes rows.

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
        part, exchange, number = self._find(table)
        if not isinstance(part, CorePart):
            raise ConfigurationError(f"table {table!r} is dense and has no cores; held_rows({table!r}) gives its rows")
        return cast("CoreExchange", exchange).arena.tables[number]

    def barrier(self) -> None:
        """Waits until all ranks have come here; needed after changing `local_rows` in place."""
        self.settle()
        with self._gate.writing:
            self._parts.barrier()

    def close(self) -> None:
        """Lets no further rank map this one's memory, which is freed with its last view; not to be used any more."""
        self._parts.close()

    def extra_repr(self) -> str:
        """Groups and transport."""
        groups = ", ".join(f"{group.name}: {len(group.tables)} tables" for group in self.groups)
        return f"{groups}; {self.transport} on {self.mesh.world_size} ranks"


def _nothing(group: RouteGroup) -> None:
    """What an evaluation does while rows travel."""

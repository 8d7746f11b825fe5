"""Engine: the tables of an `EmbeddingCollection` at work, as the collection and an optimizer drive them.

It has the rows (`ShardGroups`), the way from batches to vectors (router, outputs), gradients that wait for a push, and
the step count. A pipeline drives it through `rowmesh.collection.driven_engine`.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from rowmesh._support.faults import reach
from rowmesh._support.gate import Gate
from rowmesh.collection.control import Control
from rowmesh.collection.freezing import freeze
from rowmesh.collection.gradient_norm import are_finite, gradient_norm, norm_of
from rowmesh.collection.outputs import Embeddings, Outputs
from rowmesh.collection.pending import Pending
from rowmesh.errors import (
    ConfigurationError,
    IdRangeError,
    NoRoomError,
    PeerError,
    RowmeshError,
    StoreError,
)
from rowmesh.exchange.cores import CoreShardGroup
from rowmesh.exchange.dynamic_means import DynamicMeans
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.handshake import Step, StepRefusedError, agree_to_migrate
from rowmesh.exchange.migration import Moved
from rowmesh.exchange.resolve.collected import make_resolver
from rowmesh.exchange.resolve.pins import BatchPin
from rowmesh.exchange.resolve.resolver import Resolving
from rowmesh.exchange.route import AnyRouteGroup, Route
from rowmesh.exchange.router import make_router
from rowmesh.exchange.shard_group import ShardGroup, ShardGroups, ShardOptions
from rowmesh.mesh import Mesh
from rowmesh.mesh.failures import FailureMark
from rowmesh.mesh.waiting import broadcast_object, gather_objects
from rowmesh.placement import Plan, TableShape
from rowmesh.placement.drift import Traffic
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec, fuse
from rowmesh.tables.cached import CachedArena
from rowmesh.tables.spec import names_of
from rowmesh.tables.update_rules import Rate

logger = logging.getLogger("rowmesh")
_numbers = count()  # of the collections that this process has made


class FetchedRows:
    """The fetched rows of a route; valid until the next push, which `pool` checks."""

    __slots__ = ("num_pushes", "route")

    def __init__(self, route: Route, num_pushes: int) -> None:
        self.route = route
        self.num_pushes = num_pushes


class Engine:
    """Tables at work. Making one is collective.

    Args:
        tables: what to store.
        plan: which ranks hold each row.
        mesh: the ranks.
        options: how rows travel and where they are.
        seed: of the initial values.

    Attributes:
        mesh, options: as given.
        rows_mesh: the ranks, with process groups for rows.
        plan: which ranks hold each row now.
        device: where rows are and vectors come out: the CPU too, where kernels of a GPU are interpreted.
        groups: of tables that travel together.
        group_names: their names.
        outputs: makes vectors of rows.
        router: finds the rows of batches.
        shard_groups: rows and their transports.
        exchanges: of all groups, in their order.
        resolver: of dynamic tables; None where there are none.
        pending: gradients that wait for a push.
        control: whether the program or a pipeline changes rows.
        gate: is held while rows are looked up, or change.
        traffic: where requests of batches that train are counted; None where they are not.
        step_count: how many steps were taken.
        num_migrations: how many plans were taken over.
        num_sets: how often rows were set from outside.
        failure: whether a step ended half way, on any rank.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        plan: Plan,
        mesh: Mesh,
        options: ShardOptions,
        seed: int,
    ) -> None:
        self.mesh, self.plan, self.options = mesh, plan, options
        self.device = options.device or torch.device("cpu")
        self._tables = tuple(tables)
        self.rows_mesh = mesh.with_process_group("tables")  # a pipeline sends rows while the program sends its own
        self.groups = fuse(tables, plan.replicas)
        self.group_names = tuple(group.name for group in self.groups)
        self.outputs = Outputs(tables, self.groups, options.device)
        shard_groups = ShardGroups(self.rows_mesh, plan, self.groups, options)
        shard_groups.allocate()
        self._take(shard_groups)
        for exchange in self.exchanges:
            held = exchange.address_map.held
            exchange.arena.initialize(seed, [list(held(number)) for number in range(len(exchange.group.tables))])
        self.shard_groups.connect()
        self.failure = self._make_mark()
        shares_memory = shard_groups.transport == "one_sided"
        self.resolver = make_resolver(
            self.exchanges, plan, mesh, seed, options.synchronization, shares_memory=shares_memory
        )
        if self.resolver is not None:
            for each in self._stored:
                if isinstance(each.synchronizer, DynamicMeans):
                    each.synchronizer.decide_with(self.resolver)
        indexed = () if self.resolver is None else self.resolver.device_tables
        self.router = make_router(self.groups, self.outputs.layouts, mesh.run.rank, options.device, indexed)
        self._under_way: weakref.WeakKeyDictionary[Route, SparseBatch] = weakref.WeakKeyDictionary()
        self._last_pins: list[BatchPin] = []  # of batches whose gradients other replicas may still send
        self.pending = Pending()
        self.control = Control(self.rows_mesh)
        self.gate = Gate(is_shared=options.device is None)  # the host only launches, and keeps things of one look-up
        self._fetching = threading.Lock()  # ranks number their fetches alike
        self.traffic: Traffic | None = None
        self._num_fetches = self._num_pushes = 0
        self._look_ups = count(1)  # numbers them for messages
        self.step_count = self.num_migrations = self.num_sets = 0
        logger.info("transport %s: %s", shard_groups.transport, shard_groups.reason)

    def _make_mark(self) -> FailureMark:
        """Makes the mark by which ranks tell each other that a step of these tables ended half way. Collective."""
        name, mesh = None, self.rows_mesh
        if mesh.world_size > 1:
            own = f"{mesh.run.rank}-{next(_numbers)}"
            name = broadcast_object(mesh, own, "naming the tables of all ranks")
        return FailureMark(mesh.failures, name)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Memory of this rank in bytes, by use: rows, optimizer state, and buffers, whether in use or idle."""
        rows = state = 0
        buffers = self.outputs.pooling.num_bytes + self.router.num_bytes + self.shard_groups.num_bytes
        for exchange in self.exchanges:
            of_rows, of_state = exchange.arena.num_bytes
            rows, state = rows + of_rows, state + of_state
            buffers += exchange.arena.bookkeeping_bytes if isinstance(exchange.arena, CachedArena) else 0
        return {"rows": rows, "optimizer state": state, "buffers": buffers}

    # The four verbs

    def look_up(self, batch: SparseBatch) -> Embeddings:
        """Routes, fetches and pools a batch. Collective."""
        if self._replicated:
            self.flush_replicas()
        with self.gate.reading:
            if self.failure.text:
                self.failure.check()
            if self.control.driver is not None:
                self.control.driver.wait()
            route = self.make_route(batch, (next(self._look_ups), self.step_count))
            try:
                self._fetch(route)
                if route.pins:
                    self._tell(route)
                reach("engine.fetched")
                found = self._pool(route)
            except BaseException:  # it decides nothing then; also where other ranks do not know, see Resolver
                if self.resolver is not None:
                    self.resolver.take_back(route.pins)
                raise
            del route  # where nothing trains, it gives its memory back here, where Ctrl-C waits
            return found

    def refuse(self, error: Exception) -> None:
        """Tells the other ranks, in the place of a look-up, that this one cannot make its batch; it raises the error.

        They raise RefusedError in theirs. No-op without dynamic tables, where look-ups of all ranks begin by no message
        of their own, and in a pipeline's loop, where other batches are looked up meanwhile.
        """
        if self.resolver is not None and self.control.driver is None:
            self.resolver.refuse(error)

    def route(self, batch: SparseBatch) -> Route:
        """Finds the unique ids of a batch, their owners, and the way back; no communication but for dynamic tables."""
        with self.gate.reading:
            self.wait()
            route = self.make_route(batch, (next(self._look_ups), self.step_count))
            self._tell(route)
            return route

    def fetch(self, route: Route) -> FetchedRows:
        """Makes the rows of a route readable. Collective."""
        self.flush_replicas()
        with self.gate.reading:
            self.wait()
            self._fetch(route)
            return FetchedRows(route, self._num_pushes)

    def pool(self, rows: FetchedRows) -> Embeddings:
        """The vectors of fetched rows."""
        with self.gate.reading:
            if rows.num_pushes != self._num_pushes:
                raise RowmeshError("rows were fetched before a push and are stale; fetch the route again")
            return self._pool(rows.route)

    def push(self, routes: Sequence[Route] | None, rates: Sequence[Rate]) -> None:
        """Sends the gradients of routes, by default of all that wait, to the owners, which update rows. Collective."""
        if self.control.driver is not None or self.control.stand_in:
            self.control.check("rows are updated")
        with self.gate.writing:
            if self.failure.text:
                self.failure.check()
            if self._replicated:
                self._flush()
            step = Step(self.step_count + 1, rates, self.group_names)
            taken = self.pending.choose(routes)
            if (refusal := self._prepare(taken, step)) is not None:
                raise self._refused(step, refusal)
            try:
                for each in self._all:
                    each.apply()
                self.pending.remove(taken, self._num_pushes + 1)
                self.finish_step([] if self.resolver is None else [pin for each in taken for pin in each.pins])
            except (NoRoomError, StoreError):  # of averaged replicas, which then make nothing one, on all ranks alike
                raise
            except BaseException as error:
                error.add_note(f"step {step.number} ended half way; its tables cannot be used any more")
                self.fail(step.number, error)
                raise
            del taken  # routes give their memory back here, where Ctrl-C waits

    # [Note: a step is taken by all ranks or by none] in `rowmesh.exchange.transport`

    def _prepare(self, routes: Sequence[Route], step: Step) -> Exception | None:
        """Prepares a step, and agrees on it with all ranks; returns why none takes it, None where all do."""
        refusal = None
        try:
            reach("engine.push")
            for each in self._all:
                each.prepare(routes, step)
        except Exception as error:
            refusal = error
        try:
            for each in self._all:
                refusal = each.agree(step, refusal)
        except PeerError as error:
            if not error.is_common:
                self.fail(step.number, error)
            self._withdraw()
            raise
        except BaseException as error:
            self.fail(step.number, error)
            self._withdraw()
            raise
        if refusal is not None:
            self._withdraw()
        return refusal

    def _withdraw(self) -> None:
        for each in self._all:
            each.withdraw()

    def _refused(self, step: Step, refusal: Exception) -> Exception:
        """The error for a step that no rank has taken: why this rank could not, or which other one."""
        rest = (
            f"step {step.number} was not taken, on no rank: no row has changed, and gradients are kept; call step() "
            "again, or drop them by zero_grad()"
        )
        if isinstance(refusal, (IdRangeError, PeerError)) and not isinstance(refusal, StepRefusedError):
            self.pending.clear()  # a device looked up ids that are no rows, on this rank or on another
            rest = f"step {step.number} was not taken, on no rank: no row has changed, and gradients are dropped"
        mine = None if isinstance(refusal, StepRefusedError) else f"{type(refusal).__name__}: {refusal}"
        everyone = gather_objects(self._agreeing, mine, "telling why a step is not taken")
        if mine is not None:
            refusal.add_note(rest)
            return refusal
        named = self._agreeing.name
        why = "; ".join(f"rank {named(rank)} cannot take it: {each}" for rank, each in enumerate(everyone) if each)
        return PeerError(f"rank {named(self._agreeing.rank)}: {rest}; {why}")

    @property
    def _agreeing(self) -> Mesh:
        """The ranks that take a step together: all, but where averaged replicas step for themselves."""
        alone = self._computed or [each for each in self._stored if not each.averages]
        return self.rows_mesh if alone else min(self._stored, key=lambda each: each.replicas).mesh

    def fail(self, step: int, error: BaseException) -> None:
        """A step ended half way, or ranks may disagree on whether it was taken: these tables are of no use any more."""
        rank = self.rows_mesh.name(self.rows_mesh.rank)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        self.failure.set(f"rank {rank} failed in step {step}, on which ranks had agreed ({what})")
        for each in self._all:
            each.fail(step)

    def check_whole(self) -> None:
        """Raises PeerError where a step ended half way, on this rank or, as far as it can be known now, on another."""
        self.failure.look()
        self.failure.check()

    def _flush(self) -> None:
        """Updates rows by the messages of other replicas. Collective."""
        for each in self._replicated:
            try:
                each.flush()
            except BaseException as error:
                if each.is_half_done:
                    self.fail(self.step_count, error)
                raise

    def finish_step(self, pins: list[BatchPin]) -> None:
        """Counts a step that all ranks have taken, and ends its batches.

        Args:
            pins: of those that have dynamic ids; what replicas send of them comes before the next step ends.
        """
        self._num_pushes += 1
        self.step_count += 1
        for exchange in self.exchanges:
            exchange.counters.add_push()
        if self.resolver is None:
            return
        for pin in pins:
            pin.begin_step()
        done, self._last_pins = (self._last_pins, pins) if self._replicated else (pins, [])
        for pin in done:
            pin.end()

    def make_route(
        self,
        batch: SparseBatch,
        moment: tuple[int, int] | None = None,
        *,
        items: Sequence[SparseBatch] = (),
        is_ahead: bool = False,
        is_short: bool = False,
    ) -> Route:
        """Finds the rows of a batch.

        Args:
            batch: to be looked up.
            moment: the number of its look-up and the steps before it, for messages.
            items: whose samples it has, one after the other, where dynamic tables decide about each by itself.
            is_ahead: whether a pipeline routes it before its turn.
            is_short: whether other batches have more items.

        Raises:
            RefusedError: there are dynamic tables, and another rank has no such batch, or cannot route it.
            RowmeshError: this rank cannot; where there are dynamic tables, all ranks know.
        """
        if self.resolver is None:
            route, again = self.router(batch, self.exchanges, moment, is_ahead=is_ahead), False
        else:
            if self.control.stand_in and torch.is_grad_enabled():
                self.control.check("dynamic tables are looked up with gradients, which admits and evicts ids")
            again = self._is_computed_again(batch)
            times = [each.time for each in items] if items else [batch.time]
            resolve = Resolving(self.resolver, times, is_ahead=is_ahead, again=again, is_short=is_short)
            try:
                route = self.router(batch, self.exchanges, moment, resolve, items, is_ahead=is_ahead)
                if is_short:
                    resolve.end()
            except Exception as error:
                resolve.refuse(error)
                raise
            if torch.is_grad_enabled():
                self.pending.drop_taken_back()
                self._under_way[route] = batch
        if self.traffic is not None and torch.is_grad_enabled() and not again:
            for group in route.groups:
                group.exchange.count_into(group, self.traffic)
        return route

    def _tell(self, route: Route) -> None:
        """Tells hooks of dynamic tables what was decided of a batch; collective where there are some.

        Raises:
            RowmeshError: on all ranks alike, where a hook failed; what was decided was taken back.
        """
        if self.resolver is not None:
            try:
                for pin in route.pins:
                    self.resolver.tell(pin)
            except BaseException:
                self.resolver.take_back(route.pins)
                raise

    def _is_computed_again(self, batch: SparseBatch) -> bool:
        """Whether a backward computes once more what it read of a batch under way, as activation checkpointing does.

        A look-up that backward makes for the first time (`use_reentrant=True` looks up without gradients before) is one
        like any other.
        """
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
            return False
        return any(_are_equal(batch, other) for other in [*self._under_way.values()])

    def _fetch(self, route: Route) -> None:
        meanwhile = self.outputs.pooling.compress if torch.is_grad_enabled() else _nothing
        with self._fetching:
            self._num_fetches += 1
            route.note_fetch(self._num_fetches)
            for each in self._stored:
                each.fetch(route, meanwhile)
        for each in self._computed:
            each.fetch(route, meanwhile)

    def _pool(self, route: Route) -> Embeddings:
        take = partial(self._take_gradients, route, threading.get_ident(), self._num_pushes)
        return self.outputs(route.groups, route.batch, slice(0, route.batch.batch_size), take)

    def _take_gradients(self, route: Route, thread: int, num_pushes: int, gradients: Sequence[Tensor]) -> None:
        """Sums the gradients of equal ids; the route then waits for push."""
        if route.has_gradients:
            raise RowmeshError("backward ran twice through one forward of an EmbeddingCollection; call forward again")
        # Peers read sums before the update; and several look-ups would each keep the gradient of its output.
        may_wait = self.mesh.world_size == 1 and not self.pending
        self.outputs.pooling.backward(route.groups, gradients, may_wait=may_wait)
        route.note_backward()
        self.pending.add(route, thread, num_pushes)

    def wait(self) -> None:
        """Waits until a pipeline, if one runs, has done the steps so far; the four verbs do so by themselves.

        Raises:
            RowmeshError: one of its batches is half way, or it failed.
            PeerError: a step ended half way, on this rank or on another.
        """
        self.failure.check()
        if self.control.driver is not None:
            self.control.driver.wait()

    def pause(self) -> None:
        """Has a pipeline, if one runs, take back what it opened ahead; it goes on with its next batch.

        Collective then: every rank calls it after the same step.

        Raises:
            RowmeshError: as `wait`; or some batches cannot be taken back.
            PeerError: as `wait`.
        """
        self.failure.check()
        if self.control.driver is not None:
            self.control.driver.pause()

    def flush_replicas(self) -> None:
        """Updates rows by the messages of other replicas, before a look-up reads them. Collective."""
        if self._replicated:
            self.wait()  # ranks would not agree on whether there are messages while a pipeline's step is being done
        if any(each.needs_flush for each in self._replicated):
            with self.gate.writing:
                self.wait()
                self._flush()

    # Calls of an optimizer

    def push_pending(self, rates: Sequence[Rate]) -> None:
        """Pushes every route whose backward has run since the last push; under a pipeline, steps its batch."""
        if (driver := self.control.driver) is None:
            self.push(None, rates)
            return
        if self.pending:
            raise RowmeshError(
                f"{len(self.pending)} batch(es) were looked up and had their backward beside the pipeline; take all "
                "gradients of a step from the pipeline's micro-batches"
            )
        driver.step(rates)

    @property
    def num_backwards(self) -> int:
        """How many look-ups had their backward so far, on this rank."""
        return self.pending.num_added

    def check_pending(self) -> bool:
        """Whether the gradients that wait for a push are finite on all ranks; where not, the next backward drops them.

        Collective: a message of its own. A pipeline drops them where their batch has no step.

        Raises:
            ConfigurationError: a pipeline averages replicas of dynamic tables, ahead of the step.
        """
        if (driver := self.control.driver) is not None:
            self._check_may_skip()
            return math.isfinite(sum(driver.squares()))
        self.pending.drop_refused()
        pooling = self.outputs.pooling
        mine = all(pooling.is_finite(route.groups) for route in self.pending.routes)
        is_finite = all(gather_objects(self.mesh, mine, "checking gradients"))
        if not is_finite and self.resolver is not None:  # perhaps those alone that are dropped anyway
            guests = self._guests("checking gradients")
            mine = mine or are_finite(self.exchanges, self.pending.routes, guests)
            is_finite = all(gather_objects(self.mesh, mine, "checking gradients"))
        if not is_finite:
            self.pending.refuse()
        return is_finite

    def _check_may_skip(self) -> None:
        """Raises ConfigurationError where a pipeline cannot leave a step out."""
        if any(isinstance(each.synchronizer, DynamicMeans) for each in self._stored):
            raise ConfigurationError(
                "a GradScaler may leave a step out, and a pipeline averages replicas of dynamic tables before the step "
                "after which they are due; train in a plain loop, take exact synchronization, or bfloat16 without a "
                "scaler"
            )

    def _guests(self, doing: str) -> dict[str, np.ndarray]:
        """The rows of each dynamic table whose gradients are dropped. Collective."""
        return {} if self.resolver is None else self.resolver.guests(doing)

    def gradient_norm(self) -> float:
        """The norm of the gradients that wait for a push, as `rowmesh.collection.gradient_norm` has it. Collective."""
        if any(each.averages for each in self._stored):
            raise ConfigurationError(
                "replicas that are averaged step on gradients of their own, which have no norm in common; clip the "
                "dense parameters alone, or take exact synchronization"
            )
        if (driver := self.control.driver) is not None:
            return norm_of(driver.squares())
        guests = self._guests("computing the norm of gradients")
        return gradient_norm(self.mesh, self.exchanges, self._computed, self.pending.routes, guests)

    def agree(self, value: float) -> list[float]:
        """The values of all ranks. Collective."""
        return gather_objects(self.mesh, value, "clipping gradients")

    def discard_pending(self) -> None:
        """Forgets gradients that were not pushed; under a pipeline, also those of the batch that waits for its step.

        Raises:
            RowmeshError: some micro-batches of a pipeline's batch had their backward, and others not yet.
        """
        self.pending.clear()
        if self.control.driver is not None:
            self.control.driver.forget()

    # Between two steps

    def count_from(self, steps: int) -> None:
        """Counts steps on from so many: those of a loaded state."""
        self.step_count = steps

    def synchronize(self) -> None:
        """Makes all replicas of all rows equal. Collective."""
        self.check_whole()
        self.wait()
        with self.gate.writing:
            self._synchronize()

    def _synchronize(self) -> None:
        self._num_pushes += any(each.averages for each in self._stored)
        for each in self._stored:
            each.synchronize()

    def freeze(self, tables: Sequence[str], *, is_frozen: bool) -> None:
        """Freezes tables, or lets them train again, as `rowmesh.collection.freezing` has it. Collective."""
        self.pause()
        with self.gate.writing:
            freeze(self.mesh, self.exchanges, tables, len(self.pending), is_frozen=is_frozen)

    def forget_differences(self) -> None:
        """Takes the rows of this rank as equal to those of other replicas."""
        self.pause()
        self.control.check("rows are set")
        with self.gate.writing:
            self._num_pushes += 1
            self.num_sets += 1
            for each in self._all:
                each.forget()

    def find(self, table: str) -> tuple[ShardGroup | CoreShardGroup, GroupExchange, int]:
        """Where a table is, as `ShardGroups.find` has it, after the steps so far."""
        self.wait()
        with self.gate.writing:  # messages of other replicas may be on their way
            return self.shard_groups.find(table)

    def barrier(self) -> None:
        """Waits until all ranks have come here."""
        self.check_whole()
        self.wait()
        with self.gate.writing:
            self.shard_groups.barrier()

    def close(self) -> None:
        """Lets no further rank map this one's memory, and closes stores."""
        self.failure.close()
        if self.failure.text:  # or messages of ranks would be waited for that do not come
            for each in self._all:
                each.fail(self.step_count + 1)
        self.shard_groups.close()
        if self.resolver is not None:
            self.resolver.close()

    def migrate(self, plan: Plan) -> Moved:
        """Goes over to another plan, with all rows and states; returns what moved on all ranks. Collective."""
        self.pause()
        self.control.check("rows migrate")
        with self.gate.writing:
            self.check_whole()
            began = time.perf_counter()
            self.shard_groups.barrier()  # devices may hold batches that no host has checked
            agree_to_migrate(self.mesh, plan, max(exchange.num_lent for exchange in self.exchanges))
            self._check_migration(plan)
            self._synchronize()
            mine = self._go_over(plan)
            everyone = gather_objects(self.mesh, [(moved.rows, moved.num_bytes) for moved in mine], "migrating")
            rows, num_bytes = map(sum, zip(*(moved for each in everyone for moved in each), strict=True))
            return Moved(rows, num_bytes, elapsed_s=time.perf_counter() - began)

    def _check_migration(self, plan: Plan) -> None:
        if self.resolver is not None:
            raise ConfigurationError(
                f"tables {[*self.resolver.tables]} are dynamic: their rows are where the hashes of ids say, and no "
                "table beside them can migrate; save, and load under the other plan"
            )
        plan.check_fits(stored_shapes(self._tables), self.mesh.world_size, self.mesh.ranks_per_node)
        check_sums(plan, self._tables, self.options.device)
        if tiered := names_of(self._tables, "tiered"):
            raise ConfigurationError(f"tables {tiered} are tiered, and rows of such cannot migrate; load a checkpoint")
        if (plan.replicas, plan.together) != (self.plan.replicas, self.plan.together):
            raise ConfigurationError("the plan has other replicas than the one in use; load a checkpoint under it")

    def _go_over(self, plan: Plan) -> list[Moved]:
        """Puts shard groups under another plan in the place of those in use; returns what came to this rank."""
        new = ShardGroups(self.rows_mesh, plan, self.groups, self.options)
        try:
            new.allocate("; the old plan goes on")
            mine = new.fill_from(self.shard_groups)
            for before, after in zip(self.exchanges, new.exchanges, strict=True):
                after.freeze(is_frozen=before.is_frozen)
                after.count_on(before.counters)  # now: what synchronizes replicas goes on with those that it finds
            new.connect()
        except BaseException:
            new.close()
            raise
        self.shard_groups.close()
        self.plan = plan
        self._take(new)
        self._num_pushes += 1  # rows that were fetched are stale
        self.num_migrations += 1
        gc.collect()  # a transport and its exchanges refer to each other, and hold the old rows
        return mine

    def _take(self, shard_groups: ShardGroups) -> None:
        """Uses these shard groups from now on; makes the lists that every step needs, once."""
        self.shard_groups, self.exchanges = shard_groups, shard_groups.exchanges
        self._all, self._stored, self._computed = shard_groups.all, shard_groups.stored, shard_groups.computed
        self._replicated = [each for each in shard_groups.stored if each.replicas > 1]


def stored_shapes(tables: Sequence[TableSpec]) -> list[TableShape]:
    """The shapes of those tables whose rows are stored, which plans are for."""
    return [TableShape.of(table) for table in tables if table.storage != "tensor_train"]


def check_sums(plan: Plan, tables: Sequence[TableSpec], device: torch.device | None) -> None:
    """Raises ConfigurationError where tables are to send sums and cannot, or are on a device, where none do yet."""
    by_name = {table.name: table for table in tables}
    sums = [table.name for table in plan.tables if table.send == "sums"]
    for name in sums:
        if why := by_name[name].why_no_sums:
            raise ConfigurationError(f"table {name!r} sends sums by its plan, but {why}; plan it again, to send rows")
    sums += [table.name for table in tables if table.send == "sums" and table.name not in sums]
    if device is not None and sums:
        raise ConfigurationError(
            f"tables {sums} are to send sums, and on {device} tables send rows; give them send='rows' and a plan "
            "without sums, or device='cpu'"
        )


def _are_equal(batch: SparseBatch, other: SparseBatch) -> bool:
    """Whether two batches have the same ids."""
    if (batch.features, batch.batch_size, batch.bag_size) != (other.features, other.batch_size, other.bag_size):
        return False
    return torch.equal(batch.ids, other.ids) and (
        batch.bag_size is not None or torch.equal(batch.offsets, other.offsets)
    )


def _nothing(group: AnyRouteGroup) -> None:
    """Work that an evaluation does while rows are sent."""

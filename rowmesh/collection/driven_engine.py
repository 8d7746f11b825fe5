"""DrivenEngine: the tables of an `EmbeddingCollection` at work in a pipeline, which drives windows instead of verbs.

    take_over → route_ahead → make_window → pool_part, one by one → update_window → take_back

Rows travel in between, as `windows` has them do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rowmesh._support.faults import reach
from rowmesh.collection.control import Driver
from rowmesh.collection.engine import Engine
from rowmesh.collection.gradient_norm import squares
from rowmesh.collection.outputs import Embeddings
from rowmesh.errors import (
    ConfigurationError,
    DataError,
    IdRangeError,
    NoRoomError,
    RefusedError,
    RowmeshError,
    StoreError,
)
from rowmesh.exchange.agreement import Agreement
from rowmesh.exchange.dynamic_means import DynamicMeans
from rowmesh.exchange.handshake import Step, StepRefusedError
from rowmesh.exchange.resolve.resolver import plain_of
from rowmesh.exchange.route import Route
from rowmesh.exchange.window import Form, Window, WindowMaker
from rowmesh.exchange.windows import Collected, WindowOptions, Windows
from rowmesh.mesh.waiting import gather_objects
from rowmesh.ops.unshared import are_unshared
from rowmesh.sparse import SparseBatch, take
from rowmesh.tables.update_rules import Rate


class DrivenEngine:
    """An engine as the pipelines of its collection drive it, one loop at a time.

    Args:
        engine: of the tables.
        device_name: as the device was asked for, for messages.

    Attributes:
        mesh: the ranks.
    """

    def __init__(self, engine: Engine, device_name: str) -> None:
        self._engine, self._device_name = engine, device_name
        self.mesh, self._resolver, self._outputs = engine.mesh, engine.resolver, engine.outputs
        synchronizers = [each.synchronizer for each in engine.shard_groups.stored]
        # Synchronizers of dynamic tables, which do not migrate.
        self._dynamic_means = [each for each in synchronizers if isinstance(each, DynamicMeans)]
        self._windows: weakref.WeakSet[Windows] = weakref.WeakSet()
        self._window_maker, self._num_migrations = WindowMaker(), engine.num_migrations
        self._num_opened = 0  # steps whose batches were opened
        self._first_step = 1  # of the loop that began last
        self._num_resolved = 0  # batches that dynamic tables had opened when it began

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers of windows, whether in use or idle."""
        return self._window_maker.num_bytes + sum(windows.num_bytes for windows in self._windows)

    @property
    def window_bytes(self) -> int:
        """Memory of the largest window so far, whether in use or idle; on a host."""
        return self._window_maker.window_bytes

    # A pipeline is made

    def windows(self, form: Form, *, finds_final: bool, verifies: bool) -> list[Windows]:
        """How the windows of each shard group travel. Collective.

        Raises:
            ConfigurationError: they cannot, on this device.
        """
        engine = self._engine
        device = "cpu" if engine.options.device is None else self._device_name
        options = WindowOptions(form, finds_final, verifies, device)
        made = [each.windows(options) for each in engine.shard_groups.all]
        self._windows.update(made)
        return made

    def agreement(self, use: str, width: int) -> Agreement:
        """Makes an exchange of a few numbers, for use while rows are looked up and updated. Collective."""
        engine = self._engine
        shares_memory = engine.shard_groups.transport == "one_sided"
        return Agreement(engine.rows_mesh, use, width, engine.options.common, shares_memory=shares_memory)

    @property
    def num_migrations(self) -> int:
        """How many plans were taken over."""
        return self._engine.num_migrations

    @property
    def is_decided_ahead(self) -> bool:
        """Whether ranks decide together about each batch when it is routed: there are dynamic tables."""
        return self._resolver is not None

    @property
    def is_divided(self) -> bool:
        """Whether ranks look some rows up in their replica group alone."""
        return any(each.replicas > 1 for each in self._engine.shard_groups.stored)

    @property
    def may_lack_undo(self) -> bool:
        """Whether some batches cannot be taken back once they are routed: `can_undo` says which."""
        return self.always_lacks_undo or bool(self._dynamic_means)

    @property
    def always_lacks_undo(self) -> bool:
        """Whether no batch can be taken back once it is routed: a dynamic table has its index on a device."""
        return self._resolver is not None and bool(self._resolver.device_tables)

    # A loop begins and ends

    def take_over(self, driver: Driver) -> None:
        """Gives the rows and the steps of the optimizer to a pipeline.

        Raises:
            RowmeshError: another one has them, or runs on the same mesh.
        """
        engine = self._engine
        with engine.gate.writing:
            engine.check_whole()
            engine.control.acquire(driver)
            if self._num_migrations != engine.num_migrations:  # the memory of windows knows where rows were
                self._window_maker, self._num_migrations = WindowMaker(), engine.num_migrations
            self._num_opened, self._first_step = engine.step_count, engine.step_count + 1
            self._note_merges()
            if self._resolver is not None:
                self._num_resolved = self._resolver.step

    def check_undo(self, last: int | None) -> None:
        """Raises RowmeshError where batches were opened in dynamic tables that `take_back` could not take back."""
        resolver = self._resolver
        if resolver is None or last is None or resolver.can_go_back(self._num_resolved if last < 0 else last):
            return
        raise RowmeshError(
            "a pipeline has opened a batch ahead that cannot be taken back, since its dynamic tables have an index on "
            "a device or averaged replicas; leave the loop over `windows` before"
        )

    def prepare_to_take_back(self) -> None:
        """Announces that `take_back` follows as soon as the threads of the pipeline have ended."""
        self._engine.control.prepare_to_release()

    def take_back(self, last: int | None) -> None:
        """Takes rows and steps back, when no thread of the pipeline uses them.

        Args:
            last: which step of dynamic tables the last batch opened that stands, −1 where none does: what later ones
                decided is undone. None: nothing is.
        """
        resolver = self._resolver
        if resolver is not None and last is not None and not resolver.is_opening:  # a thread left alone may
            resolver.go_back_where_possible(self._num_resolved if last < 0 else last)
        for means in self._dynamic_means:
            means.forget_ahead()
        self._engine.control.release()

    # A batch is routed

    @property
    def can_undo(self) -> bool:
        """Whether the next batch can be taken back once it is routed."""
        return self._resolver is None or self._resolver.can_undo

    @property
    def merges_next(self) -> bool:
        """Whether averaged replicas of dynamic tables make one of what they know after the next batch is routed."""
        return self._resolver is not None and self._resolver.merge_is_due

    @staticmethod
    def check_ahead(batch: SparseBatch) -> None:
        """Raises DataError where a batch cannot be looked up by micro-batch, as it has weights that are trained."""
        if batch.weights is not None and batch.weights.requires_grad:
            raise DataError(
                "weights of ids get no gradient in a pipeline where they come with the batch, which is read and routed "
                "before the step that changes what they are made from; give them with each micro-batch, "
                "part.look_up(weigh), where weigh is the module that makes them, or detach() them"
            )

    def route_ahead(self, batch: SparseBatch, items: Sequence[SparseBatch], *, is_short: bool) -> Route:
        """Finds the rows of a batch that `check_ahead` passed; communicates for dynamic tables alone.

        For errors see `Engine.make_route`.

        Args:
            batch: the samples of all items, one after the other.
            items: about which dynamic tables decide one by one.
            is_short: whether there are fewer than in other batches.
        """
        several = items if len(items) > 1 else ()
        route = self._engine.make_route(batch, items=several, is_ahead=True, is_short=is_short)
        self._num_opened += 1
        return route

    def pass_over(self, error: Exception | None) -> None:
        """Takes the place of `route_ahead` on a rank that has no further batch, or none that can be routed.

        Collective; for tables that are decided ahead. Returns where no rank has a batch, and raises RefusedError on all
        ranks where one has.
        """
        assert self._resolver is not None
        self._resolver.pass_over(None if error is None else plain_of(error))

    def make_window(self, route: Route, sizes: Sequence[int]) -> Window:
        """A routed batch that is looked up by micro-batch; no communication but for averages that are due.

        Raises:
            RefusedError: averages are due, and other replicas have no such batch.
            NoRoomError, StoreError: on all ranks alike: averages are due, and cannot be.
        """
        for means in self._dynamic_means:
            try:
                means.merge_ahead(self._num_opened)
            except RowmeshError:
                assert self._resolver is not None
                self._resolver.take_back(route.pins)
                raise
        self._note_merges()
        bounds = list(accumulate(sizes, initial=0))
        layouts = self._outputs.layouts.parts(route.batch, [group.layout for group in route.groups], bounds)
        return self._window_maker(route, bounds, layouts)

    def pass_over_averages(self, number: int) -> None:
        """Takes the place of `make_window` on a rank that has no such batch of a pipeline; collective as that is.

        Args:
            number: of the batch, of those since `take_over`.
        """
        for means in self._dynamic_means:
            means.pass_over(self._first_step + number)

    def _note_merges(self) -> None:
        """Tells the resolver whether averaged replicas make one of what they know after the next batch."""
        if self._resolver is not None:
            is_due = any(means.is_due(self._num_opened + 1) for means in self._dynamic_means)
            self._resolver.expect_merge(is_due=is_due)

    # A window is trained

    def tell(self, window: Window, refuses: RowmeshError | None = None) -> None:
        """Tells hooks of dynamic tables what was decided of a batch that the loop is about to be given.

        Collective where some rank has hooks.

        Args:
            window: the batch.
            refuses: why this rank does not go on with it; no hook of it is told.

        Raises:
            RowmeshError: on all ranks alike, where a hook failed, or one does not go on.
        """
        if self._resolver is not None:
            for pin in window.route.pins:
                self._resolver.tell(pin, refuses)

    def pool_part(
        self,
        window: Window,
        part: int,
        finished: Callable[[], None],
        weigh: Callable[[SparseBatch], SparseBatch] | None = None,
    ) -> Embeddings:
        """The vectors of a micro-batch whose rows are here; differentiable.

        Args:
            window: its batch.
            part: which of its micro-batches.
            finished: is called when the gradients of its rows are summed.
            weigh: gives ids weights, which get gradients where they require them.

        Raises:
            DataError: these are not of the same ids.
            ConfigurationError: there are weights, and tables are on a device.
        """
        batch, samples = window.route.batch, slice(*window.bounds[part : part + 2])
        if weigh is not None:
            batch = self._weighed(batch, samples, weigh)
            window.weigh(part)

        def take_gradients(gradients: Sequence[Tensor]) -> None:
            may_wait = self.mesh.world_size == 1 and are_unshared(gradients)
            window.add_gradients(part, self._outputs.pooling.by_group(gradients), may_wait=may_wait)
            self._engine.pending.count()
            finished()

        return self._outputs([group.parts[part] for group in window.groups], batch, samples, take_gradients)

    def _weighed(self, batch: SparseBatch, samples: slice, weigh: Callable[[SparseBatch], SparseBatch]) -> SparseBatch:
        """The batch with weights of some samples; of others they are of no meaning."""
        if self._engine.options.device is not None:
            raise ConfigurationError(
                "weights of ids that a loop gives with a micro-batch are not taken where tables are on a device; give "
                "them with the batch, without gradients, or train them in a plain loop"
            )
        mine = take(batch, torch.arange(samples.start, samples.stop))
        weights = weigh(mine).weights
        if weights is None or weights.shape != mine.ids.shape:
            found = "none" if weights is None else tuple(weights.shape)
            raise DataError(f"a micro-batch has {mine.ids.numel()} ids and needs as many weights, got {found}")
        bags = batch.offsets[:-1].view(batch.num_features, -1)[:, samples].flatten()
        lengths = batch.offsets.diff().view(batch.num_features, -1)[:, samples].flatten()
        first = lengths.cumsum(0) - lengths
        places = torch.arange(len(mine.ids)) + (bags - first).repeat_interleave(lengths)
        return replace(batch, weights=weights.new_zeros(len(batch.ids)).index_copy(0, places, weights))

    def squares(self, windows: Sequence[Windows], window: Window) -> float:
        """The sum of squares of the gradients of a window that this rank adds up; all are on their way. Collective.

        Blocks; where gradients travel whole they travel once more for it. Messages are of the rows'
        process group, in which nothing else is under way before the update.
        """
        guests, known = self._guests(window), dict[int, float]()
        for each in windows:
            known |= each.squares(window, guests)
        engine = self._engine
        computed = engine.shard_groups.computed
        return squares(engine.rows_mesh, engine.exchanges, computed, [window.route], guests, known)

    def _guests(self, window: Window) -> dict[str, np.ndarray]:
        """The rows of each dynamic table whose gradients are dropped. Collective where there are some."""
        if self._resolver is None:
            return {}
        mine = self._resolver.guests_of(window.route.pins)
        everyone = gather_objects(self._engine.rows_mesh, mine, "computing the norm of gradients")
        return {name: np.array(sorted({row for each in everyone for row in each[name]}), np.int64) for name in mine}

    def next_step(self, rates: Sequence[Rate]) -> Step:
        """The next step of all groups."""
        return Step(self._engine.step_count + 1, rates, self._engine.group_names)

    def update_window(
        self, windows: Sequence[Windows], window: Window, rates: Sequence[Rate], *, forgets: bool = False
    ) -> None:
        """Applies the gradients of a window, which all are on their way, or forgets them. Collective."""
        step = self.next_step(rates)
        collected = self._collect(windows, window, step, forgets=forgets)
        try:
            for each, mine in collected:
                each.apply(mine)
            self._engine.finish_step(window.route.pins)
        except (NoRoomError, StoreError):  # of averaged replicas, as in `Engine.push`
            raise
        except BaseException as error:
            self._engine.fail(step.number, error)
            raise

    def skip_window(self, windows: Sequence[Windows], window: Window) -> None:
        """Leaves the step of a window out, on all ranks: no row changes, and the next window comes."""
        for each in windows:
            each.skip(window)
        for pin in window.route.pins:
            pin.end()

    def _collect(
        self, windows: Sequence[Windows], window: Window, step: Step, *, forgets: bool
    ) -> list[tuple[Windows, Collected]]:
        """Has ranks agree on the update of a window, whose gradients have come. Collective."""
        collected: list[tuple[Windows, Collected]] = []
        try:
            reach("engine.push")
            for each in windows:
                collected.append((each, each.collect(window, step, forgets=forgets)))
        except BaseException as error:
            for each, mine in collected:
                each.withdraw(mine)
            # A device may find only now ids that are no rows; all ranks learn it, and nothing has changed.
            if not isinstance(error, (NoRoomError, StoreError, IdRangeError, RefusedError, StepRefusedError)):
                self._engine.fail(step.number, error)
            raise
        return collected

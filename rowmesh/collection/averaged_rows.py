"""AveragedRows: an exponential moving average of all rows, in the place of `torch.optim.swa_utils.AveragedModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from rowmesh._support.background_saves import wait_for_background_saves
from rowmesh._support.faults import reach
from rowmesh._support.interrupts import hold, release
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.mesh.waiting import gather_objects
from rowmesh.tables.shard import LocalRows
from rowmesh.tables.spec import names_of


class AveragedRows:
    """An exponential moving average of the rows that this rank holds, in the host's memory.

    average ← decay · average + (1 − decay) · row, for every row, touched or not: what AveragedModel with
    `get_ema_multi_avg_fn(decay)` does to parameters, to the bit. The first update copies the rows. For tensor-train
    tables it averages the cores. An update reads and writes as much memory as the rows have; to update every n steps,
    with decayⁿ, costs less.

    Args:
        embeddings: the tables.
        decay: of an update.

    Attributes:
        num_updates: how many there were.

    Raises:
        ConfigurationError: tables are tiered or dynamic, or their replicas averaged.

    Example:
        >>> from rowmesh import SparseBatch, TableSpec
        >>> embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=5, dim=4)])
        >>> averages = AveragedRows(embeddings, decay=0.99)
        >>> averages.update()  # after a step
        >>> with averages.applied():  # evaluate, or rowmesh.save the averaged model
        ...     out = embeddings(SparseBatch.from_bags({"item": [[1]]}))
    """

    def __init__(self, embeddings: EmbeddingCollection, decay: float = 0.999) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigurationError(f"decay must be 0 to 1, got {decay}")
        if tiered := names_of(embeddings.tables, "tiered"):
            raise ConfigurationError(
                f"an average of the tiered tables {tiered} would need all their rows in memory; average the other "
                "modules alone, or keep these tables dense"
            )
        if dynamic := names_of(embeddings.tables, "dynamic"):
            raise ConfigurationError(
                f"the dynamic tables {dynamic} have no moving average: their rows come and go with their ids, and an "
                "evicted row's memory has another id's next; average the other modules alone, put these tables into a "
                "collection of their own, or keep them dense"
            )
        if embeddings.synchronization.mode == "average" and any(
            count > 1 for count in embeddings.plan.replicas.values()
        ):
            raise ConfigurationError(
                "replicas that are averaged differ between two averages, and so would moving averages of them; take "
                "exact synchronization"
            )
        self._embeddings, self.decay, self.num_updates = embeddings, decay, 0
        self._migrations = embeddings.engine.num_migrations
        # By piece of rows: its average, None while that stands in their place, and then the rows.
        self._averages: list[Tensor | None] = [each.values.detach().cpu().clone() for each in self._current()]
        self._rows: list[Tensor | None] = [None] * len(self._averages)

    def update(self) -> None:
        """Takes the rows as they are now into the average. Every rank calls it, between two steps.

        Raises:
            RowmeshError: averages stand in the place of rows, or rows migrated.
        """
        self._check()
        if self._embeddings.engine.control.stand_in:
            raise RowmeshError(
                "averages stand in the place of rows, and would be averaged with themselves; update when the block of "
                "`applied()` has ended, or after restore()"
            )
        with _held():  # all tables have as many updates
            for average, piece in zip(self._averages, self._current(), strict=True):
                assert average is not None
                now = piece.values.detach().cpu()
                if self.num_updates:
                    average.lerp_(now, 1 - self.decay)
                else:
                    average.copy_(now)
                piece.forget()
            self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it look-ups find the averages, and `rowmesh.save` writes them; afterwards rows are as before.

        However the block ends, and where entering it fails on any rank, rows come back on all. Within it steps, loads,
        migrations and pipelines are refused: they would change averages. Its end waits for what `async_save` began in
        it. Collective.

        Raises:
            RowmeshError: a pipeline runs; averages are applied already; or a rank could not change its rows.
            CheckpointError: what was being written beside training could not be; rows are back nevertheless.
        """
        self._check()
        embeddings = self._embeddings
        embeddings.forget_differences()
        embeddings.barrier()  # ranks may read each other's rows
        try:
            with _held():  # ranks enter together
                embeddings.engine.control.put_in_place("averages")
                self._on_every_rank(self._put_averages, "putting averages in the place of rows")
                embeddings.barrier()
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Puts rows back where averages stand, as the end of `applied` does, which Ctrl-C may come before. Collective.

        Does nothing where rows are in their places.

        Raises:
            CheckpointError: as `applied`.
            RowmeshError: a rank could not set its rows; this may be called again.
        """
        engine, failures = self._embeddings.engine, list[Exception]()

        def go_on(action: Callable[[], None]) -> bool:
            """Whatever fails, rows come back."""
            try:
                action()
            except Exception as error:
                failures.append(error)
                return False
            return True

        with _held():
            if not engine.control.stand_in:
                return
            go_on(lambda: wait_for_background_saves([self._embeddings]))  # it reads averages
            engine.control.put_in_place("")
            go_on(self._embeddings.forget_differences)
            go_on(self._embeddings.barrier)  # ranks may read each other's averages
            if not go_on(lambda: self._on_every_rank(self._put_rows, "putting rows in the place of averages")):
                engine.control.put_in_place("averages")  # on every rank
            go_on(self._embeddings.barrier)
            if failures:
                raise failures[0]

    def _put_averages(self) -> None:
        for number, piece in enumerate(self._current()):
            reach("averaged_rows.put")
            self._rows[number] = piece.values.detach().cpu().clone()  # from here on `_put_rows` sets them
            _set(piece, self._averages[number])
            self._averages[number] = None  # its memory: the average is where the rows were

    def _put_rows(self) -> None:
        for number, piece in enumerate(self._current()):
            if (rows := self._rows[number]) is None:
                continue
            reach("averaged_rows.put_back")
            if self._averages[number] is None:
                self._averages[number] = piece.values.detach().cpu().clone()
            _set(piece, rows)
            self._rows[number] = None

    def _on_every_rank(self, action: Callable[[], None], doing: str) -> None:
        """Where a rank fails, all raise."""
        mesh, failure = self._embeddings.mesh, None
        try:
            action()
        except Exception as error:  # of whatever kind: the other ranks wait
            failure = error
        reasons = gather_objects(mesh, "" if failure is None else f"{type(failure).__name__}: {failure}", doing)
        if failure is not None:
            raise failure
        if failed := [f"{mesh.name(rank)}: {reason}" for rank, reason in enumerate(reasons) if reason]:
            raise RowmeshError(f"{doing} failed on rank {failed[0]}")

    def _current(self) -> Iterator[LocalRows]:
        """Rows, and cores, of which each is to be committed after a change."""
        for shard in self._embeddings.shards("held"):
            yield from shard.views

    def _check(self) -> None:
        if self._embeddings.engine.num_migrations != self._migrations:
            raise RowmeshError("rows migrated to another plan since their averages began; make AveragedRows anew")


@contextmanager
def _held() -> Iterator[None]:
    """Ctrl-C within is heeded at the end."""
    hold()
    try:
        yield
    finally:
        release()


def _set(piece: LocalRows, now: Tensor | None) -> None:
    assert now is not None
    piece.values.copy_(now)
    piece.commit()

"""AveragedRows: an exponential moving average of all rows, in the place of `torch.optim.swa_utils.AveragedModel`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from rowmesh.collection import EmbeddingCollection
from rowmesh.embeddings import LocalRows
from rowmesh.errors import ConfigurationError, RowmeshError


class AveragedRows:
    """An exponential moving average of the rows that this rank holds, in the host's memory.

    average ← decay · average + (1 − decay) · row, for every row, touched or not: what AveragedModel with
    `get_ema_multi_avg_fn(decay)` does to parameters, to the bit. The first update copies the rows. Of tensor-train
    tables the cores are averaged. An update reads and writes as much memory as the rows have; to update every n steps,
    with decayⁿ, costs less.

    Args:
        embeddings: the tables.
        decay: of an update.

    Attributes:
        num_updates: how many there were.

    Raises:
        ConfigurationError: tables are tiered, or their replicas averaged.

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
        if tiered := [table.name for table in embeddings.tables if table.storage == "tiered"]:
            raise ConfigurationError(
                f"an average of the tiered tables {tiered} would need all their rows in memory; average the other "
                "modules alone, or keep these tables dense"
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
        self._averages = [values.detach().cpu().clone() for values, _ in self._current()]

    def update(self) -> None:
        """Takes the rows as they are now into the average. Every rank calls it, between two steps."""
        self._check()
        for average, (values, piece) in zip(self._averages, self._current(), strict=True):
            now = values.detach().cpu()
            if self.num_updates:
                average.lerp_(now, 1 - self.decay)
            else:
                average.copy_(now)
            if piece is not None:
                piece.forget()
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it look-ups find the averages. Collective; not for training, and not while a pipeline runs.

        Raises:
            RowmeshError: a step was taken within.
        """
        self._exchange()
        steps = self._embeddings.step_count
        try:
            yield
        finally:
            self._exchange()
        if self._embeddings.step_count != steps:
            raise RowmeshError(
                "a step was taken while averages stood in the place of rows: it changed the averages, not the rows"
            )

    def _exchange(self) -> None:
        """Puts averages in the place of rows, and rows in theirs."""
        self._check()
        embeddings = self._embeddings
        embeddings.forget_differences()
        embeddings.barrier()  # ranks may read each other's rows
        for average, (values, piece) in zip(self._averages, self._current(), strict=True):
            before = values.detach().cpu().clone()
            values.copy_(average)
            average.copy_(before)
            if piece is not None:
                piece.commit()
        embeddings.barrier()

    def _current(self) -> Iterator[tuple[Tensor, LocalRows | None]]:
        """Rows or cores, and what is to be committed after a change."""
        for table in self._embeddings.tables:
            if table.storage == "tensor_train":
                yield from ((core, None) for core in self._embeddings.cores(table.name).cores)
            else:
                yield from ((piece.values, piece) for piece in self._embeddings.held_rows(table.name))

    def _check(self) -> None:
        if self._embeddings.engine.num_migrations != self._migrations:
            raise RowmeshError("rows migrated to another plan since their averages began; make AveragedRows anew")

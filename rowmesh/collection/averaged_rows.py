"""AveragedRows: an exponential moving average of all rows, in the place of `torch.optim.swa_utils.AveragedModel`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh._support.background_saves import wait_for_background_saves
from rowmesh._support.faults import reach
from rowmesh._support.interrupts import hold, release
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.mesh.waiting import gather_objects
from rowmesh.tables.dynamic.layout import rules_of
from rowmesh.tables.dynamic.table_shard import DynamicShard
from rowmesh.tables.shard import LocalRows, StoredRows


class AveragedRows:
    """An exponential moving average of the rows that this rank holds, in the host's memory.

    average ← decay · average + (1 − decay) · row, for every row, touched or not: what AveragedModel with
    `get_ema_multi_avg_fn(decay)` does to parameters, to the bit. The first update copies the rows. For tensor-train
    tables it averages the cores. An update reads and writes as much memory as the rows have; to update every n steps,
    with decayⁿ, costs less.

    Averages of tiered rows are where their rows are: in memory, or in a file of `Tiers.folder`. An average of a dynamic
    table is of an id that two updates know: it begins with the row that the first update finds, and an id that is gone
    at an update begins anew when it comes back. In a pipeline an update waits for the steps so far; where tables are
    dynamic it pauses the pipeline, since what was opened ahead has changed which ids there are.

    Args:
        embeddings: the tables.
        decay: of an update.

    Attributes:
        num_updates: how many there were.

    Raises:
        ConfigurationError: dynamic tables demote ids, or replicas are averaged.
        OSError: the disk has no room for averages of tiered rows.

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
        if demoting := [
            table.name for table in embeddings.tables if table.takes_any_id and rules_of(table).mode == "demote"
        ]:
            raise ConfigurationError(
                f"the dynamic tables {demoting} have no moving average: their demoted ids have rows in a store, which "
                'every update would read; average the other modules alone, or take mode="drop"'
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
        self._folder = embeddings.engine.options.tiers.folder
        # By piece of rows: its average, None while that stands in their place, and then the rows; and the ids that
        # both are of, None where rows have numbers.
        self._averages: list[Tensor | None] = []
        self._ids: list[npt.NDArray[np.int64] | None] = []
        for piece in self._current():
            self._averages.append(self._kept(piece))
            self._ids.append(piece.ids if isinstance(piece, _RowsOfIds) else None)
            piece.forget()
        self._rows: list[Tensor | None] = [None] * len(self._averages)

    def _kept(self, piece: _Piece) -> Tensor:
        """A copy of rows that an update changes; of tiered ones beside these."""
        values = piece.values.detach().cpu()
        if self._folder is None or not isinstance(piece, StoredRows) or not values.numel():
            return values.clone()
        return _in_file(self._folder, values)

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
            for number, piece in enumerate(self._current()):
                now = piece.values.detach().cpu()
                average = self._average(number, piece)
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

    def _average(self, number: int, piece: _Piece) -> Tensor:
        """The average of rows as they are now: of ids that it has, and for others, which are new, the row."""
        average, before = self._averages[number], self._ids[number]
        assert average is not None
        if before is None:
            return average
        assert isinstance(piece, _RowsOfIds)
        found = piece.values.clone()
        _, here, there = np.intersect1d(piece.ids, before, assume_unique=True, return_indices=True)
        found[torch.from_numpy(here)] = average[torch.from_numpy(there)]
        self._averages[number], self._ids[number] = found, piece.ids
        return found

    def _put_averages(self) -> None:
        for number, piece in enumerate(self._current()):
            reach("averaged_rows.put")
            average = self._average(number, piece)
            rows = self._rows[number] = piece.values.detach().cpu().clone()  # from here on `_put_rows` sets them
            _set(piece, average)
            # Its memory, or file, has the rows: the average is where they were.
            self._rows[number], self._averages[number] = average.copy_(rows), None

    def _put_rows(self) -> None:
        for number, piece in enumerate(self._current()):
            if (rows := self._rows[number]) is None:
                continue
            reach("averaged_rows.put_back")
            if is_lent := self._averages[number] is None:
                self._averages[number] = piece.values.detach().cpu().clone()
            average = self._averages[number]
            assert average is not None
            _set(piece, rows)
            if is_lent:
                self._averages[number] = rows.copy_(average)
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

    def _current(self) -> Iterator[_Piece]:
        """Rows, and cores, of which each is to be committed after a change."""
        for shard in self._embeddings.shards("held"):
            if isinstance(shard, DynamicShard):
                yield _RowsOfIds(shard)
            else:
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


class _RowsOfIds:
    """The rows of the ids that this rank knows of a dynamic table: copies, which `commit` writes back.

    Attributes:
        ids: int64 `[n]`.
    """

    def __init__(self, shard: DynamicShard) -> None:
        self._spec, self._pieces = shard.spec, shard.placed_rows
        self.ids = np.concatenate([np.empty(0, np.int64), *(piece.rows for piece in self._pieces)])

    @cached_property
    def values(self) -> Tensor:
        """`[n, D]`, in the host's memory."""
        none = torch.empty(0, self._spec.dim, dtype=self._spec.dtype)
        return torch.cat([none, *(piece.values for piece in self._pieces)])

    def commit(self) -> None:
        """Puts the values where the rows are."""
        for piece, values in zip(
            self._pieces, self.values.split([len(each.rows) for each in self._pieces]), strict=True
        ):
            piece.replace(values)

    def forget(self) -> None:
        """No-op: the copies are kept no longer than this is."""


_Piece = LocalRows | _RowsOfIds


def _set(piece: _Piece, now: Tensor) -> None:
    piece.values.copy_(now)
    piece.commit()


def _in_file(folder: Path, values: Tensor) -> Tensor:
    """A copy in a file that has no name and is gone with the last tensor of it; a full disk raises OSError here."""
    path = folder / f"averages.{secrets.token_hex(8)}.rows"
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, values.nbytes)
        found = torch.from_file(str(path), shared=True, size=values.numel(), dtype=values.dtype)
    finally:
        path.unlink(missing_ok=True)
    return found.view(values.shape).copy_(values)

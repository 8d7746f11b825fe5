"""Scenario: a training job in full, as a value. Every rank and the reference derive the same batches from it."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan
from rowmesh.sparse import SparseBatch
from rowmesh.tables import Dynamic, TableSpec, Tiers


@dataclass(frozen=True)
class LocalBatch:
    """What one rank reads: sparse features and labels of its samples."""

    sparse: SparseBatch
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training job.

    Attributes:
        tables: what to train.
        batch_sizes: samples of each rank; its length is the world size.
        last_sizes: samples of each rank in the last step; by default as in the others.
        bag_sizes: fewest and most ids in a bag; where they are equal, the batch is described without offsets.
        skew: ids are `num_rows · u^skew` for uniform u: 1 is uniform, 1e9 makes all ids 0.
        sharing: "any"; "none": no row is in two steps, as far as there are enough; "hot": row 0 is in every one.
        is_weighted: whether ids have weights.
        trains_weights: whether ids have weights of their positions, which are trained, beside those.
        num_steps, accumulate: optimizer steps, and backward passes before each.
        decay: the learning rate is multiplied by it after each step.
        max_norm: of all gradients together, to which they are clipped before each step.
        is_scaled: whether a GradScaler scales the losses.
        evaluates: whether the next batch is looked up without gradients between the steps.
        averages: whether rows are averaged after every step, and the next batch is looked up in averages; from the last
            migration or reload on.
        plan: which ranks hold each row.
        migrations: (step, plan): goes over to the plan before the step, or at the end.
        replicas: of each table, where there is no plan.
        synchronization: how replicas of tables are kept together.
        pipeline: options of a pipeline to train through; `disturb` takes the rank and a task.
        breaks: steps before which the loop over the pipeline is left and begun again.
        pauses: steps before which the pipeline pauses.
        plain: steps without the pipeline.
        reloads: steps before which all is saved, and loaded into a job that began otherwise.
        folder: where to.
        tiers: where rows of tiered tables are.
        dynamic: rules of the tables that are dynamic, by name. Their ids are the rows of the dense tables that they are
            trained in place of.
        ranks_per_node: where given, the ranks pretend to be on several hosts.
        wire_dtype: how rows and gradients travel; by default as they are.
        seed: of everything random.
    """

    tables: tuple[TableSpec, ...]
    batch_sizes: tuple[int, ...] = (5, 3)
    last_sizes: tuple[int, ...] | None = None
    bag_sizes: tuple[int, int] = (0, 3)
    skew: float = 2.0
    sharing: str = "any"
    is_weighted: bool = False
    trains_weights: bool = False
    num_steps: int = 3
    accumulate: int = 1
    decay: float = 1.0
    max_norm: float | None = None
    is_scaled: bool = False
    evaluates: bool = False
    averages: bool = False
    plan: Plan | None = None
    migrations: tuple[tuple[int, Plan], ...] = ()
    replicas: int = 1
    synchronization: Synchronization | None = None
    pipeline: dict[str, Any] | None = None
    breaks: tuple[int, ...] = ()
    pauses: tuple[int, ...] = ()
    plain: tuple[int, ...] = ()
    reloads: tuple[int, ...] = ()
    folder: Path | None = None
    tiers: Tiers | None = None
    dynamic: tuple[tuple[str, Dynamic], ...] = ()
    ranks_per_node: int | None = None
    wire_dtype: torch.dtype | None = None
    seed: int = 0

    @property
    def world_size(self) -> int:
        """W."""
        return len(self.batch_sizes)

    @property
    def stored(self) -> tuple[TableSpec, ...]:
        """The tables as rowmesh gets them: dynamic where there are rules."""
        rules = dict(self.dynamic)
        return tuple(
            replace(table, num_rows=None, storage="dynamic", dynamic=rules[table.name])  # type: ignore[arg-type]
            if table.name in rules
            else table
            for table in self.tables
        )

    @property
    def dtype(self) -> torch.dtype:
        """What vectors and the dense layers are computed in."""
        return torch.float64 if self.tables[0].dtype == torch.float64 else torch.float32

    @property
    def global_batch(self) -> int:
        """Samples of all ranks together, at least 1."""
        return max(sum(self.batch_sizes), 1)

    @property
    def features(self) -> list[tuple[str, TableSpec]]:
        """All features and their tables, in an order that is not the tables'."""
        pairs = [(feature, table) for table in self.tables for feature in table.features]
        return sorted(pairs, key=lambda pair: zlib.crc32(pair[0].encode()))

    def local_batch(self, step: int, part: int, rank: int) -> LocalBatch:
        """What a rank reads for one backward pass of a step."""
        generator = torch.Generator().manual_seed(hash((self.seed, step, part, rank)) % 2**62)
        batch_size, (fewest, most) = self._batch_size(step, rank), self.bag_sizes
        ids, lengths = [], []
        for _, table in self.features:
            sizes = torch.randint(fewest, most + 1, (batch_size,), generator=generator)
            u = torch.rand(int(sizes.sum()), generator=generator, dtype=torch.float64)
            ids.append(self._rows(table.num_rows, u**self.skew, step))
            lengths.append(sizes)
        weights = torch.rand(sum(len(part) for part in ids), generator=generator, dtype=self.dtype) + 0.5
        is_fixed = fewest == most
        sparse = SparseBatch(
            features=tuple(name for name, _ in self.features),
            ids=torch.cat(ids),
            batch_size=batch_size,
            bag_size=fewest if is_fixed else None,
            jagged_offsets=None if is_fixed else torch.cat([torch.zeros(1, dtype=torch.int64), *lengths]).cumsum(0),
            weights=weights if self.is_weighted else None,
        )
        labels = torch.randint(2, (batch_size,), generator=generator).to(self.dtype)
        return LocalBatch(sparse, labels)

    def ids_of(self, table: str, step: int, part: int) -> list[int]:
        """The ids of a table that all ranks look up in one pass."""
        found = list[int]()
        for rank in range(self.world_size):
            sparse = self.local_batch(step, part, rank).sparse
            for place, (_, spec) in enumerate(self.features):
                if spec.name == table:
                    found += sparse.ids[slice(*sparse.feature_range(place))].tolist()
        return found

    def _batch_size(self, step: int, rank: int) -> int:
        is_last = step == self.num_steps - 1 and self.last_sizes is not None
        return (self.last_sizes if is_last and self.last_sizes else self.batch_sizes)[rank]

    def _rows(self, num_rows: int, place: Tensor, step: int) -> Tensor:
        """Rows of a table at places from 0 to 1."""
        count = num_rows
        if self.sharing == "none":
            count = max(num_rows // (self.num_steps + 1), 1)
        rows = (count * place).long().clamp(max=count - 1)
        if self.sharing == "none":
            return (rows + step * count) % num_rows
        if self.sharing == "hot":
            rows[::3] = 0
        return rows


@functools.lru_cache(maxsize=1000)
def ids_by_table(scenario, step, part, rank):
    """Table → the ids of one rank's batch."""
    sparse = scenario.local_batch(step, part, rank).sparse
    found = {table.name: [] for table in scenario.tables}
    for place, (_, table) in enumerate(scenario.features):
        begin, end = sparse.feature_range(place)
        found[table.name] += sparse.ids[begin:end].tolist()
    return found

"""The work that rowmesh and its peers are measured on: batches of a DLRM with the cardinalities of Criteo Kaggle.

Or with the tables and bags of MLPerf's DLRM-DCNv2, or of a file. Ids follow a power law, and the frequent ones are
scattered over the table by a multiplicative permutation, so that shards by row see an even load. Everything is seeded:
any number of ranks trains on the same global batches, rank r of W on samples [r·B/W, (r+1)·B/W) of each.

Imports neither rowmesh nor a peer: both environments read it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

CRITEO_KAGGLE = (
    1460,
    583,
    10131227,
    2202608,
    305,
    24,
    12517,
    633,
    3,
    93145,
    5683,
    8351593,
    3194,
    27,
    14992,
    5461306,
    10,
    5652,
    2173,
    4,
    7046547,
    18,
    15,
    286181,
    105,
    142572,
)
NUM_TABLES = len(CRITEO_KAGGLE)
# DLRM-DCNv2 of MLPerf Training, under the names of its options: rows of the tables, and ids a bag.
MLPERF = {
    "num_embeddings_per_feature": (
        40_000_000,
        39_060,
        17_295,
        7_424,
        20_265,
        3,
        7_122,
        1_543,
        63,
        40_000_000,
        3_067_956,
        405_282,
        10,
        2_209,
        11_938,
        155,
        4,
        976,
        14,
        40_000_000,
        40_000_000,
        40_000_000,
        590_152,
        12_973,
        108,
        36,
    ),
    "multi_hot_sizes": (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
}
CONSTRUCTIONS = ("drawn", "mlperf")
NUM_DENSE = 13
MAX_BATCHES = 16  # batches that differ; steps go round them. More would only take longer to draw.


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One case.

    Attributes:
        max_rows: cap on the rows of a table; 0 for none.
        dim: D.
        pooling: ids a bag, where `multi_hot_sizes` says nothing.
        zipf: exponent of the power law.
        global_batch: samples a step, of all ranks together.
        steps: timed steps of one round.
        warmup: steps before them.
        lr: learning rate.
        seed: of the batches.
        num_embeddings_per_feature: rows of each table, before the cap.
        multi_hot_sizes: ids a bag of each table; empty: `pooling`.
        construction: of a bag: "drawn", each id by itself, or "mlperf": the first is drawn, and decides the others,
            which are uniform over the table, so that samples with equal first ids have equal bags.
        bags: where rows and sizes come from, for the name; empty: Criteo Kaggle.
    """

    max_rows: int = 1_000_000
    dim: int = 16
    pooling: int = 1
    zipf: float = 1.1
    global_batch: int = 4096
    steps: int = 30
    warmup: int = 8
    lr: float = 0.01
    seed: int = 0
    num_embeddings_per_feature: Sequence[int] = CRITEO_KAGGLE
    multi_hot_sizes: Sequence[int] = ()
    construction: str = "drawn"
    bags: str = ""

    @property
    def name(self) -> str:
        """What sets this case apart from the others of a run."""
        bags = self.bags or f"pooling{self.pooling}"
        return f"dim{self.dim}_batch{self.global_batch}_{bags}{'' if self.construction == 'drawn' else '_decided'}"

    @property
    def table_rows(self) -> list[int]:
        """Rows of each table."""
        return [min(n, self.max_rows) if self.max_rows else n for n in self.num_embeddings_per_feature]

    @property
    def bag_sizes(self) -> list[int]:
        """Ids a bag of each table."""
        return list(self.multi_hot_sizes) or [self.pooling] * len(self.num_embeddings_per_feature)

    @property
    def bags_record(self) -> dict[str, Any]:
        """What a report says of the bags."""
        of_tables = {"bags": self.bags, "ids_a_sample": sum(self.bag_sizes)} if self.bags else {"pooling": self.pooling}
        return of_tables | ({} if self.construction == "drawn" else {"construction": self.construction})

    @property
    def num_batches(self) -> int:
        """Batches that differ."""
        return min(self.warmup + self.steps, MAX_BATCHES)


@dataclass(frozen=True)
class WorkloadBatch:
    """A rank's part of a batch.

    Attributes:
        dense: `[b, 13]`.
        ids: `[tables, b, pooling]`; where tables differ in the size of their bags `[N]`, table by table.
        labels: `[b]`.
        bag_sizes: ids a bag of each table.
    """

    dense: Tensor
    ids: Tensor
    labels: Tensor
    bag_sizes: Sequence[int]

    @property
    def bags(self) -> list[Tensor]:
        """Table by table `[b, ids a bag]`."""
        samples = len(self.labels)
        parts = self.ids.flatten().split([samples * size for size in self.bag_sizes])
        return [ids.view(samples, size) for ids, size in zip(parts, self.bag_sizes, strict=True)]

    @property
    def lengths(self) -> Tensor:
        """int64 `[tables · b]`: ids of each bag."""
        return torch.tensor(self.bag_sizes).repeat_interleave(len(self.labels))


class Zipf:
    """Samples P(rank k) ∝ k^−a over n ids by inversion of the distribution.

    Args:
        n: ids.
        exponent: a.
        scattered: ranks are scattered over [0, n); else the most frequent id is 0, as after preparation.
    """

    def __init__(self, n: int, exponent: float, scattered: bool = True) -> None:
        self._n = n
        self._scattered = scattered
        distribution = np.cumsum(np.arange(1, n + 1, dtype=np.float64) ** -exponent)
        self._distribution = distribution / distribution[-1]
        multiplier = int(n * 0.6180339887) | 1
        while math.gcd(multiplier, n) != 1:
            multiplier += 2
        self._multiplier = multiplier % n if n > 1 else 0

    def sample(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """int64 ids."""
        ranks = np.searchsorted(self._distribution, generator.random(shape)).astype(np.int64)
        ranks = np.minimum(ranks, self._n - 1)
        return (ranks * self._multiplier + 7) % self._n if self._scattered else ranks

    @property
    def probabilities(self) -> np.ndarray:
        """Of each rank, the most frequent first."""
        return np.diff(self._distribution, prepend=0.0)


def make_batches(
    workload: Workload, rank: int, world_size: int, count: int, scattered: bool = True
) -> list[WorkloadBatch]:
    """The first `count` batches, this rank's part; `scattered` as in `Zipf`."""
    rows, total = workload.table_rows, workload.global_batch
    samplers = {n: Zipf(n, workload.zipf, scattered) for n in set(rows)}
    local = total // world_size
    part = slice(rank * local, (rank + 1) * local)
    sizes, is_drawn = workload.bag_sizes, workload.construction == "drawn"
    join = np.stack if len(set(sizes)) == 1 else lambda bags: np.concatenate([ids.ravel() for ids in bags])
    batches = []
    for number in range(count):
        generator = np.random.default_rng([workload.seed, number])
        bags = []
        for table, (n, size) in enumerate(zip(rows, sizes, strict=True)):
            ids = samplers[n].sample(generator, (total, size if is_drawn else 1))[part]
            bags.append(ids if is_drawn else decided_bags(ids, size, n, table))
        dense = generator.random((total, NUM_DENSE), dtype=np.float32)[part]
        labels = (generator.random(total) < 0.25)[part].astype(np.float32)
        tensors = [torch.from_numpy(array) for array in (dense, join(bags), labels)]
        batches.append(WorkloadBatch(*tensors, bag_sizes=sizes))
    return batches


def decided_bags(first: np.ndarray, size: int, num_rows: int, table: int) -> np.ndarray:
    """Bags that are the same wherever their first id comes: `[b, 1]` to `[b, size]`.

    The others are uniform over the table: numbers of splitmix64, one a place of a bag, modulo its rows.

    >>> decided_bags(np.array([[7], [2], [7]]), 3, 10, 0).tolist()
    [[7, 5, 9], [2, 5, 2], [7, 5, 9]]
    """
    words = ((table << 48) + first * size + np.arange(1, size)).astype(np.uint64)
    words = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return np.concatenate([first, (words % np.uint64(num_rows)).astype(np.int64)], axis=1)


def read_bags(source: str) -> dict[str, Any]:
    """Fields of a `Workload` that say how many ids a bag of each table has.

    Args:
        source: "mlperf", or a JSON file with the options of MLPerf's DLRM: `{"num_embeddings_per_feature": […],
            "multi_hot_sizes": […]}`.

    Raises:
        ValueError: the file has something else, or there is none; says what and names it.
    """
    if source == "mlperf":
        return {**MLPERF, "bags": "mlperf"}
    try:
        found = json.loads(Path(source).read_text(encoding="utf-8"))
        rows, sizes = (tuple(map(int, found[name])) for name in MLPERF)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--bags {source}: neither mlperf nor a JSON file with {' and '.join(MLPERF)} ({error!r})"
        ) from error
    if len(rows) != len(sizes) or min((*rows, *sizes), default=0) < 1:
        raise ValueError(
            f"--bags {source}: {len(rows)} tables of rows {rows} and {len(sizes)} sizes of bags {sizes}; "
            "give as many of each, all at least 1"
        )
    return {**dict(zip(MLPERF, (rows, sizes), strict=True)), "bags": Path(source).stem}

"""The work that rowmesh and its peers are measured on: batches of a DLRM with the cardinalities of Criteo Kaggle.

Ids follow a power law, and the frequent ones are scattered over the table by a multiplicative permutation, so that
shards by row see an even load. Everything is seeded: any number of ranks trains on the same global batches, rank r of W
on samples [r·B/W, (r+1)·B/W) of each.

Imports neither rowmesh nor a peer: both environments read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
NUM_DENSE = 13
MAX_BATCHES = 16  # batches that differ; steps go round them. More would only take longer to draw.


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One case.

    Attributes:
        max_rows: cap on the rows of a table; 0 for none.
        dim: D.
        pooling: ids a bag.
        zipf: exponent of the power law.
        global_batch: samples a step, of all ranks together.
        steps: timed steps of one round.
        warmup: steps before them.
        lr: learning rate.
        seed: of the batches.
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

    @property
    def name(self) -> str:
        """What sets this case apart from the others of a run."""
        return f"dim{self.dim}_batch{self.global_batch}_pooling{self.pooling}"

    @property
    def table_rows(self) -> list[int]:
        """Rows of each table."""
        return [min(n, self.max_rows) if self.max_rows else n for n in CRITEO_KAGGLE]

    @property
    def num_batches(self) -> int:
        """Batches that differ."""
        return min(self.warmup + self.steps, MAX_BATCHES)


@dataclass(frozen=True)
class WorkloadBatch:
    """A rank's part of a batch: dense `[b, 13]`, ids `[tables, b, pooling]`, labels `[b]`."""

    dense: Tensor
    ids: Tensor
    labels: Tensor


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
    batches = []
    for number in range(count):
        generator = np.random.default_rng([workload.seed, number])
        ids = np.stack([samplers[n].sample(generator, (total, workload.pooling))[part] for n in rows])
        dense = generator.random((total, NUM_DENSE), dtype=np.float32)[part]
        labels = (generator.random(total) < 0.25)[part].astype(np.float32)
        batches.append(WorkloadBatch(*map(torch.from_numpy, (dense, ids, labels))))
    return batches

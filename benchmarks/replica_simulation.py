"""Training with M replica groups in one process: what ranks would compute, without ranks.

Algorithm 1 of two-dimensional sparse parallelism, with rows and moments averaged after every step: between steps all
groups then have the same rows, so that one copy is kept, and a step of all groups is one pass over the (row, group)
pairs that the batch names. `tests/benchmarks` holds it against the transcription of the algorithm, and the benchmark
that uses it against real ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rowmesh.data import Batch
from rowmesh.mesh.synchronization import Mode
from rowmesh.models import DLRM
from rowmesh.ops.initialize.reference import values as initial_values
from rowmesh.run.metrics import Predictions
from rowmesh.tables import TableSpec
from rowmesh.tables.initializer import table_key
from rowmesh.tables.update_rules import RowWiseAdaGrad

DIM = 8


@dataclass(frozen=True, kw_only=True)
class Network:
    """The dense layers, and how they are trained: with Adam on gradients of the global batch.

    Attributes:
        lr: of Adam.
        bottom, top: hidden widths of the DLRM.
        seed: of first values, also of the tables'.
    """

    lr: float
    bottom: tuple[int, ...] = (32,)
    top: tuple[int, ...] = (64, 32)
    seed: int = 0

    def make(self, num_dense: int, num_features: int, dtype: torch.dtype) -> tuple[DLRM, torch.optim.Optimizer]:
        """The same values on every rank."""
        torch.manual_seed(self.seed)
        network = DLRM(num_dense=num_dense, num_features=num_features, dim=DIM, bottom=self.bottom, top=self.top)
        network = network.to(dtype)
        return network, torch.optim.Adam(network.parameters(), lr=self.lr)


class ReplicatedTables:
    """Tables of one dim and row-wise AdaGrad under M groups, one id a bag.

    Args:
        tables: their optimizer's moment_scale is the c of line 6; M where it is None.
        groups: M; of B samples, group m has those from m·B/M to (m + 1)·B/M.
        mode: "average" is Algorithm 1; "exact" adds up the groups' gradients before the update.
        seed: of the first values, which are those of an EmbeddingCollection.

    Attributes:
        weights: `[ΣR, D]`, table after table.
        moments: `[ΣR]`.
    """

    def __init__(self, tables: Sequence[TableSpec], groups: int, mode: Mode, seed: int) -> None:
        rule, dtype = tables[0].optimizer, tables[0].dtype
        assert isinstance(rule, RowWiseAdaGrad)
        self.rule, self.groups, self.mode = rule, groups, mode
        self._c = rule.moment_scale or (groups if mode == "average" else 1)
        *starts, num_rows = accumulate((table.num_rows for table in tables), initial=0)
        self._starts = torch.tensor(starts)
        self.weights = torch.cat([_first_values(table, seed) for table in tables]).to(dtype)
        self.moments = torch.full((num_rows,), rule.initial_accumulator, dtype=dtype)

    def look_up(self, ids: Tensor) -> Tensor:
        """Vectors `[B, F, D]`, a leaf of autograd, of ids `[F, B]`."""
        return self.weights[(ids + self._starts[:, None]).T].requires_grad_()

    @torch.no_grad()
    def update(self, ids: Tensor, gradient: Tensor) -> None:
        """Lines 2 to 10, by the gradient `[B, F, D]` of the mean loss of all samples with respect to the vectors."""
        rows, group = (ids + self._starts[:, None]).T, torch.arange(ids.shape[1]) * self.groups // ids.shape[1]
        pairs, g = _sums(rows * self.groups + group[:, None], gradient)
        row, averaged = pairs // self.groups, self.groups
        if self.mode == "exact":
            (row, g), averaged = _sums(row, g), 1
        g = g * averaged  # of the mean loss of a group's samples
        growth = g.square().mean(1)
        root = ((self.moments[row] + growth) / self._c).sqrt()
        self.weights.index_add_(0, row, g * (self.rule.lr / (root + self.rule.eps))[:, None], alpha=-1 / averaged)
        self.moments.index_add_(0, row, growth, alpha=1 / averaged)


def _sums(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct keys, ascending, and the sum of the values `[…, D]` of each."""
    unique, inverse = torch.unique(keys, return_inverse=True)
    flat = values.reshape(-1, values.shape[-1])
    return unique, flat.new_zeros(len(unique), flat.shape[1]).index_add_(0, inverse.flatten(), flat)


def _first_values(table: TableSpec, seed: int) -> Tensor:
    a, b = table.initializer.parameters(table.num_rows)
    key, rows = table_key(seed, table.name), np.arange(table.num_rows)
    return torch.from_numpy(initial_values(key, rows, table.dim, table.initializer.name, a, b))


def train(tables: ReplicatedTables, model: Network, batches: Sequence[Batch]) -> DLRM:
    """One step a batch; returns the network."""
    dtype = tables.weights.dtype
    network, optimizer = model.make(batches[0].dense.shape[1], len(batches[0].sparse.features), dtype)
    for batch in batches:
        ids = one_hot(batch)
        vectors = tables.look_up(ids)
        optimizer.zero_grad()
        logits = network(batch.dense.to(dtype), vectors)
        F.binary_cross_entropy_with_logits(logits, batch.labels.to(dtype)).backward()
        optimizer.step()
        assert vectors.grad is not None
        tables.update(ids, vectors.grad)
    return network


@torch.no_grad()
def normalized_entropy(tables: ReplicatedTables, network: DLRM, batches: Sequence[Batch]) -> float:
    """Log loss over that of always predicting the share of clicks."""
    predictions = Predictions()
    for batch in batches:
        vectors = tables.look_up(one_hot(batch))
        predictions.add(network(batch.dense.to(vectors.dtype), vectors), batch.labels)
    return predictions.metrics().normalized_entropy


def one_hot(batch: Batch) -> Tensor:
    """Ids `[F, B]` of a batch whose bags hold one each."""
    return batch.sparse.ids.view(len(batch.sparse.features), -1)

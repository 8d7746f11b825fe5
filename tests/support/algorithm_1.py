"""Algorithm 1 of "Two-dimensional sparse parallelism" (§3.2) in one process, to be read beside the paper.

`Algorithm1` keeps M whole copies of a table in plain torch and gets each group's gradient; `train_algorithm_1` runs
a Scenario with it. Of rowmesh only the values that describe the job are used: scenarios, rules and which rank is in
which group. Nothing is fused, routed, or limited to the rows that differ.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rowmesh.mesh.grid import Grid, Together
from rowmesh.ops.initialize.reference import values as initial_values
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec
from rowmesh.tables.initializer import table_key
from rowmesh.tables.update_rules import SGD, AdaGrad, Adam, RowWiseAdaGrad, UpdateRule
from tests.support.scenario import Scenario
from tests.support.training import HEAD_LR, Head, Trained, sum_sequence


class Algorithm1:
    """One table under M groups.

    Args:
        start: `[rows, D]`, where all groups begin; its dtype is what is computed in.
        rule: SGD, AdaGrad, row-wise AdaGrad (whose ‖g‖² is mean(g²), the rule's convention) or lazy Adam. Its
            moment_scale is the c of line 6; M where it is None.
        num_groups: M.
        sync_every: lines 9 and 10 are done in every so many iterations; the paper's are done in each.
        storage: what weights are rounded to after every change; default: not rounded.

    Attributes:
        weights: w⁽ᵐ⁾ of each group, `[rows, D]`, leaves of autograd.
        moments: the optimizer state of each group by name; v⁽ᵐ⁾ is "sum" for the AdaGrads and "v" for Adam.
        iteration: k, the iterations done.
    """

    def __init__(
        self, start: Tensor, rule: UpdateRule, num_groups: int, sync_every: int = 1, storage: torch.dtype | None = None
    ) -> None:
        self.rule, self.num_groups, self.sync_every = rule, num_groups, sync_every
        self.storage = storage or start.dtype
        self.iteration = 0
        c = getattr(rule, "moment_scale", None)
        self.c = num_groups if c is None else c
        shapes = {"row": start.shape[:1], "element": start.shape}
        self.weights = [start.to(self.storage).to(start.dtype, copy=True).requires_grad_() for _ in range(num_groups)]
        self.moments = [
            {
                name: torch.full(shapes[extent], rule.initial_state[name], dtype=start.dtype)
                for name, extent in rule.state.items()
            }
            for _ in range(num_groups)
        ]

    def iterate(self, gradients: list[Tensor], touched: list[Tensor], lr: float | None = None) -> None:
        """Lines 2 to 10.

        Args:
            gradients: line 4's g⁽ᵐ⁾ of each group, `[rows, D]`: of the mean loss of the group's samples.
            touched: which rows the group's samples name, bool `[rows]`; as in any sparse optimizer others stay.
            lr: η of this iteration; default: the rule's.
        """
        self.update_locally(gradients, touched, lr)
        if self.iteration % self.sync_every == 0:
            self.synchronize()

    def update_locally(self, gradients: list[Tensor], touched: list[Tensor], lr: float | None = None) -> None:
        """Lines 2 to 8: each group on its own; afterwards the weights and moments are those of k − ½."""
        self.iteration += 1
        for m in range(self.num_groups):
            self._update_group(m, gradients[m], touched[m].nonzero()[:, 0], self.rule.lr if lr is None else lr)

    @torch.no_grad()
    def _update_group(self, m: int, gradient: Tensor, i: Tensor, lr: float) -> None:
        """Lines 3 to 7, for all rows i at once."""
        rule, k, c = self.rule, self.iteration, self.c
        w, moments, g = self.weights[m], self.moments[m], gradient[i]
        if isinstance(rule, Adam):
            w[i] = w[i] * (1 - lr * rule.weight_decay)
        else:
            g = g + rule.weight_decay * w[i]
        if isinstance(rule, SGD):
            w[i] = w[i] - lr * g
        elif isinstance(rule, AdaGrad):
            v = moments["sum"]
            v[i] = v[i] + g**2
            w[i] = w[i] - lr / ((v[i] / c).sqrt() + rule.eps) * g
        elif isinstance(rule, RowWiseAdaGrad):
            v = moments["sum"]
            v[i] = v[i] + (g**2).mean(1)
            w[i] = w[i] - (lr / ((v[i] / c).sqrt() + rule.eps))[:, None] * g
        elif isinstance(rule, Adam):
            first, v = moments["m"], moments["v"]
            first[i] = rule.beta1 * first[i] + (1 - rule.beta1) * g
            v[i] = rule.beta2 * v[i] + (1 - rule.beta2) * g**2
            corrected_first, corrected_v = first[i] / (1 - rule.beta1**k), v[i] / (1 - rule.beta2**k)
            w[i] = w[i] - lr / ((corrected_v / c).sqrt() + rule.eps) * corrected_first
        else:
            raise TypeError(f"no transcription of {rule.name}")
        w.copy_(w.to(self.storage))

    @torch.no_grad()
    def synchronize(self) -> None:
        """Lines 9 and 10: weights, and every moment, become their averages over the groups."""
        average = torch.stack(self.weights).mean(0)
        for w in self.weights:
            w.copy_(average.to(self.storage))
        for name in self.rule.state:
            average = torch.stack([moments[name] for moments in self.moments]).mean(0)
            for moments in self.moments:
                moments[name].copy_(average)


def train_algorithm_1(
    scenario: Scenario, replicas: int | Mapping[str, int], sync_every: int = 1, together: Together = "shards"
) -> Trained:
    """Runs a job with every table under Algorithm 1, and the dense layers on gradients of the global batch.

    A look-up reads the weights of the group that the sample's rank belongs to. After the last step the groups are
    synchronized once more. Evaluation between steps does not synchronize.

    Args:
        scenario: the job. Its plan is not looked at.
        replicas: M, or M by table.
        sync_every: of every table.
        together: which ranks form a group.
    """
    counts = {t.name: replicas if isinstance(replicas, int) else replicas[t.name] for t in scenario.tables}
    tables = {
        t.name: Algorithm1(_start(t, scenario), t.optimizer, counts[t.name], sync_every, t.dtype)
        for t in scenario.tables
    }
    grids = {name: Grid(scenario.world_size, count, together) for name, count in counts.items()}
    head, trained = Head(scenario), Trained(transport="algorithm 1")
    dense_optimizer = torch.optim.SGD(head.parameters(), lr=HEAD_LR)
    for step in range(scenario.num_steps):
        touched = {t.name: torch.zeros(counts[t.name], t.num_rows, dtype=torch.bool) for t in scenario.tables}
        dense_optimizer.zero_grad()
        for part in range(scenario.accumulate):
            vectors, labels = _look_up(tables, grids, scenario, step, part, touched)
            losses = F.binary_cross_entropy_with_logits(head(vectors), labels, reduction="sum")
            losses.backward()  # sums over samples; what they are averaged over depends on the caller
            trained.outputs.append(vectors.detach().clone())
            trained.losses.append(float(losses.detach()) / scenario.global_batch)
        for parameter in head.parameters():
            assert parameter.grad is not None
            parameter.grad /= scenario.global_batch
        dense_optimizer.step()
        for table in scenario.tables:
            _iterate(tables[table.name], grids[table.name], scenario, touched[table.name], step)
        if scenario.evaluates:
            with torch.no_grad():
                trained.outputs.append(_look_up(tables, grids, scenario, step + 1, 0, touched)[0])
    for table in scenario.tables:
        tables[table.name].synchronize()
        trained.rows[table.name] = tables[table.name].weights[0].detach()
        trained.state[table.name] = tables[table.name].moments[0]
    trained.head = [parameter.detach().clone() for parameter in head.parameters()]
    return trained


def _start(table: TableSpec, scenario: Scenario) -> Tensor:
    """The rows that rowmesh starts from too."""
    a, b = table.initializer.parameters(table.num_rows)
    key, rows = table_key(scenario.seed, table.name), np.arange(table.num_rows)
    return torch.from_numpy(initial_values(key, rows, table.dim, table.initializer.name, a, b)).to(scenario.dtype)


def _iterate(table: Algorithm1, grid: Grid, scenario: Scenario, touched: Tensor, step: int) -> None:
    """Line 4 divides the sum over a group's samples by their number."""
    gradients = []
    for m, w in enumerate(table.weights):
        num_samples = max(sum(scenario.batch_sizes[rank] for rank in grid.groups[m]), 1)
        gradients.append(torch.zeros_like(w) if w.grad is None else w.grad / num_samples)
        w.grad = None
    table.iterate(gradients, list(touched), table.rule.lr * scenario.decay**step)


def _look_up(
    tables: dict[str, Algorithm1],
    grids: dict[str, Grid],
    scenario: Scenario,
    step: int,
    part: int,
    touched: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Vectors and labels of the global batch, rank after rank; marks the rows that each group's samples name."""
    vectors, labels = [], []
    for rank in range(scenario.world_size):
        batch, of_rank = scenario.local_batch(step, part, rank), []
        for place, (_, spec) in enumerate(scenario.features):
            m, _ = grids[spec.name].place(rank)
            ids, offsets, weights = _feature(batch.sparse, place)
            touched[spec.name][m, ids] = True
            of_rank.append(_pool(tables[spec.name].weights[m], spec.pooling, ids, offsets, weights))
        vectors.append(torch.cat(of_rank, 1))
        labels.append(batch.labels)
    return torch.cat(vectors), torch.cat(labels)


def _feature(batch: SparseBatch, place: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The ids of one feature, their offsets by sample from 0, and their weights."""
    begin, end = batch.feature_range(place)
    offsets = batch.offsets[place * batch.batch_size : (place + 1) * batch.batch_size + 1]
    return batch.ids[begin:end], offsets - begin, None if batch.weights is None else batch.weights[begin:end]


def _pool(table: Tensor, pooling: str, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """`nn.EmbeddingBag` by hand: a vector for each sample."""
    values = F.embedding(ids, table)
    if weights is not None:
        values = values * weights[:, None]
    if pooling == "none":
        return sum_sequence(values, offsets)
    sizes = offsets.diff()
    sample = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    pooled = torch.zeros(len(sizes), table.shape[1], dtype=table.dtype).index_add(0, sample, values)
    return pooled / sizes.clamp(min=1)[:, None] if pooling == "mean" else pooled

"""A tensor-train table in plain torch: cores that autograd differentiates, updated slice by slice."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rowmesh.ops.tensor_train.reference import rows
from rowmesh.tables import TableSpec
from rowmesh.tables.cores import draw_cores
from rowmesh.tables.update_rules import SGD, AdaGrad, Adam


class ReferenceCores:
    """The counterpart of `ReferenceTable`: same methods."""

    def __init__(self, table: TableSpec, seed: int, dtype: torch.dtype) -> None:
        self.table, self.shape = table, table.tensor_train_shape
        drawn = draw_cores(self.shape, table.initializer, seed, table.name, table.dtype)
        self.cores = [core.to(dtype).requires_grad_(not table.frozen) for core in drawn]
        initial = table.optimizer.initial_state
        self._state = {name: [torch.full_like(core, value) for core in drawn] for name, value in initial.items()}
        self._ids: list[Tensor] = []

    def look_up(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """One vector a bag; a bag of one id is its row, where the table does not pool."""
        from tests.support.training import sum_sequence

        if torch.is_grad_enabled():
            self._ids.append(ids)
        values = rows(self.cores, ids)
        if self.table.pooling == "none":
            return sum_sequence(values if weights is None else values * weights[:, None], offsets)
        if weights is None:
            weights = torch.ones(len(ids), dtype=values.dtype)
        if self.table.pooling == "mean":
            weights = weights / torch.repeat_interleave(offsets.diff(), offsets.diff())
        every = torch.arange(len(ids))
        return F.embedding_bag(every, values, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)

    def step(self, decay: float, number: int) -> None:
        """One step of the rule, of slices that an id read."""
        if self.table.frozen:
            return
        ids, (_, p2, p3) = torch.cat(self._ids), self.shape.row_factors
        slices = ids // p3 // p2, ids // p3 % p2, ids % p3
        with torch.no_grad():
            for place, (core, read) in enumerate(zip(self.cores, slices, strict=True)):
                if len(read):
                    self._change(core, place, read.unique(), decay, number)
                core.grad = None
        self._ids.clear()

    def _change(self, core: Tensor, place: int, at: Tensor, decay: float, number: int) -> None:
        rule = self.table.optimizer
        assert core.grad is not None
        g, lr = core.grad[at], rule.lr * decay
        if isinstance(rule, SGD):
            core[at] -= lr * g
        elif isinstance(rule, AdaGrad):
            total = self._state["sum"][place]
            total[at] += g * g
            core[at] -= lr * g / (total[at].sqrt() + rule.eps)
        elif isinstance(rule, Adam):
            m, v = self._state["m"][place], self._state["v"][place]
            m[at] = rule.beta1 * m[at] + (1 - rule.beta1) * g
            v[at] = rule.beta2 * v[at] + (1 - rule.beta2) * g * g
            root = (v[at] / (1 - rule.beta2**number)).sqrt() + rule.eps
            core[at] -= lr * (m[at] / (1 - rule.beta1**number)) / root

    @property
    def parameters(self) -> list[Tensor]:
        """What is trained."""
        return self.cores

    @property
    def values(self) -> Tensor:
        """All cores, one after the other."""
        return joined_cores(self.cores)

    @property
    def state(self) -> dict[str, Tensor]:
        """Each state of all cores, one after the other."""
        return {name: joined_cores(kept) for name, kept in self._state.items()}


def joined_cores(cores: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """The elements of all cores, one after the other; a copy on the CPU."""
    return torch.cat([core.detach().flatten() for core in cores]).cpu()

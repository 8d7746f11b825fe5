"""Update slices in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rowmesh.ops.merge_update import reference
from rowmesh.optim import UpdateRule


def update_slices(
    core: Tensor, states: Sequence[Tensor], gradient: Tensor, touched: Tensor, rule: UpdateRule, lr: float,
    scaling: float, step: int,
) -> None:  # fmt: skip
    """As `rowmesh.ops.update_slices.cuda.update_slices`; lr, scaling and step are what its numbers were made of."""
    flat, slices = core.view(len(core), -1), touched.nonzero().flatten()
    state = {name: kept.view(len(core), -1) for name, kept in zip(rule.state, states, strict=True)}
    gradients = scaling * gradient.reshape(len(core), -1)[slices]
    scale = getattr(rule, "moment_scale", None) or 1.0
    reference.update(rule.name, flat, state, slices, gradients, lr, *rule.hyperparameters, step, scale)

"""Update slices in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rowmesh.ops.merge_update import reference


def update_slices(
    rule: str, core: Tensor, state: Mapping[str, Tensor], gradient: Tensor, touched: Tensor, *numbers: Any
) -> None:
    """Changes the touched slices of a core and their states, in place.

    Args:
        rule: the name of an update rule that keeps state by element.
        core: `[p, …]`.
        state: by name, of the core's shape.
        gradient: of the core, scaled.
        touched: `[p]`: 0 where the slice stays as it is.
        numbers: what `rowmesh.ops.merge_update.reference.update` takes after the gradients.
    """
    slices = touched.nonzero().flatten()
    rows = {name: kept.view(len(core), -1) for name, kept in state.items()}
    reference.update(rule, core.view(len(core), -1), rows, slices, gradient.reshape(len(core), -1)[slices], *numbers)

"""Average of rows in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def average(old: Tensor, sent: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The mean over groups of a table of which each group has changed some rows.

    Args:
        old: `[rows, D]`, what all groups had.
        sent: for each group, the slots it changed, distinct, and their new values `[n, D]`.

    Returns:
        `[rows, D]`: w₀ + Σ (wₘ − w₀) / M, which is w exactly where all groups have w, for any M.
    """
    values = []
    for slots, rows in sent:
        value = old.clone()
        value[slots] = rows
        values.append(value.to(torch.promote_types(old.dtype, torch.float32)))
    first, *others = values
    total = torch.zeros_like(first)
    for other in others:
        total += other - first
    return (first + total * (1.0 / len(sent))).to(old.dtype)

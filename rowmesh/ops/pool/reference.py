"""Pool and its backward in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def pool(rows: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The (weighted) sum of each bag: `[U, D]`, `[N]`, `[bags + 1]` → `[bags, D]`."""
    values = rows[inverse.long()]
    if weights is not None:
        values = values * weights[:, None]
    bag = torch.repeat_interleave(torch.arange(offsets.numel() - 1), offsets.diff())
    return torch.zeros(offsets.numel() - 1, rows.shape[1], dtype=rows.dtype).index_add_(0, bag, values)


def pool_backward(
    grad: Tensor, inverse: Tensor, offsets: Tensor, num_rows: int, weights: Tensor | None = None
) -> Tensor:
    """The gradient of the rows: `[bags, D]` → `[U, D]`, summed in the order of the ids."""
    bag = torch.repeat_interleave(torch.arange(offsets.numel() - 1), offsets.diff())
    values = grad[bag]
    if weights is not None:
        values = values * weights[:, None]
    return torch.zeros(num_rows, grad.shape[1], dtype=grad.dtype).index_add_(0, inverse.long(), values)

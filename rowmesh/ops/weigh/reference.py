"""Gradients of weights in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def weight_gradients(rows: Tensor, inverse: Tensor, offsets: Tensor, grad: Tensor, *, is_mean: bool = False) -> Tensor:
    """`[N]`, of `[U, D]`, `[N]`, `[bags + 1]` and `[bags, D]`."""
    sizes = offsets.diff()
    bag = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)
    products = (rows[inverse.long()].to(grad.dtype) * grad[bag]).sum(1)
    return products / sizes[bag] if is_mean else products

"""Linear layer in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """`x Wᵀ + b`, or max(0, x Wᵀ + b)."""
    y = F.linear(x, weight, bias)
    return F.relu(y) if relu else y


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """`[B, N]` and `[N, K]` to `[B, K]`."""
    return grad @ weight


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """`[B, N]` and `[B, K]` to `[N, K]`."""
    return grad.t() @ x

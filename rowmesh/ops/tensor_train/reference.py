"""Tensor-train rows in plain torch: obviously right, differentiable, one product of cores an id."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rows(cores: Sequence[Tensor], ids: Tensor) -> Tensor:
    """The rows of `ids`, `[N, D]`.

    row(id)[j₁, j₂, j₃] = Σ over r₁, r₂ of G₁[i₁, j₁, r₁] · G₂[i₂, r₁, j₂, r₂] · G₃[i₃, j₃, r₂]

    with id = (i₁ · p₂ + i₂) · p₃ + i₃.

    Args:
        cores: G₁ `[p₁, q₁, R₁]`, G₂ `[p₂, R₁, q₂, R₂]`, G₃ `[p₃, q₃, R₂]`.
        ids: int64 `[N]`.
    """
    first, second, third = cores
    last = ids % third.shape[0]
    prefix = ids // third.shape[0]
    slices = first[prefix // second.shape[0]], second[prefix % second.shape[0]], third[last]
    dim = first.shape[1] * second.shape[2] * third.shape[1]
    return torch.einsum("nar,nrbs,ncs->nabc", *slices).reshape(ids.numel(), dim)


def dense(cores: Sequence[Tensor]) -> Tensor:
    """Every row, `[p₁ · p₂ · p₃, D]`."""
    first, second, third = cores
    products = torch.einsum("iar,jrbs->ijabs", first, second)
    num_rows = first.shape[0] * second.shape[0] * third.shape[0]
    return torch.einsum("ijabs,kcs->ijkabc", products, third).reshape(num_rows, -1)

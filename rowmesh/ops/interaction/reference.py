"""Dot interactions in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def interact(base: Tensor, embeddings: Tensor) -> Tensor:
    """`(b, ⟨T_i, T_j⟩ for all j < i)` with T = (b, embeddings), i by i: `[B, D]`, `[B, F, D]` → `[B, D + F(F+1)/2]`."""
    num_vectors = embeddings.shape[1] + 1
    rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1, device=base.device)
    vectors = torch.cat([base.unsqueeze(1), embeddings], dim=1)
    products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, rows * num_vectors + columns)
    return torch.cat([base, products], dim=1)


def gradients(base: Tensor, embeddings: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """`∂T_i = Σ_j s_ij T_j`, s symmetric, and to that of b the gradient of b's copy; can be differentiated in turn."""
    samples, features, dim = embeddings.shape
    num_vectors = features + 1
    rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1, device=base.device)
    lower = grad.new_zeros(samples, num_vectors**2).index_add(1, rows * num_vectors + columns, grad[:, dim:])
    lower = lower.view(samples, num_vectors, num_vectors)
    of_vectors = torch.bmm(lower + lower.transpose(1, 2), torch.cat([base.unsqueeze(1), embeddings], dim=1))
    return grad[:, :dim] + of_vectors[:, 0], of_vectors[:, 1:]

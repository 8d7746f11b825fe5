"""HSTU in nothing but torch, padded, as its published implementation computes it; with the parameters of an encoder.

Imports neither rowmesh nor a peer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PaddedHSTU(nn.Module):
    """Padded vectors `[B, N, D]` to `[B, N, D]`.

    Differs from the published implementation to its own advantage: buckets of time are found once for all blocks.

    Args:
        dim: D.
        num_blocks: blocks.
        num_heads: heads; divides D.
        max_length: N.
        state: of a `SequenceEncoder("hstu", …)` of these sizes, whose parameters it takes.
    """

    def __init__(self, dim: int, num_blocks: int, num_heads: int, max_length: int, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.num_heads, self.max_length = num_heads, max_length
        self.blocks = nn.ModuleList(_Block(dim, num_heads, max_length) for _ in range(num_blocks))
        self.load_state_dict(state)

    def forward(self, x: Tensor, asked: Tensor, times: Tensor) -> Tensor:
        """`asked` and `times` are int64 `[B, N]`."""
        durations = (asked[:, :, None] - times[:, None, :]).abs().clamp(min=1)
        buckets = (durations.to(x.dtype).log() / 0.301).long().flatten()
        past = torch.ones(self.max_length, self.max_length).tril()
        for block in self.blocks:
            x = block(x, buckets, past)
        return x


class _Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, max_length: int) -> None:
        super().__init__()
        self.dim, self.num_heads, self.max_length = dim, num_heads, max_length
        self.norm, self.norm_attention = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.project, self.out = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.positions = nn.Parameter(torch.empty(2 * max_length - 1))
        self.time = nn.Parameter(torch.empty(128))

    def forward(self, x: Tensor, buckets: Tensor, past: Tensor) -> Tensor:
        n = self.max_length
        u, v, q, k = F.silu(self.project(self.norm(x))).chunk(4, dim=-1)
        v, q, k = (each.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for each in (v, q, k))
        scores = q @ k.transpose(2, 3) + self._bias(buckets, len(x)).unsqueeze(1)
        attention = (F.silu(scores) / n * past) @ v
        return x + self.out(self.norm_attention(attention.transpose(1, 2).flatten(2)) * u)

    def _bias(self, buckets: Tensor, num_users: int) -> Tensor:
        """By position, from a table that is shifted row by row, and by time."""
        n = self.max_length
        shifted = F.pad(self.positions, [0, n]).repeat(n)[:-n].reshape(1, n, 3 * n - 2)
        time = torch.index_select(self.time, 0, buckets).view(num_users, n, n)
        return shifted[:, :, n - 1 : 2 * n - 1] + time


def pad(tensor: Tensor, lengths: Sequence[int], max_length: int) -> Tensor:
    """Packed `[T, …]` to `[B, max_length, …]`, with zeros behind."""
    padded = tensor.new_zeros(len(lengths), max_length, *tensor.shape[1:])
    for user, part in enumerate(tensor.split(list(lengths))):
        padded[user, : len(part)] = part
    return padded

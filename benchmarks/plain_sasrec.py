"""SASRec in nothing but torch: padded, trained and ranked without rowmesh.

Imports neither rowmesh nor a peer.

Source: Kang and McAuley, "Self-Attentive Sequential Recommendation" (2018), §3: equations 2 to 6, with full softmax in
the place of binary cross entropy.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence


class PlainSASRec(nn.Module):
    """Items and positions to what a user is after each event.

    Args:
        num_items: M.
        dim: D.
        num_blocks: blocks.
        num_heads: heads of attention.
        max_length: the longest sequence.
        dropout: probability.
    """

    def __init__(
        self, num_items: int, dim: int, num_blocks: int, num_heads: int, max_length: int, dropout: float
    ) -> None:
        super().__init__()
        self.items, self.positions = nn.Embedding(num_items, dim), nn.Embedding(max_length, dim)
        for table in (self.items, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(dim, num_heads, dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)

    def forward(self, items: Tensor) -> Tensor:
        """`[B, N]`, padded behind, to `[B, N, D]`."""
        length = items.shape[1]
        x = self.dropout(self.items(items) + self.positions.weight[:length])
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, future)
        return self.norm(x)

    def loss(self, items: Tensor, targets: Tensor, offsets: Tensor) -> Tensor:
        """The mean cross entropy over all items, of packed sequences."""
        predicts = padded(targets, offsets, -1) >= 0
        queries = self(padded(items, offsets, 0))[predicts]
        return F.cross_entropy(queries @ self.items.weight.T, targets[targets >= 0])

    @torch.no_grad()
    def ranks(self, items: Tensor, offsets: Tensor, targets: Tensor, seen: list[Tensor]) -> Tensor:
        """Of each user's target among the items that the user has not seen, `[B]`; tied items stand before it."""
        last = offsets.diff() - 1
        queries = self(padded(items, offsets, 0))[torch.arange(len(last)), last]
        scores = queries @ self.items.weight.T
        own = scores.gather(1, targets[:, None])
        for user, of_user in enumerate(seen):
            scores[user, of_user] = -torch.inf
        scores.scatter_(1, targets[:, None], -torch.inf)
        return 1 + (scores >= own).sum(1)


class _Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, num_heads, dropout, bias=False, batch_first=True)
        self.inner, self.outer, self.dropout = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Dropout(dropout)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        normed = self.before_attention(x)
        x = x + self.dropout(self.attention(normed, normed, normed, attn_mask=future, need_weights=False)[0])
        normed = self.before_feed_forward(x)
        return x + self.dropout(self.outer(self.dropout(self.inner(normed).relu())))


def padded(packed: Tensor, offsets: Tensor, value: int) -> Tensor:
    """Packed `[N]` to `[B, longest]`, with a value behind.

    >>> padded(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 3]), 0).tolist()
    [[5, 0], [6, 7]]
    """
    parts = [packed[begin:end] for begin, end in pairwise(offsets.tolist())]
    return pad_sequence(parts, batch_first=True, padding_value=value)

"""Attention of packed sequences in plain torch, one sequence at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from rowmesh.ops.sequence_attention.bias import Bias, weights_of_time


def attend(
    values: Tensor,
    offsets: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    activation: str,
    divisor: float | None,
    bias: Bias,
) -> Tensor:
    """As `rowmesh.ops.sequence_attention.attend`; `[N, C, H, D]`. It has gradients of gradients."""
    bounds = list(pairwise(offsets.tolist()))
    parts = [
        torch.einsum("chij,jhd->ichd", _weights(slice(*each), values, queries, keys, activation, divisor, bias), v)
        for each in bounds
        if (v := values[slice(*each)]).shape[0]
    ]
    if parts:
        return torch.cat(parts)
    channels = num_channels(queries is not None, bias)
    return values.unsqueeze(1).expand(-1, channels, -1, -1) + sum(_nothing(queries, keys, bias.positions, bias.time))


def num_channels(has_products: bool, bias: Bias) -> int:
    """C: matrices of weights that share the values."""
    biases = sum(each is not None for each in (bias.positions, bias.time))
    return int(has_products) + biases if bias.separate else 1


def _nothing(*tensors: Tensor | None) -> list[Tensor]:
    """Zeros that depend on tensors, so that each has a gradient of a batch without events too."""
    return [each.sum() * 0 for each in tensors if each is not None]


def _weights(
    part: slice,
    values: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    activation: str,
    divisor: float | None,
    bias: Bias,
) -> Tensor:
    """`[C, H, L, L]` of one sequence; 0 above the diagonal."""
    length, heads = part.stop - part.start, values.shape[1]
    past = torch.ones(length, length, dtype=torch.bool, device=values.device).tril()
    biases = _biases(bias, part, length)
    scores = [] if queries is None or keys is None else [torch.einsum("ihd,jhd->hij", queries[part], keys[part])]
    if not bias.separate:
        scores = [sum(biases, start=scores[0])]
    weights = [_activate(each, past, activation, divisor or length) for each in scores]
    if bias.separate:
        weights += [each.expand(heads, -1, -1) for each in biases]
    return torch.stack(weights).masked_fill(~past, 0)


def _biases(bias: Bias, part: slice, length: int) -> list[Tensor]:
    found = []
    if bias.positions is not None:
        index = torch.arange(length, device=bias.positions.device)
        last = (bias.positions.shape[0] - 1) // 2
        found.append(bias.positions[(index[None] - index[:, None] + last)])
    if bias.time is not None:
        assert bias.times is not None
        asked = bias.times if bias.query_times is None else bias.query_times
        found.append(weights_of_time(bias, asked[part][:, None] - bias.times[part][None]))
    return found


def _activate(scores: Tensor, past: Tensor, activation: str, divisor: float) -> Tensor:
    if activation == "silu":
        return F.silu(scores) / divisor
    return scores.masked_fill(~past, -torch.inf).softmax(dim=-1)

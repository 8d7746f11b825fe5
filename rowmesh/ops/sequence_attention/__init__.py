"""Causal attention of packed sequences of events, with weights by position and time.

Source: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations" (arXiv:2402.17152); the channels are those of FuXi-α (arXiv:2502.03036).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rowmesh.ops.sequence_attention import reference
from rowmesh.ops.sequence_attention.bias import NUM_BUCKETS, Bias, TimeForm, bucket_starts, buckets
from rowmesh.ops.sequence_attention.reference import num_channels

__all__ = ["NUM_BUCKETS", "Activation", "Bias", "TimeForm", "attend", "bucket_starts", "buckets", "num_channels"]
Activation = Literal["silu", "softmax"]


def attend(
    values: Tensor,
    offsets: Tensor,
    *,
    queries: Tensor | None = None,
    keys: Tensor | None = None,
    activation: Activation = "silu",
    divisor: float | None = None,
    bias: Bias | None = None,
) -> Tensor:
    """`O_i = Σ_{j ≤ i} A_ij V_j` within each sequence, with `A = silu(Q Kᵀ + bias) / divisor`, or a softmax of it.

    Args:
        values: `[N, H, D]`, of the events of all sequences, one after the other; H heads.
        offsets: int64 `[B + 1]`, where each sequence begins, and N. A sequence may be empty.
        queries: `[N, H, K]`; with `keys`, or neither, where weights are by position and time alone.
        keys: `[N, H, K]`.
        activation: of products and what is added to them.
        divisor: of silu; None: the length of the sequence.
        bias: by position and time.

    Returns:
        `[N, C, H, D]`: of C = 1 channel, or, with `bias.separate`, of products, positions and time, those that there
        are, in this order; position and time are then without activation and divisor.

    Raises:
        ValueError: shapes or dtypes do not fit; a sequence is longer than the table of positions.

    Example:
        >>> values, offsets = torch.ones(3, 1, 2), torch.tensor([0, 1, 3])
        >>> attend(values, offsets, queries=values, keys=values, activation="softmax").flatten(1)
        tensor([[1., 1.],
                [1., 1.],
                [1., 1.]])
    """
    bias = bias or Bias()
    _check(values, offsets, queries, keys, activation, bias)
    return reference.attend(values, offsets, queries, keys, activation, divisor, bias)


def _check(
    values: Tensor, offsets: Tensor, queries: Tensor | None, keys: Tensor | None, activation: str, bias: Bias
) -> None:
    if values.dim() != 3 or not values.is_floating_point():
        raise ValueError(f"values must be [N, H, D] of floats, got {list(values.shape)} of {values.dtype}")
    if activation not in ("silu", "softmax"):
        raise ValueError(f"activation must be 'silu' or 'softmax', got {activation!r}")
    if (queries is None) != (keys is None):
        raise ValueError("queries and keys go together: give both or neither")
    if queries is None and not (bias.separate and num_channels(False, bias)):
        raise ValueError("without queries and keys, weights need a bias with separate=True")
    for name, each in (("queries", queries), ("keys", keys)):
        if each is not None and (each.dim() != 3 or each.shape[:2] != values.shape[:2]):
            raise ValueError(f"{name} must be [N, H, K] with N, H of values {list(values.shape)}: {list(each.shape)}")
    if queries is not None and keys is not None and queries.shape != keys.shape:
        raise ValueError(f"queries and keys must have one shape, got {list(queries.shape)} and {list(keys.shape)}")
    _check_bias(values.shape[0], bias)
    _check_offsets(values.shape[0], offsets, bias)


def _check_offsets(num_events: int, offsets: Tensor, bias: Bias) -> None:
    if offsets.dim() != 1 or offsets.shape[0] < 1 or offsets.dtype != torch.int64:
        raise ValueError(f"offsets must be int64 [B + 1], got {list(offsets.shape)} of {offsets.dtype}")
    if not offsets.is_cpu:
        return  # reading them would wait for the device
    lengths = offsets.diff()
    if offsets[0] != 0 or offsets[-1] != num_events or (lengths < 0).any():
        raise ValueError(f"offsets must ascend from 0 to the {num_events} events, got {offsets.tolist()[:8]}…")
    if bias.positions is not None and lengths.numel() and lengths.max() > (bias.positions.shape[0] + 1) // 2:
        raise ValueError(
            f"a sequence has {int(lengths.max())} events, more than the {(bias.positions.shape[0] + 1) // 2} that "
            "positions have weights for; cut it at its old end"
        )


def _check_bias(num_events: int, bias: Bias) -> None:
    if bias.positions is not None and (bias.positions.dim() != 1 or bias.positions.shape[0] % 2 == 0):
        raise ValueError(f"positions must be [2N − 1], got {list(bias.positions.shape)}")
    if bias.time is None:
        return
    if bias.form not in ("buckets", "power", "exponential"):
        raise ValueError(f"form must be 'buckets', 'power' or 'exponential', got {bias.form!r}")
    wanted = NUM_BUCKETS if bias.form == "buckets" else 2
    if bias.time.shape != (wanted,):
        raise ValueError(f"weights of time, as {bias.form}, must be [{wanted}], got {list(bias.time.shape)}")
    if bias.times is None:
        raise ValueError("weights of time need the times of events: give times")
    for name, each in (("times", bias.times), ("query_times", bias.query_times)):
        if each is not None and (each.dtype != torch.int64 or each.shape != (num_events,)):
            raise ValueError(f"{name} must be int64 [{num_events}], got {list(each.shape)} of {each.dtype}")

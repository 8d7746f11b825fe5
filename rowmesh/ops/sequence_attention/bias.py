"""Bias: the part of attention that comes from the distance of two events, in places and in time."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

NUM_BUCKETS = 128
_BUCKET_WIDTH = 0.301
_LONGEST = 2**63 - 1
TimeForm = Literal["buckets", "power", "exponential"]


@dataclass(frozen=True, kw_only=True)
class Bias:
    """Weights by position and by time, shared by all heads; what is None is left out.

    ::

        bias_ij = positions[j − i + N − 1] + w(|s_i − t_j|)

        w(x) = time[⌊ln(max(x, 1)) / 0.301⌋]                buckets
        w(x) = a (x / unit + 1)^−b                          power
        w(x) = a e^(−b x / unit)                            exponential

    Attributes:
        positions: `[2N − 1]`; causal attention reads the first N.
        time: `[128]` of buckets, the last of which has all longer times too; else `[2]`, a and b.
        form: of w.
        unit: seconds, or what times are counted in, of one step of a function; buckets have none.
        times: int64 `[T]`, t: when each event was.
        query_times: int64 `[T]`, s: when what follows each event is asked for; None: at its own time.
        separate: whether position and time are channels of their own, without activation, instead of added to products.
    """

    positions: Tensor | None = None
    time: Tensor | None = None
    form: TimeForm = "buckets"
    unit: float = 1.0
    times: Tensor | None = None
    query_times: Tensor | None = None
    separate: bool = False


@functools.cache
def bucket_starts() -> Tensor:
    """int64 `[B]`: the shortest time of every bucket that an int64 can be in, below 128; those from 1 up ascend.

    Kernels compare with these, so that all have the same buckets, whatever their logarithm rounds to.
    """
    starts = [0]
    for bucket in range(1, NUM_BUCKETS):
        guess = math.exp(_BUCKET_WIDTH * bucket)
        if guess >= _LONGEST:
            break
        start = max(int(guess) - 2, 1)
        while math.floor(math.log(start) / _BUCKET_WIDTH) < bucket:
            start += 1
        starts.append(start)
    return torch.tensor(starts)


def buckets(durations: Tensor) -> Tensor:
    """int64 buckets of durations of any shape and sign.

    >>> buckets(torch.tensor([0, 1, 2, -2, 60, 86400]))
    tensor([ 0,  0,  2,  2, 13, 37])
    """
    starts = bucket_starts().to(durations.device)
    return torch.searchsorted(starts, durations.abs(), right=True).sub_(1)


def weights_of_time(bias: Bias, durations: Tensor) -> Tensor:
    """The weights w of durations `[…]`; by torch's own functions, so that it has gradients."""
    assert bias.time is not None
    if bias.form == "buckets":
        return bias.time[buckets(durations)]
    steps = durations.abs().to(bias.time.dtype) / bias.unit
    a, b = bias.time
    if bias.form == "power":
        return a * torch.exp(-b * torch.log1p(steps))
    return a * torch.exp(-b * steps)

"""The block that SASRec, HSTU and FuXi are stacks of, by options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowmesh.ops.sequence_attention import NUM_BUCKETS, Activation, Bias, Layout, TimeForm, attend

Norm = Literal["layer", "rms"]
_STD = 0.02  # of weights, as the implementations of HSTU and FuXi start them
_DECAY = 0.3  # per unit of what a function of time decays by, to begin with


@dataclass(frozen=True, kw_only=True)
class BlockForm:
    """The parts of a kind of block.

    Attributes:
        norm: before each sublayer, and of gated attention.
        products: whether events attend to each other by queries and keys.
        activation: of these.
        gated: whether one matrix gives U, V, Q, K with SiLU, and attention, normalized, is multiplied by U and goes
            through a matrix. Else Q, K, V are plain products and attention is added as it is.
        positions: whether there are weights by relative position.
        time: by time; None: there are none.
        separate: whether these are channels of their own.
        feed_forward: the second sublayer; None: there is none.
    """

    norm: Norm = "rms"
    products: bool = True
    activation: Activation = "silu"
    gated: bool = True
    positions: bool = True
    time: TimeForm | None = "buckets"
    separate: bool = True
    feed_forward: Literal["relu", "swiglu"] | None = "swiglu"

    @property
    def channels(self) -> int:
        """C: matrices of weights that share V."""
        return self.products + self.positions + (self.time is not None) if self.separate else 1


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Numbers of a block.

    Attributes:
        dim: D of what goes in and out.
        num_heads: H; queries, keys and values of a head have D / H elements.
        max_length: N, of the table of positions.
        ffn_dim: width of the second sublayer.
        divisor: of silu; None: the length of the sequence.
        time_unit: of a function of time, in what times are counted in.
        dropout: probability.
        eps: of norms.
    """

    dim: int
    num_heads: int
    max_length: int
    ffn_dim: int
    divisor: float | None
    time_unit: float
    dropout: float
    eps: float


@dataclass(frozen=True)
class Clock:
    """When events were, and when what follows them is asked for; int64 `[T]` both."""

    times: Tensor | None = None
    query_times: Tensor | None = None


class Block(nn.Module):
    """One block: attention and its residual, then, where there is one, a feed-forward layer and its residual.

    ::

        U, V, Q, K = silu(norm(x) W)                        gated; else V, Q / √K, K = norm(x) W
        A = attend(V, Q, K)                                 C channels, side by side
        x = x + dropout(norm(A) ⊙ U) W_out                  gated; else x + dropout(A)
        x = x + dropout(ffn(norm(x)))
    """

    def __init__(self, form: BlockForm, sizes: BlockSizes) -> None:
        super().__init__()
        self.form, self.sizes = form, sizes
        dim, wide = sizes.dim, form.channels * sizes.dim
        self.widths = ([wide] if form.gated else []) + [dim] * (3 if form.products else 1)
        self.norm = _norm(form.norm, dim, sizes.eps)
        self.project = _linear(dim, sum(self.widths))
        self.positions = nn.Parameter(torch.randn(2 * sizes.max_length - 1) * _STD) if form.positions else None
        self.time = _weights_of_time(form.time)
        self.norm_attention = _norm(form.norm, wide, sizes.eps) if form.gated else None
        self.out = _linear(wide, dim) if form.gated else None
        self.norm_ffn = _norm(form.norm, dim, sizes.eps) if form.feed_forward else None
        self.ffn = _FEED_FORWARD[form.feed_forward](dim, sizes.ffn_dim, sizes.dropout) if form.feed_forward else None
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, offsets: Tensor | Layout, clock: Clock) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        x = x + self._attention(self.norm(x), offsets, clock)
        if self.ffn is not None and self.norm_ffn is not None:
            x = x + self.dropout(self.ffn(self.norm_ffn(x)))
        return x

    def _attention(self, x: Tensor, offsets: Tensor | Layout, clock: Clock) -> Tensor:
        projected = self.project(x)
        if not self.form.gated:
            return self.dropout(self._attend(list(projected.split(self.widths, dim=1)), offsets, clock))
        gate, *others = F.silu(projected).split(self.widths, dim=1)
        assert self.norm_attention is not None
        assert self.out is not None
        return self.out(self.dropout(self.norm_attention(self._attend(others, offsets, clock)) * gate))

    def _attend(self, projected: list[Tensor], offsets: Tensor | Layout, clock: Clock) -> Tensor:
        """`[T, C D]` from values and, where there are products, queries and keys."""
        values, *others = (each.unflatten(1, (self.sizes.num_heads, -1)) for each in projected)
        queries, keys = others or (None, None)
        if queries is not None and self.form.activation == "softmax":
            queries = queries * queries.shape[-1] ** -0.5
        bias = Bias(
            positions=self.positions,
            time=self.time,
            form=self.form.time or "buckets",
            unit=self.sizes.time_unit,
            times=clock.times,
            query_times=clock.query_times,
            separate=self.form.separate,
        )
        found = attend(
            values,
            offsets,
            queries=queries,
            keys=keys,
            activation=self.form.activation,
            divisor=self.sizes.divisor,
            bias=bias,
        )
        return found.flatten(1)


class _ReLU(nn.Module):
    """`dropout(relu(x W_1 + b_1)) W_2 + b_2`."""

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = _linear(dim, hidden, bias=True), _linear(hidden, dim, bias=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(F.relu(self.first(x))))


class _SwiGLU(nn.Module):
    """`(silu(x W_1) ⊙ x W_2) W_3`; W_1 and W_2 are one matrix."""

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = _linear(dim, 2 * hidden), _linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, linear = self.first(x).chunk(2, dim=1)
        return self.second(F.silu(gate) * linear)


_FEED_FORWARD = {"relu": _ReLU, "swiglu": _SwiGLU}


def _norm(kind: Norm, dim: int, eps: float) -> nn.Module:
    return nn.LayerNorm(dim, eps=eps) if kind == "layer" else nn.RMSNorm(dim, eps=eps)


def _linear(fan_in: int, fan_out: int, *, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(fan_in, fan_out, bias=bias)
    nn.init.xavier_uniform_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def _weights_of_time(form: TimeForm | None) -> nn.Parameter | None:
    if form is None:
        return None
    return nn.Parameter(torch.randn(NUM_BUCKETS) * _STD if form == "buckets" else torch.tensor([1.0, _DECAY]))

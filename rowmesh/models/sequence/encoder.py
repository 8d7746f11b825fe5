"""SequenceEncoder: SASRec, HSTU, FuXi-α and FuXi-β on packed events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from rowmesh.errors import ConfigurationError
from rowmesh.models.sequence.block import Block, BlockForm, BlockSizes, Clock
from rowmesh.ops.sequence_attention import Layout, TimeForm, check_offsets, check_times

Kind = Literal["sasrec", "hstu", "fuxi_alpha", "fuxi_beta"]
Scale = Literal["longest", "actual"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_DAY = 86400.0
_FORMS: dict[Kind, BlockForm] = {
    "sasrec": BlockForm(
        norm="layer",
        activation="softmax",
        gated=False,
        positions=False,
        time=None,
        separate=False,
        feed_forward="relu",
    ),
    "hstu": BlockForm(norm="layer", separate=False, feed_forward=None),
    "fuxi_alpha": BlockForm(),
    "fuxi_beta": BlockForm(products=False, time="power"),
}


class SequenceEncoder(nn.Module):
    """Represents a user after each event, from the vectors of the events so far.

    The four kinds are stacks of one block (`rowmesh.models.sequence.block`), causal, without padding:

    - `sasrec`: a learned vector of each position is added; softmax attention, feed-forward layer, LayerNorm at the end.
    - `hstu`: `silu(Q Kᵀ + bias) / N · V`, normalized, times U; bias by relative position and by buckets of time.
    - `fuxi_alpha`: products, positions and time are channels that share V; SwiGLU.
    - `fuxi_beta`: no products; time is a function, `a (Δt + 1)^−b` or `a e^(−b Δt)`.

    Positions count from a user's first event in the batch. Sequences longer than `max_length` are to be cut at their
    old end. Tables are elsewhere: `vectors`, and those of side features, are what they gave.

    Args:
        kind: which of the four.
        dim: D of the vectors.
        num_blocks: blocks in the stack.
        num_heads: heads of attention; divides D.
        max_length: N, the most events of a user.
        dropout: probability; of the vectors, and in each block.
        scale: what silu attention is divided by: N ("longest", as HSTU's implementation has it), or the number of
            events of the user ("actual"). Published results differ by it. `sasrec` and `fuxi_beta` have no silu
            attention, and refuse "actual".
        request_time: whether durations end when the next event is asked for, `s_i − t_j`, as in HSTU's implementation;
            else at the event itself, `t_i − t_j`.
        ffn_dim: width of feed-forward layers, which `hstu` has none of; default D of `sasrec`, 2 D of FuXi.
        time: of `fuxi_beta`, the function; "power" or "exponential".
        time_unit: of `fuxi_beta`, what Δt is counted in, in the unit of `times`; default 1 of "power", a day of
            "exponential". Buckets have no unit.
        learned_positions: whether a learned vector of each position is added; default of `sasrec` alone.
        eps: of norms.

    Raises:
        ConfigurationError: a size or option cannot work.

    Example:
        >>> encoder = SequenceEncoder("hstu", dim=8, num_blocks=2, num_heads=2, max_length=50)
        >>> offsets = torch.tensor([0, 3, 5])  # of two users: events 0 to 2, and 3 and 4
        >>> times = torch.tensor([0, 60, 3600, 10, 86400])
        >>> encoder(torch.randn(5, 8), offsets, times).shape
        torch.Size([5, 8])

    Source: Kang and McAuley, "Self-Attentive Sequential Recommendation" (2018); Zhai et al. (arXiv:2402.17152); Ye et
    al., FuXi-α (arXiv:2502.03036) and FuXi-β.
    Differs: the vectors of SASRec are not multiplied by √D, and its attention has no dropout of weights; FuXi's
    channels stand one after the other, not by head.
    """

    def __init__(
        self,
        kind: Kind,
        dim: int,
        num_blocks: int,
        num_heads: int,
        max_length: int,
        dropout: float = 0.0,
        scale: Scale = "longest",
        request_time: bool = True,
        *,
        ffn_dim: int | None = None,
        time: TimeForm | None = None,
        time_unit: float | None = None,
        learned_positions: bool | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        _check(kind, dim, num_blocks, num_heads, max_length, dropout, scale, ffn_dim, time, time_unit)
        self.kind, self.dim, self.max_length, self.request_time = kind, dim, max_length, request_time
        self.form = _form(kind, time)
        sizes = BlockSizes(
            dim=dim,
            num_heads=num_heads,
            max_length=max_length,
            ffn_dim=ffn_dim or (dim if kind == "sasrec" else 2 * dim),
            divisor=float(max_length) if scale == "longest" else None,
            time_unit=time_unit or (_DAY if self.form.time == "exponential" else 1.0),
            dropout=dropout,
            eps=eps,
        )
        has_positions = kind == "sasrec" if learned_positions is None else learned_positions
        self.positions = nn.Parameter(torch.randn(max_length, dim) * 0.02) if has_positions else None
        self.blocks = nn.ModuleList(Block(self.form, sizes) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim, eps=eps) if kind == "sasrec" else None
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        vectors: Tensor,
        offsets: Tensor,
        times: Tensor | None = None,
        request_times: Tensor | None = None,
        side: Sequence[Tensor] = (),
    ) -> Tensor:
        """`[T, D]`, the representation after each event, from which the next is predicted.

        Args:
            vectors: `[T, D]`, of the events of B users, one user after the other, oldest first.
            offsets: int64 `[B + 1]`, where each user begins, and T.
            times: int64 `[T]`, when each event was; all kinds but `sasrec` need them.
            request_times: int64 `[T]`, when the event after each is asked for. Default: when it was, and for a user's
                last event that one's own time. Read with `request_time` alone.
            side: `[T, D]` each, of what else is known of the events once they happened, such as what the user did;
                added to the vectors.

        Raises:
            ValueError: shapes do not fit, times are missing, or a user has more than `max_length` events.
        """
        self._check_batch(vectors, offsets, times, request_times)
        x = vectors
        for number, each in enumerate(side):
            if each.shape != vectors.shape:
                raise ValueError(f"side[{number}] must be {list(vectors.shape)} as vectors are, got {list(each.shape)}")
            x = x + each
        if self.positions is not None:
            x = x + self.positions[_places(offsets, x.shape[0])]
        x = self.dropout(x)
        clock = self._clock(offsets, times, request_times)
        layout = Layout.of(offsets) if offsets.is_cpu and not torch.compiler.is_compiling() else offsets
        for block in self.blocks:
            x = block(x, layout, clock)
        return x if self.norm is None else self.norm(x)

    def _clock(self, offsets: Tensor, times: Tensor | None, request_times: Tensor | None) -> Clock:
        if self.form.time is None or times is None:
            return Clock()
        if not self.request_time:
            return Clock(times)
        return Clock(times, _next_times(times, offsets) if request_times is None else request_times)

    def _check_batch(
        self, vectors: Tensor, offsets: Tensor, times: Tensor | None, request_times: Tensor | None
    ) -> None:
        if vectors.dim() != 2 or vectors.shape[1] != self.dim:
            raise ValueError(f"vectors must be [T, {self.dim}], got {list(vectors.shape)}")
        if self.form.time is not None and times is None:
            raise ValueError(f"{self.kind} weighs events by time: give times, int64 [{vectors.shape[0]}]")
        check_offsets(vectors.shape[0], offsets)
        check_times(vectors.shape[0], times=times, request_times=request_times)
        if offsets.is_cpu and offsets.numel() > 1 and (longest := int(offsets.diff().max())) > self.max_length:
            raise ValueError(
                f"a user has {longest} events, more than max_length {self.max_length}: cut them at the old end, or "
                "raise max_length"
            )


def _places(offsets: Tensor, num_events: int) -> Tensor:
    """For each event, how many events of its user come before it."""
    index = torch.arange(num_events, device=offsets.device)
    return index - offsets[:-1].repeat_interleave(offsets.diff(), output_size=num_events)


def _next_times(times: Tensor, offsets: Tensor) -> Tensor:
    """When the event after each was; of a user's last event its own time."""
    following = times.roll(-1)
    last = offsets[1:][offsets.diff() > 0] - 1
    following[last] = times[last]
    return following


def _form(kind: Kind, time: TimeForm | None) -> BlockForm:
    form = _FORMS[kind]
    return form if time is None else BlockForm(**{**vars(form), "time": time})


def _check(
    kind: str,
    dim: int,
    num_blocks: int,
    num_heads: int,
    max_length: int,
    dropout: float,
    scale: str,
    ffn_dim: int | None,
    time: str | None,
    time_unit: float | None,
) -> None:
    if kind not in KINDS:
        raise ConfigurationError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    sizes = {"dim": dim, "num_blocks": num_blocks, "num_heads": num_heads, "max_length": max_length}
    for name, size in (sizes | {"ffn_dim": 1 if ffn_dim is None else ffn_dim}).items():
        if size < 1:
            raise ConfigurationError(f"{kind}: {name} must be positive, got {size}")
    if dim % num_heads:
        raise ConfigurationError(f"{kind}: dim {dim} does not divide by {num_heads} heads; change one of them")
    if not 0 <= dropout < 1:
        raise ConfigurationError(f"{kind}: dropout must be at least 0 and below 1, got {dropout}")
    if scale not in get_args(Scale):
        raise ConfigurationError(f"{kind}: scale must be 'longest' or 'actual', got {scale!r}")
    form = _FORMS[kind]
    if scale == "actual" and not (form.products and form.activation == "silu"):
        raise ConfigurationError(f"{kind}: scale is of silu attention, and {kind} has none; leave it out")
    if time is not None and (kind != "fuxi_beta" or time not in ("power", "exponential")):
        raise ConfigurationError(f"{kind}: time is an option of fuxi_beta alone, 'power' or 'exponential': {time!r}")
    if time_unit is not None and time_unit <= 0:
        raise ConfigurationError(f"{kind}: time_unit must be positive, got {time_unit}")
    if time_unit is not None and kind != "fuxi_beta":
        raise ConfigurationError(f"{kind}: time_unit is of functions of time, of fuxi_beta alone; leave it out")
    if ffn_dim is not None and kind == "hstu":
        raise ConfigurationError("hstu: ffn_dim is of feed-forward layers, and hstu has none; leave it out")

"""Causal attention of packed sequences of events, with weights by position and time.

Source: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations" (arXiv:2402.17152); the channels are those of FuXi-α (arXiv:2502.03036).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rowmesh.ops.gpu import has_triton
from rowmesh.ops.sequence_attention import cpu, reference
from rowmesh.ops.sequence_attention.bias import NUM_BUCKETS, Bias, TimeForm, bucket_starts, buckets
from rowmesh.ops.sequence_attention.layout import Layout
from rowmesh.ops.sequence_attention.reference import num_channels

__all__ = [
    "NUM_BUCKETS",
    "Activation",
    "Bias",
    "Layout",
    "TimeForm",
    "attend",
    "bucket_starts",
    "buckets",
    "check_offsets",
    "check_times",
    "num_channels",
]
Activation = Literal["silu", "softmax"]
TIMES_END = 1 << 62


def attend(
    values: Tensor,
    offsets: Tensor | Layout,
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
        offsets: int64 `[B + 1]`, where each sequence begins, and N. A sequence may be empty. Where several calls have
            the same, `Layout.of(offsets)` saves them from grouping sequences again.
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
    layout, offsets = (offsets, offsets.offsets) if isinstance(offsets, Layout) else (None, offsets)
    _check(values, offsets, queries, keys, activation, bias)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    tensors = [None if each is None else each.to(dtype) for each in (values, queries, keys, bias.positions, bias.time)]
    with torch.autocast(values.device.type, enabled=False):
        if not _can_take(tensors, offsets):
            bias = replace(bias, positions=tensors[3], time=tensors[4])
            return reference.attend(values.to(dtype), offsets, tensors[1], tensors[2], activation, divisor, bias)
        if values.is_cpu:
            found: Any = _Padded.apply(*tensors, layout or Layout.of(offsets), activation, divisor, bias)
        else:
            found = _Packed.apply(*tensors, offsets, activation, divisor, bias)
        return found


class _Padded(torch.autograd.Function):
    """On a CPU."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        queries: Tensor | None,
        keys: Tensor | None,
        positions: Tensor | None,
        time: Tensor | None,
        layout: Layout,
        activation: Activation,
        divisor: float | None,
        bias: Bias,
    ) -> Tensor:
        ctx.save_for_backward(values, queries, keys, positions, time)
        ctx.about = layout, activation, divisor, bias
        call = _call(values, queries, keys, positions, time, *ctx.about)
        return cpu.forward(call).index_select(0, layout.places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layout, activation, divisor, bias = ctx.about
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (*_differentiable(tensors, grads[0], layout.offsets, activation, divisor, bias), *[None] * 4)
        grad = grads[0].index_select(0, layout.index)
        grad[layout.padding] = 0
        found = cpu.backward(_call(*tensors, *ctx.about), grad)
        events = [
            None if each is None else each.index_select(0, layout.places)
            for each in (found.values, found.queries, found.keys)
        ]
        tables = [None if each is None else each.to(grad.dtype) for each in (found.positions, found.time)]
        return (*events, *tables, *[None] * 4)


class _Packed(torch.autograd.Function):
    """On a GPU."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        queries: Tensor | None,
        keys: Tensor | None,
        positions: Tensor | None,
        time: Tensor | None,
        offsets: Tensor,
        activation: Activation,
        divisor: float | None,
        bias: Bias,
    ) -> Tensor:
        out, sums = _gpu().forward(
            *_arguments((values, queries, keys, positions, time), offsets, activation, divisor, bias)
        )
        kept = (None, None) if sums is None else (out, sums)
        ctx.save_for_backward(values, queries, keys, positions, time, *kept)
        ctx.about = offsets, activation, divisor, bias
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, sums = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (*_differentiable(tuple(tensors), grads[0], *ctx.about), *[None] * 4)
        found = _gpu().backward(*_arguments(tuple(tensors), *ctx.about), out, sums, grads[0].contiguous())
        return (*(None if each is None else each.to(grads[0].dtype) for each in found), *[None] * 4)


def _arguments(
    tensors: tuple[Tensor | None, ...], offsets: Tensor, activation: Activation, divisor: float | None, bias: Bias
) -> tuple[Any, ...]:
    """The arguments of the GPU's functions: contiguous, without gradients of their own."""
    floats = [None if each is None else each.detach().contiguous() for each in tensors]
    times, asked = (None if each is None else each.contiguous() for each in (bias.times, bias.query_times))
    bias = replace(bias, positions=floats[3], time=floats[4], times=times, query_times=asked)
    return floats[0], offsets.contiguous(), floats[1], floats[2], activation, divisor, bias


def _gpu() -> Any:
    from rowmesh.ops.sequence_attention import cuda

    return cuda


def _call(
    values: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    positions: Tensor | None,
    time: Tensor | None,
    layout: Layout,
    activation: Activation,
    divisor: float | None,
    bias: Bias,
) -> cpu.Call:
    """With events padded, and nothing that has a gradient."""
    padded = [
        None if each is None else each.detach().index_select(0, layout.index)
        for each in (values, queries, keys, bias.times, bias.query_times)
    ]
    positions, time = (None if each is None else each.detach().contiguous() for each in (positions, time))
    bias = replace(bias, positions=positions, time=time, times=padded[3], query_times=padded[4])
    assert padded[0] is not None
    return cpu.Call(layout, padded[0], padded[1], padded[2], activation, divisor, bias)


def _differentiable(
    tensors: tuple[Tensor | None, ...],
    grad: Tensor,
    offsets: Tensor,
    activation: Activation,
    divisor: float | None,
    bias: Bias,
) -> list[Tensor | None]:
    """Gradients that have gradients, by the reference."""
    values, queries, keys, positions, time = tensors
    assert values is not None
    wanted = [each for each in tensors if each is not None and each.requires_grad]
    bias = replace(bias, positions=positions, time=time)
    out = reference.attend(values, offsets, queries, keys, activation, divisor, bias)
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [None if each is None or not each.requires_grad else next(found) for each in tensors]


def _can_take(tensors: list[Tensor | None], offsets: Tensor) -> bool:
    """Whether kernels can; plain torch is for other devices, wide heads on a GPU, compiled models and `torch.func`."""
    there = [each for each in tensors if each is not None]
    return (
        all(type(each) in (Tensor, torch.nn.Parameter) and each.device == offsets.device for each in there)
        and (offsets.is_cpu or (offsets.is_cuda and has_triton() and _fits(*tensors[:2])))
        and there[0].numel() > 0
        and not torch.compiler.is_compiling()
        and not torch._C._get_tracing_state()
        and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]
        and forward_ad._current_level < 0
    )


def _fits(*heads: Tensor | None) -> bool:
    return all(each is None or each.shape[2] <= _gpu().MOST_COLUMNS for each in heads)


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
    check_offsets(values.shape[0], offsets)
    if bias.positions is not None and offsets.is_cpu:
        longest = int(offsets.diff().max()) if offsets.numel() > 1 else 0
        most = (bias.positions.shape[0] + 1) // 2
        if longest > most:
            raise ValueError(
                f"a sequence has {longest} events, more than the {most} that positions have weights for; cut it at its "
                "old end"
            )


def check_offsets(num_events: int, offsets: Tensor) -> None:
    """Raises ValueError where offsets do not cut so many events into sequences; a GPU's are not read."""
    if offsets.dim() != 1 or offsets.shape[0] < 1 or offsets.dtype != torch.int64:
        raise ValueError(f"offsets must be int64 [B + 1], got {list(offsets.shape)} of {offsets.dtype}")
    if not offsets.is_cpu:
        return  # reading them would wait for the device
    if offsets[0] != 0 or offsets[-1] != num_events or (offsets.diff() < 0).any():
        raise ValueError(f"offsets must ascend from 0 to the {num_events} events, got {offsets.tolist()[:8]}…")


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
    check_times(num_events, times=bias.times, query_times=bias.query_times)


def check_times(num_events: int, **times: Tensor | None) -> None:
    """Raises ValueError where times, by name, are not those of so many events; a GPU's values are not read.

    Kernels subtract times: from ±2⁶² on a difference could overflow. A missing time, NaT, is one of these.
    """
    for name, each in times.items():
        if each is None:
            continue
        if each.dtype != torch.int64 or each.shape != (num_events,):
            raise ValueError(f"{name} must be int64 [{num_events}], got {list(each.shape)} of {each.dtype}")
        if each.is_cpu and num_events and not torch.compiler.is_compiling():
            for bound in map(int, each.aminmax()):
                if abs(bound) >= TIMES_END:
                    raise ValueError(
                        f"{name} must be between −2**62 and 2**62, got {bound}"
                        f"{', which is NaT, a missing time' if bound == -(2**63) else ''}; leave such events out"
                    )

"""Update of touched slices on a GPU: one pass over a core that skips slices no rank read.

To the bit what `rowmesh.ops.tensor_train.cuda.update` does with the same gradients. See [Note: GPU kernels] in
`rowmesh.ops.gpu`.
"""

# Triton's language is not typed in a way that a checker could follow.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import Signature, ceil_div, check, launch, next_power_of_2
from rowmesh.ops.merge_update.cuda import change

_MOST_COLUMNS = 1024  # elements of a slice that a program changes


@triton.jit
def _update_slices(
    gradient,
    touched,
    core,
    state1,
    state2,
    lr: tl.float64,
    scaling: tl.float64,
    eps: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    rest1: tl.float64,
    rest2: tl.float64,
    correction: tl.float64,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    RULE: tl.constexpr,
):
    """A part of a slice and its states, where the slice's element of `touched` is not 0."""
    slice_ = tl.program_id(0) + tl.arange(0, 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_touched = tl.load(touched + slice_) != 0
    inside = is_touched[:, None] & (column < SIZE)[None, :]
    at = slice_.to(tl.int64)[:, None] * SIZE + column[None, :]
    total = tl.load(gradient + at, mask=inside, other=0)
    total *= tl.full((), scaling, total.dtype)
    change(
        total,
        core,
        state1,
        state2,
        at,
        inside,
        slice_,
        is_touched,
        lr,
        eps,
        beta1,
        beta2,
        rest1,
        rest2,
        correction,
        0.0,
        1,
        total.dtype,
        RULE,
        False,
    )


def update_slices(
    core: Tensor, states: Sequence[Tensor], gradient: Tensor, touched: Tensor, rule: str, numbers: tuple[float, ...]
) -> None:
    """See `rowmesh.ops.update_slices.update_slices`. Source: EL-Rec (SC'22) §III-B "Fused TT core Update"."""
    for name, tensor in (("core", core), ("gradient", gradient), *(("state", kept) for kept in states)):
        check(name, tensor, (core.dtype,), core.dim(), core.device)
    check("touched", touched, (core.dtype,), 1, core.device)
    lr, scaling, eps, beta1, beta2, correction = numbers
    state1, state2 = (*states, None, None)[:2]
    size = core[0].numel()
    columns = min(next_power_of_2(size), _MOST_COLUMNS)
    launch(
        _update_slices,
        (len(core), ceil_div(size, columns)),
        gradient,
        touched,
        core,
        state1,
        state2,
        lr,
        scaling,
        eps,
        beta1,
        beta2,
        1.0 - beta1,
        1.0 - beta2,
        correction,
        SIZE=size,
        COLUMNS=columns,
        RULE=rule,
    )


def _signature(storage: str, rule: str, num_states: int) -> Signature:
    pointers = " ".join([f"*{storage}"] * (3 + num_states))
    constants = {"SIZE": 16384, "COLUMNS": _MOST_COLUMNS, "RULE": rule}
    return Signature(
        _update_slices, pointers + " fp64" * 8, constants | dict.fromkeys(["state1", "state2"][num_states:])
    )


SIGNATURES = (_signature("fp32", "sgd", 0), _signature("fp32", "adam", 2), _signature("fp64", "adagrad", 1))

"""Initial values on a GPU, written straight to where rows are kept. See [Note: GPU kernels] in `rowmesh.ops.gpu`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import Signature, ceil_div, check, launch

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
DISTRIBUTIONS = ("uniform", "constant")  # with no logarithm or cosine, of which no two libraries have equal bits
_BLOCK = 1024
_BLOCK_ROWS = 1 << 16


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


# Numbers come in tensors: as arguments, floats would be rounded to 32 bits.
@triton.jit(do_not_specialize=("num_elements",))
def _fill(out, integers, floats, num_elements, DIM: tl.constexpr, UNIFORM: tl.constexpr, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.load(floats)
    value = tl.zeros([BLOCK], tl.float64) + low
    if UNIFORM:
        key, first, stride = tl.load(integers), tl.load(integers + 1), tl.load(integers + 2)
        counter = (first + element // DIM * stride) * DIM + element % DIM
        z = _mix(key.to(tl.uint64) + (counter.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
        value = low + (tl.load(floats + 1) - low) * ((z >> 11).to(tl.float64) * 1.1102230246251565e-16)
    tl.store(out + element, value.to(out.dtype.element_ty), mask=element < num_elements)


def initialize(out: Tensor, key: int, *, first: int, stride: int, distribution: str, a: float, b: float) -> None:
    """Writes the initial values of rows first, first + stride, … into `out`: the bits that a CPU computes.

    Args:
        out: `[n, D]`, float32, float64 or bfloat16, contiguous.
        key: the table's 64-bit key.
        first, stride: which rows of the table `out` holds.
        distribution: "uniform" in [a, b), or "constant" a.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a layout does not fit, or the distribution is another.

    Example:
        >>> rows = torch.empty(2, 4, device=device)
        >>> initialize(rows, 7, first=1, stride=2, distribution="uniform", a=-1.0, b=1.0)
        >>> third = torch.empty(1, 4, device=device)
        >>> initialize(third, 7, first=3, stride=1, distribution="uniform", a=-1.0, b=1.0)
        >>> bool((rows[1] == third[0]).all())
        True
    """
    check("out", out, DTYPES, 2, out.device)
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
    signed = key - (1 << 64) if key >> 63 else key
    floats = torch.tensor([a, b], dtype=torch.float64, device=out.device)
    if out.dtype != torch.bfloat16:
        _initialize(out, torch.tensor([signed, first, stride], device=out.device), floats, distribution)
        return
    for begin in range(0, len(out), _BLOCK_ROWS):  # rounded twice, as on a CPU
        part = out[begin : begin + _BLOCK_ROWS]
        values = torch.empty(part.shape, dtype=torch.float32, device=out.device)
        integers = torch.tensor([signed, first + begin * stride, stride], device=out.device)
        _initialize(values, integers, floats, distribution)
        part.copy_(values)


def _initialize(out: Tensor, integers: Tensor, floats: Tensor, distribution: str) -> None:
    launch(
        _fill,
        ceil_div(out.numel(), _BLOCK),
        out,
        integers,
        floats,
        out.numel(),
        DIM=out.shape[1],
        UNIFORM=distribution == "uniform",
        BLOCK=_BLOCK,
    )


SIGNATURES = tuple(
    Signature(_fill, f"*{storage} *i64 *fp64 i64", {"DIM": dim, "UNIFORM": uniform, "BLOCK": _BLOCK})
    for storage, dim, uniform in (("fp32", 64, True), ("fp64", 3, True), ("fp32", 128, False))
)

"""Linear layer on a CPU: oneDNN's matrix products, which torch has beside those of its BLAS.

Torch multiplies float32 matrices by the BLAS that it was built with: MKL on x86, which takes a slow path on processors
of AMD. oneDNN is in the same wheel, and torch's own compiler reaches it by the operator that is used here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rowmesh.ops.linear import reference
from rowmesh.ops.linear.caches import bound_caches
from rowmesh.ops.linear.choices import Passes
from rowmesh.ops.simd import FLOAT32, add, kernel, load_f32, load_row, store_f32, store_row, transpose_tile, zero_row


@kernel
def _transpose(source, rows, columns, target, sums):
    """`[rows, columns]` to `[columns, rows]` of float32, and the sums of columns; see [Note: transposes]."""
    full_rows, full_columns = rows - rows % 16, columns - columns % 16
    for j in range(full_columns, columns):
        store_f32(sums + 4 * j, 0.0)
    for j in range(0, full_columns, 16):
        total = zero_row(16, FLOAT32)
        for i in range(0, full_rows, 16):
            tile = source + 4 * (i * columns + j)
            part = load_row(tile, 16, FLOAT32)
            for row in range(1, 16):
                part = add(part, load_row(tile + 4 * row * columns, 16, FLOAT32))
            total = add(total, part)
            transpose_tile(tile, 4 * columns, target + 4 * (j * rows + i), 4 * rows, 16, FLOAT32)
        store_row(sums + 4 * j, total, FLOAT32)
    for i in range(rows):
        for j in range(0 if i >= full_rows else full_columns, columns):
            value = load_f32(source + 4 * (i * columns + j))
            store_f32(sums + 4 * j, load_f32(sums + 4 * j) + value)
            store_f32(target + 4 * (j * rows + i), value)


def transpose(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, N]` as `[N, B]` in memory of its own, and its sum over B `[N]`; both float32, contiguous.

    [Note: transposes]
    oneDNN's operator makes its first argument contiguous by a copy of torch's, which for a transposed one takes as long
    as a third of the product. This one moves 16 × 16 elements at a time in vector registers, and sums what it reads.
    """
    rows, columns = x.shape
    out, sums = x.new_empty(columns, rows), x.new_empty(columns)
    _transpose(x.data_ptr(), rows, columns, out.data_ptr(), sums.data_ptr())
    return out, sums


def weight_product(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """`[B, N]` and `[B, K]` to the gradient of the weight `[N, K]`, and that of the bias `[N]` if it came about.

    Whichever of both is smaller is transposed.
    """
    (samples, outputs), inputs = grad.shape, x.shape[1]
    if inputs * (samples + outputs) < samples * outputs:
        return product(transpose(x)[0], grad.t()).t().contiguous(), None
    turned, sums = transpose(grad)
    return product(turned, x.t()), sums


def gradients(grad: Tensor, x: Tensor, weight: Tensor, passes: Passes) -> tuple[Tensor, Tensor]:
    """`[B, K]` and `[N, K]`: the gradients of x and weight, from that of the result `[B, N]`, which is contiguous."""
    of_x = product(grad, weight.t()) if passes.input else reference.input_gradient(grad, weight)
    return of_x, weight_product(grad, x)[0] if passes.weight else reference.weight_gradient(grad, x)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x Wᵀ + b` by oneDNN, whose own ReLU behind it saves no time and is left out.

    Args:
        x: `[B, K]` float32; as it is or transposed, contiguous.
        weight: `[N, K]`, likewise.
        bias: `[N]`, or None.
    """
    operator: Any = torch.ops.mkldnn._linear_pointwise  # torch's compiler calls it so, in every release since 2.0
    return operator(x, weight, bias, "none", [], "")


@functools.cache
def obstacle() -> str | None:
    """Why oneDNN cannot be used here, or None; the first product of this process, where nobody else had one."""
    bound_caches()
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return f"torch {torch.__version__} has no operator for it"
    x, weight, bias = torch.arange(12.0).view(3, 4), torch.arange(8.0).view(2, 4), torch.tensor([1.0, -1.0])
    grad = torch.arange(6.0).view(3, 2)
    try:
        pairs = (
            (product(x, weight, bias), reference.linear(x, weight, bias)),
            (product(grad, weight.t()), reference.input_gradient(grad, weight)),
            (product(grad.t().contiguous(), x.t()), reference.weight_gradient(grad, x)),
        )
    except (RuntimeError, TypeError) as error:
        return f"torch's operator for it fails: {error}"
    is_right = all(torch.equal(found, expected) for found, expected in pairs)  # whole numbers: without rounding
    return None if is_right else "torch's operator for it computes something else"


class LinearFunction(torch.autograd.Function):
    """A linear layer of which each matrix product is by oneDNN or by torch's own; see `rowmesh.ops.linear.linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, passes: Passes) -> Tensor:
        """`[B, K]` to `[B, N]`."""
        y = product(x, weight, bias) if passes.forward else F.linear(x, weight, bias)
        y = y.relu_() if relu else y
        ctx.passes, ctx.has_relu = passes, relu
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, y if relu else None)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Gradients of x, weight and bias, if asked for; by torch's own where they are differentiated in turn."""
        grad = grads[0]
        x, weight, y = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        passes = Passes(False, False, False) if torch.is_grad_enabled() else ctx.passes
        if ctx.has_relu:
            grad = torch.ops.aten.threshold_backward(grad, y, 0)
        grad = grad.contiguous()
        of_x = of_weight = of_bias = None
        if needs_x:
            of_x = product(grad, weight.t()) if passes.input else reference.input_gradient(grad, weight)
        if needs_weight:
            if passes.weight:
                of_weight, of_bias = weight_product(grad, x)
            else:
                of_weight = reference.weight_gradient(grad, x)
        if needs_bias and of_bias is None:
            of_bias = grad.sum(0)
        return of_x, of_weight, of_bias if needs_bias else None, None, None

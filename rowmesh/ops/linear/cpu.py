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
from rowmesh.ops.linear.choices import Passes


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
    """Why oneDNN cannot be used here, or None."""
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
            (product(grad.t(), x.t()), reference.weight_gradient(grad, x)),
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
        """Of x, weight and bias, those that are asked for; by torch's own where they are differentiated in turn."""
        grad = grads[0]
        x, weight, y = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        passes = Passes(False, False, False) if torch.is_grad_enabled() else ctx.passes
        if ctx.has_relu:
            grad = torch.ops.aten.threshold_backward(grad, y, 0)
        grad = grad.contiguous()
        of_x = of_weight = None
        if needs_x:
            of_x = product(grad, weight.t()) if passes.input else reference.input_gradient(grad, weight)
        if needs_weight:
            of_weight = product(grad.t(), x.t()) if passes.weight else reference.weight_gradient(grad, x)
        return of_x, of_weight, grad.sum(0) if needs_bias else None, None, None

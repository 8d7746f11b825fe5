"""Dot interactions: the products of all pairs of a sample's vectors, as DLRM has them.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
(arXiv:1906.00091).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rowmesh.ops.gpu import has_triton
from rowmesh.ops.interaction import cpu, reference

__all__ = ["interact"]
_DTYPES = (torch.float32, torch.float64)


def interact(base: Tensor, embeddings: Tensor) -> Tensor:
    """`(b, ⟨T_i, T_j⟩ for all j < i)` with T = (b, embeddings): the base, then the products, i by i.

    In one pass, without a matrix of all products: reads D(F + 1) numbers of a sample, and writes D + F(F + 1)/2.
    Products are of float32 or float64 numbers, also under autocast.

    Args:
        base: `[B, D]`.
        embeddings: `[B, F, D]`, on the same device; the result has their dtype.

    Returns:
        `[B, D + F(F + 1)/2]`. Gradients of gradients are by plain torch; so are other dtypes, other devices than CPU
        and CUDA, what is under `torch.func`, and models that are compiled or exported.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> interact(torch.tensor([[1.0, 2.0]]), torch.tensor([[[3.0, 4.0], [5.0, 6.0]]]))
        tensor([[ 1.,  2., 11., 17., 39.]])
    """
    if embeddings.dim() != 3 or base.shape != (embeddings.shape[0], embeddings.shape[2]):
        raise ValueError(
            f"base must be [B, D] and embeddings [B, F, D], got {list(base.shape)} and {list(embeddings.shape)}"
        )
    base = base.to(embeddings.dtype)
    if not _can_take(base, embeddings):
        return reference.interact(base, embeddings)
    y: Any = _Interaction.apply(base, embeddings)
    return y


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, embeddings: Tensor) -> Tensor:
        ctx.save_for_backward(base, embeddings)
        base, embeddings = base.contiguous(), embeddings.contiguous()
        samples, features, dim = embeddings.shape
        out = embeddings.new_empty(samples, dim + features * (features + 1) // 2)
        _kernels(out).forward(base, embeddings, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        base, embeddings = ctx.saved_tensors
        if torch.is_grad_enabled():
            return reference.gradients(base, embeddings, grads[0])
        base, embeddings = base.contiguous(), embeddings.contiguous()
        of_base, of_embeddings = torch.empty_like(base), torch.empty_like(embeddings)
        _kernels(base).backward(base, embeddings, grads[0].contiguous(), of_base, of_embeddings)
        return of_base, of_embeddings


def _kernels(tensor: Tensor) -> Any:
    if tensor.is_cpu:
        return cpu
    from rowmesh.ops.interaction import cuda

    return cuda


def _can_take(base: Tensor, embeddings: Tensor) -> bool:
    return (
        type(base) in (Tensor, torch.nn.Parameter)
        and type(embeddings) in (Tensor, torch.nn.Parameter)
        and base.dtype in _DTYPES
        and base.device == embeddings.device
        and embeddings.numel() > 0
        and (embeddings.is_cpu or (embeddings.is_cuda and has_triton()))
        and not torch.compiler.is_compiling()
        and not torch._C._get_tracing_state()
        and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]
        and forward_ad._current_level < 0
    )

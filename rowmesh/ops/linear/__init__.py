"""Linear layers in float32 on a CPU, through oneDNN where that is faster than torch's own.

`using` changes what `torch.nn.functional.linear` and every `nn.Linear` do within a block, for tensors that it can
handle; parameters, modules and what is saved of them stay as they are. Nothing changes outside, under autocast (whose
bfloat16 goes through oneDNN anyway), while a model is compiled or exported, under `torch.func`, and for tensors of
other dtypes, devices or classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rowmesh.ops.linear import reference
from rowmesh.ops.linear.caches import bound_caches
from rowmesh.ops.linear.choices import ALL, NONE, Choices, Passes, Shape, linear_shapes
from rowmesh.ops.linear.cpu import LinearFunction, gradients, obstacle
from rowmesh.ops.linear.measured import Measured, measure

__all__ = [
    "ALL",
    "NONE",
    "Choices",
    "Measured",
    "Passes",
    "Shape",
    "bound_caches",
    "chosen",
    "gradients",
    "linear",
    "linear_shapes",
    "measure",
    "obstacle",
    "using",
]
_PLAIN = (Tensor, nn.Parameter)
_NO_CHOICES = Choices()
_CHOICES = ContextVar("choices", default=_NO_CHOICES)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False, passes: Passes = ALL
) -> Tensor:
    """`y = x Wᵀ + b`, or max(0, y); equal to `F.linear` to 2e-6 of the largest result, and so are its gradients.

    Args:
        x: `[…, K]`.
        weight: `[N, K]`.
        bias: `[N]`, or None.
        relu: whether negative results become 0.
        passes: which products are by oneDNN. None is for what oneDNN is not used for: other dtypes than float32, other
            devices, no samples, and the cases that this package names. There it is `F.linear`.

    Returns:
        `[…, N]`. Gradients of gradients are by torch's own products.

    Example:
        >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [-1.0, -1.0]])
        >>> linear(x, weight), linear(x, weight, relu=True)
        (tensor([[11., -3.]]), tensor([[11.,  0.]]))
    """
    if not any(passes) or not _can_take(x, weight, bias):
        return reference.linear(x, weight, bias, relu=relu)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y: Any = LinearFunction.apply(rows, weight, bias, relu, passes)
    return y.view(*x.shape[:-1], weight.shape[0])


@contextmanager
def using(choices: Choices) -> Iterator[None]:
    """Computes linear layers as chosen, on this thread, within a block; backward passes may come after it.

    Args:
        choices: of the shapes that are not torch's own.

    Example:
        >>> layer = nn.Linear(64, 32)
        >>> with using(Choices.everything([(32, 64)])):
        ...     y = layer(torch.ones(128, 64))
        >>> torch.allclose(y, layer(torch.ones(128, 64)), rtol=0, atol=2e-6)
        True
    """
    if not choices or obstacle() is not None:
        yield
        return
    token = _CHOICES.set(choices)
    try:
        with _Mode(choices):
            yield
    finally:
        _CHOICES.reset(token)


def chosen(shape: Shape, x: Tensor, weight: Tensor) -> Passes:
    """How the block that this thread is in computes layers of a shape: for products that are no `nn.Linear`.

    Args:
        shape: `[N, K]` as it was measured.
        x: `[B, K]`.
        weight: `[≤ N, K]`, such as a part of many rows.

    Returns:
        The choice for `linear` and `gradients`: no oneDNN outside of `using`, and for tensors that it cannot
        take.
    """
    return _CHOICES.get().passes.get(shape, NONE) if _can_take(x, weight, None) else NONE


class _Mode(TorchFunctionMode):
    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _as_chosen(self._choices, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _as_chosen(choices: Choices, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `F.linear`, whose arguments have these names."""
    return linear(input, weight, bias, passes=_chosen(choices, weight))


def _chosen(choices: Choices, weight: Tensor) -> Passes:
    return choices.passes.get((weight.shape[0], weight.shape[1]), NONE) if weight.dim() == 2 else NONE


def _can_take(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return (
        all(
            type(each) in _PLAIN and each.dtype == torch.float32 and each.is_cpu and each.layout == torch.strided
            for each in tensors
        )
        and x.dim() > 0
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]  # else torch's own says what is wrong
        and (bias is None or bias.shape == weight.shape[:1])
        and x.numel() > 0
        and weight.numel() > 0
        and weight.is_contiguous()
        and obstacle() is None
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._get_tracing_state()
        and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]
        and forward_ad._current_level < 0
    )

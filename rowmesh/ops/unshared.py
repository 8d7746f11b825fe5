"""Unshared: whether the tensors that a backward is given are its own alone, and stay as it leaves them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rowmesh.errors import RowmeshError


def are_unshared(gradients: Sequence[Tensor]) -> bool:
    """Whether no program and no graph can change any of the gradients that a `torch.autograd.Function` was given.

    Counts references to each tensor and to its memory, and compares them with those to a gradient that surely is only
    the backward's. A gradient that is not contiguous is copied where it must be.

    Args:
        gradients: the arguments of `backward`, the tuple itself: another one would refer to them too.
    """
    only = _only_references()
    return bool(only) and all(not gradient.is_contiguous() or _references(gradient) in only for gradient in gradients)


def _references(gradient: Tensor) -> tuple[int, ...]:
    """To the tensor, to its memory, and to what it is a view of, which it keeps."""
    # torch counts references for plans of its own, and has no public name for that.
    of_tensor = gradient._use_count()  # pyright: ignore[reportAttributeAccessIssue]
    of_storage = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    found, base = (sys.getrefcount(gradient), of_tensor, of_storage), gradient._base
    if base is None:
        return found
    return *found, sys.getrefcount(base), base._use_count()  # pyright: ignore[reportAttributeAccessIssue]


class _Probe(torch.autograd.Function):
    """Counts the references to a gradient that nobody else has."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, found: list[tuple[int, ...]]) -> tuple[Tensor, ...]:
        ctx.found = found
        return (torch.zeros(2, 3, device="cpu"),)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.found += [_references(gradient) for gradient in grads]
        return None, None


@functools.cache
def _only_references() -> set[tuple[int, ...]]:
    """References to a gradient that was just computed, and to a view of it; nothing where torch cannot count."""
    if not (hasattr(Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")):
        return set()
    found: list[tuple[int, ...]] = []
    with torch.inference_mode(False), torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True, device="cpu")
        for is_view in (False, True):
            (vector,) = _Probe.apply(anchor, found)
            used = vector.view(3, 2) if is_view else vector
            (used * 2.0).backward(torch.ones_like(used))
    return set(found)


class LeftGradient:
    """A gradient that was left to the update, which must find it as it was.

    Args:
        grad: of the output of a look-up, contiguous.
    """

    def __init__(self, grad: Tensor) -> None:
        self._grad, self._version = grad, grad._version

    def take(self) -> Tensor:
        """The gradient.

        Raises:
            RowmeshError: it was changed since.
        """
        if self._grad._version != self._version:
            raise RowmeshError(
                "the gradient of looked-up vectors was changed in place between backward and step, through memory that "
                "nothing seemed to refer to; change it in a hook of the vectors (register_hook), which runs in backward"
            )
        return self._grad

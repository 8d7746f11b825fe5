"""Sole: whether the tensors that a backward is given are only its own, and so stay as they are when it keeps them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def are_sole(gradients: Sequence[Tensor]) -> bool:
    """Whether no program and no graph can change any of the gradients that a `torch.autograd.Function` was given.

    Counts references to each tensor and to its memory, and compares them with those to a gradient that surely is only
    the backward's. One that is not contiguous is copied by whoever needs it contiguous.

    Args:
        gradients: the arguments of `backward`, the tuple itself: another one would refer to them too.
    """
    only = _only_references()
    return all(not gradient.is_contiguous() or _references(gradient) == only for gradient in gradients)


def _references(gradient: Tensor) -> tuple[int, int, int]:
    # torch counts references for plans of its own, and has no public name for that.
    of_tensor = gradient._use_count()  # pyright: ignore[reportAttributeAccessIssue]
    return sys.getrefcount(gradient), of_tensor, torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)


class _Probe(torch.autograd.Function):
    """Counts the references to a gradient that nobody else has."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, found: list[tuple[int, int, int]]) -> tuple[Tensor, ...]:
        ctx.found = found
        return (torch.zeros(1, device="cpu"),)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.found += [_references(gradient) for gradient in grads]
        return None, None


@functools.cache
def _only_references() -> tuple[int, int, int]:
    found: list[tuple[int, int, int]] = []
    with torch.inference_mode(False), torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True, device="cpu")
        (vector,) = _Probe.apply(anchor, found)
        (vector * 2.0).backward(torch.ones(1, device="cpu"))
    return found[0]

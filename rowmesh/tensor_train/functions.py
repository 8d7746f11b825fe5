"""What autograd sees: the rows of distinct ids, or bags of them, as functions of the cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rowmesh.tensor_train.lookup import LookedUp


class Sink(Protocol):
    """Where gradients go instead of the cores' `grad`."""

    def take(self, lookup: Any, row_gradients: Tensor) -> None:
        """`[U, D]`, of the distinct ids of a look-up."""
        ...


class Pools(Protocol):
    """From the rows of a look-up to bags and back, wherever its kernels run; `bags.Pooling` says what each does."""

    def forward(self, cores: Sequence[Tensor], keep: bool) -> Tensor: ...

    def backward(self, grad: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LookupOptions:
    """How gradients of a look-up are made.

    Attributes:
        sparse: the cores' gradients are sparse tensors.
        by_frequency: the gradient of an id is divided by how often it occurs.
        sink: takes the gradients of rows; None: the cores get theirs.
        keep: a backward may come, so keep the products of prefixes. (Inside of a function autograd does not tell.)
    """

    sparse: bool
    by_frequency: bool
    sink: Sink | None
    keep: bool


def _core_gradients(ctx: Any, row_gradients: Tensor) -> tuple[Tensor | None, ...]:
    lookup, options, cores = ctx.lookup, ctx.options, ctx.saved_tensors
    lookup.check()  # before anything is made of wrong ids
    if options.by_frequency:
        row_gradients = row_gradients / lookup.id_counts().to(row_gradients.dtype).unsqueeze(1)
    if options.sink is not None:
        options.sink.take(lookup, row_gradients.contiguous())
        return (None, None, None)
    gradients = lookup.gradients(cores, row_gradients.contiguous(), options.sparse)
    lookup.release_products()
    return gradients


class Rows(torch.autograd.Function):
    """The row of each distinct id, `[U, D]`."""

    @staticmethod
    def forward(ctx: Any, lookup: LookedUp, options: LookupOptions, *cores: Tensor) -> Tensor:
        ctx.lookup, ctx.options = lookup, options
        ctx.save_for_backward(*cores)
        return lookup.new_rows(cores, options.keep)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (None, None, *_core_gradients(ctx, grads[0]))


class PooledRows(torch.autograd.Function):
    """The sum or mean of each bag, `[bags, D]`; rows of distinct ids are made and pooled in one go."""

    @staticmethod
    def forward(ctx: Any, lookup: LookedUp, options: LookupOptions, pooling: Pools, *cores: Tensor) -> Tensor:
        ctx.lookup, ctx.options, ctx.pooling = lookup, options, pooling
        ctx.save_for_backward(*cores)
        return pooling.forward(cores, options.keep)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (None, None, None, *_core_gradients(ctx, ctx.pooling.backward(grads[0].contiguous())))

"""Functions of autograd: the rows of distinct ids, or bags of them, as a function of the cores."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from rowmesh.ops.pool.one_feature import Pool
from rowmesh.ops.tensor_train import Lookup


class Pending:
    """Gradients of rows that backward left for the next step of an optimizer, instead of gradients of cores.

    Attributes:
        taken: look-ups, and the gradients of their rows `[U, D]`.
        threads: whose backward it was; on a device torch has one for all.
    """

    def __init__(self) -> None:
        self.taken: list[tuple[Lookup, Tensor]] = []
        self.threads: set[int] = set()

    def take(self, lookup: Lookup, row_gradients: Tensor) -> None:
        """Adds the gradients of one backward."""
        self.taken.append((lookup, row_gradients))
        self.threads.add(threading.get_ident())

    def clear(self) -> None:
        """Forgets them."""
        self.taken, self.threads = [], set()


class LookedUp(torch.autograd.Function):
    """The row of each distinct id, `[U, D]`; or the sum or mean of each bag, `[bags, D]`, made in one go with them.

    Args:
        lookup: the distinct ids.
        pool: makes bags; None for rows.
        keep: a backward may come, so keep the products of prefixes. (Inside of a function autograd does not tell.)
        how: whether the cores' gradients are sparse tensors, whether the gradient of an id is divided by how often it
            occurs, and what takes the gradients of rows in place of the cores, if anything.
        cores: of the table.
    """

    @staticmethod
    def forward(
        ctx: Any,
        lookup: Lookup,
        pool: Pool | None,
        keep: bool,
        how: tuple[bool, bool, Pending | None],
        *cores: Tensor,
    ) -> Tensor:
        ctx.lookup, ctx.pool, ctx.how = lookup, pool, how
        ctx.save_for_backward(*cores)
        if pool is None:
            return lookup.new_rows(cores, keep=keep)
        rows = pool.row_buffer()
        lookup.rows(cores, rows, keep=keep)
        return pool.forward(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        lookup: Lookup = ctx.lookup
        (sparse, by_frequency, pending), cores = ctx.how, ctx.saved_tensors
        row_gradients = grads[0] if ctx.pool is None else ctx.pool.backward(grads[0].contiguous())
        lookup.check()  # before anything is made of wrong ids
        if by_frequency:
            row_gradients = row_gradients / lookup.prefixes.id_counts().to(row_gradients.dtype).unsqueeze(1)
        row_gradients = row_gradients.contiguous()
        if pending is not None:
            pending.take(lookup, row_gradients)
            return (None,) * 7
        found = lookup.gradients(cores, row_gradients, sparse=sparse)
        lookup.release_products()
        return (None, None, None, None, *found)

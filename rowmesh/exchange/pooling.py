"""Pooling a route: fetched rows become one vector a bag, and gradients of vectors become gradients of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rowmesh.errors import RowmeshError
from rowmesh.exchange.route import RouteGroup
from rowmesh.ops import pool as ops
from rowmesh.ops.simd import COMPUTE_DTYPE, STORAGE
from rowmesh.ops.tensor_pool import TensorPool
from rowmesh.sparse import SparseBatch


def compress(group: RouteGroup) -> None:
    """Files the output cells of every row, for the backward; may run while rows travel."""
    if group.is_compressed:
        return
    group.is_compressed = True
    layout, workspace = group.layout, group.workspace
    ops.file_cells(
        layout.address, layout.num_features, group.inverse, workspace.counts.buffer.address, group.num_unique,
        workspace.pointers.reserve(4 * (group.num_unique + 1)),
        workspace.cells.reserve(4 * layout.num_ids),
    )  # fmt: skip


class GroupPooling:
    """The pool kernels of one group."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        storage = STORAGE[dtype]
        self.dim = dim
        self.dtype = COMPUTE_DTYPE[storage]
        self._kernels = ops.kernels(dim, storage)

    def forward(self, group: RouteGroup, batch: SparseBatch, output: Tensor) -> None:
        """Writes the group's columns of the output."""
        layout, workspace = group.layout, group.workspace
        self._kernels.pool(
            layout.address, layout.num_features, workspace.addresses.buffer.address, group.num_unique, group.inverse,
            self._weigh(group, batch) if layout.is_weighted else 0, output.data_ptr(),
        )  # fmt: skip

    def backward(self, group: RouteGroup, grad: Tensor) -> None:
        """Writes the summed gradient of every row of the group into its outbox."""
        compress(group)
        exchange, workspace, outbox = group.exchange, group.workspace, group.workspace.outbox
        sink = outbox.reserve_gradients(group.num_unique * exchange.gradient_bytes)
        self._kernels.backward(
            grad.data_ptr(), workspace.pointers.buffer.address, workspace.cells.buffer.address,
            self.file_weights(group, workspace.pointers.buffer.address) if group.layout.is_weighted else 0,
            workspace.uniques.buffer.address,
            outbox.lists.address, exchange.num_segments, exchange.world_size, sink,
        )  # fmt: skip

    def file_weights(self, group: RouteGroup, pointers: int) -> int:
        """The factors in the order of the cells; returns their address."""
        layout, workspace, element = group.layout, group.workspace, self.dtype.itemsize
        filed = workspace.weights.reserve(element * layout.num_ids)
        ops.file_weights(
            layout.address, layout.num_features, group.inverse, pointers, group.num_unique,
            workspace.cursors.reserve(4 * group.num_unique), workspace.factors.buffer.address, element, filed,
        )  # fmt: skip
        return filed

    def _weigh(self, group: RouteGroup, batch: SparseBatch) -> int:
        layout, weights = group.layout, batch.weights
        factors = group.workspace.factors.reserve(self.dtype.itemsize * batch.ids.numel())
        if weights is not None and weights.dtype not in (torch.float32, torch.float64):
            weights = weights.float()
        ops.id_weights(
            layout.address, layout.num_features, 0 if weights is None else weights.data_ptr(),
            weights is not None and weights.dtype == torch.float64, factors, self.dtype == torch.float64,
        )  # fmt: skip
        return factors


class Pooling:
    """Pools all groups into one output, and one more for every sequence group."""

    def __init__(self, groups: Sequence[GroupPooling], is_sequence: Sequence[bool], width: int) -> None:
        self.groups = groups
        self.is_sequence = is_sequence
        self.width = width
        self.dtype = groups[0].dtype
        self._outputs = TensorPool(max_idle=4 * (1 + sum(is_sequence)))

    @property
    def num_bytes(self) -> int:
        """Memory of the outputs, of those that users keep as well."""
        return self._outputs.num_bytes

    def compress(self, group: RouteGroup) -> None:
        """Files the output cells of every row, for the backward; may run while rows travel."""
        compress(group)

    def forward(self, groups: Sequence[RouteGroup], batch: SparseBatch, num_samples: int) -> tuple[Tensor, ...]:
        """`[num_samples, width]` for the pooled groups, then `[ids of the group, D]` for each sequence group.

        Args:
            groups: what to look up.
            batch: whose ids they are of.
            num_samples: of the batch, or of the part of it that the groups' layouts describe.
        """
        pooled = self._outputs.take(self.dtype, num_samples, self.width)
        outputs = [pooled]
        for pooling, group, is_sequence in zip(self.groups, groups, self.is_sequence, strict=True):
            target = pooled
            if is_sequence:
                target = self._outputs.take(self.dtype, group.layout.num_ids, pooling.dim)
                outputs.append(target)
            pooling.forward(group, batch, target)
        return tuple(outputs)

    def backward(self, groups: Sequence[RouteGroup], gradients: Sequence[Tensor]) -> None:
        """Sums the gradients of equal ids into the outboxes."""
        for group, (pooling, grad) in zip(groups, self.pairs(gradients), strict=True):
            pooling.backward(group, grad)

    def is_finite(self, groups: Sequence[RouteGroup]) -> bool:
        """Whether all summed gradients are."""
        return all(self._is_finite(pooling, group) for pooling, group in zip(self.groups, groups, strict=True))

    @staticmethod
    def _is_finite(pooling: GroupPooling, group: RouteGroup) -> bool:
        gradients = group.workspace.outbox.gradients.tensor(pooling.dtype, group.num_unique, pooling.dim)
        return bool(gradients.isfinite().all())

    def pairs(self, gradients: Sequence[Tensor]) -> list[tuple[GroupPooling, Tensor]]:
        """Each group's pooling, and the gradient of the output it wrote into."""
        contiguous = [grad.contiguous() for grad in gradients]
        sequences = iter(contiguous[1:])
        return [
            (pooling, next(sequences) if is_sequence else contiguous[0])
            for pooling, is_sequence in zip(self.groups, self.is_sequence, strict=True)
        ]


class LookUp(Protocol):
    """Rows that were fetched, and the way of their gradients."""

    def pool(self) -> tuple[Tensor, ...]:
        """Their vectors."""
        ...

    def take_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Sums the gradients of the vectors by row."""
        ...


class PoolFunction(torch.autograd.Function):
    """The one step that autograd sees: rows in, vectors out; gradients go straight to where push sends them from."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, look_up: LookUp) -> tuple[Tensor, ...]:
        ctx.look_up = look_up
        return look_up.pool()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        if torch.is_grad_enabled():  # so it is under create_graph=True only
            raise RowmeshError(
                "backward(create_graph=True) cannot go through an EmbeddingCollection, whose rows have no second "
                "derivative; for a penalty on gradients take torch.autograd.grad(loss, embeddings.values, "
                "create_graph=True), add what it gives to the loss, and call backward() on that"
            )
        # The graph may live as long as a loss that somebody keeps; the buffers of what was looked up must not.
        look_up, ctx.look_up = ctx.look_up, None
        if look_up is None:
            raise RowmeshError("backward ran twice through one forward of an EmbeddingCollection; call forward again")
        look_up.take_gradients(grads)
        return None, None

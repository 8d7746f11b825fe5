"""Pooling a route: fetched rows become one vector a bag, and gradients of vectors become gradients of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rowmesh.errors import RowmeshError
from rowmesh.exchange.route import AnyRouteGroup
from rowmesh.ops.tensor_pool import TensorPool
from rowmesh.ops.unshared import are_unshared
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableGroup
from rowmesh.tables.dense import compute_dtype


class Pooling:
    """Pools all groups into one output, and one more for every sequence group.

    Args:
        groups: of the collection.
        width: columns of the pooled output.
        device: where; None: the host, where outputs are kept and reused.
    """

    def __init__(self, groups: Sequence[TableGroup], width: int, device: torch.device | None = None) -> None:
        self._is_sequence = [group.is_sequence for group in groups]
        self._dims = [group.dim for group in groups]
        self.width, self.dtype, self.device = width, compute_dtype(groups[0].dtype), device
        self._outputs = TensorPool(max_idle=4 * (1 + sum(self._is_sequence))) if device is None else None
        self._new: Callable[[int, int], Tensor] = (
            partial(torch.empty, dtype=self.dtype, device=device)
            if self._outputs is None
            else partial(self._outputs.take, self.dtype)
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the outputs, of those that users keep as well; on a device torch has it."""
        return 0 if self._outputs is None else self._outputs.num_bytes

    def compress(self, group: AnyRouteGroup) -> None:
        """Sorts the output cells by row (CSR), for the backward; may run while rows travel."""
        group.look_up.compress(group.layout)

    def forward(self, groups: Sequence[AnyRouteGroup], batch: SparseBatch, num_samples: int) -> tuple[Tensor, ...]:
        """`[num_samples, width]` for the pooled groups, then `[ids of the group, D]` for each sequence group.

        Args:
            groups: what to look up.
            batch: whose ids they are of.
            num_samples: of the batch, or of the part of it that the groups' layouts describe.
        """
        outputs = [self._new(num_samples, self.width)]
        for group, is_sequence, dim in zip(groups, self._is_sequence, self._dims, strict=True):
            if is_sequence:
                outputs.append(self._new(group.layout.num_ids, dim))
            group.look_up.pool(group.layout, batch.weights, outputs[-1 if is_sequence else 0])
        return tuple(outputs)

    def backward(self, groups: Sequence[AnyRouteGroup], gradients: Sequence[Tensor], *, may_wait: bool = False) -> None:
        """Sums the gradients of equal ids, for push to send.

        Args:
            groups: what was looked up.
            gradients: of the outputs.
            may_wait: whether sums may be left to the update, where nothing else can change the gradients until then.
        """
        may_wait = may_wait and are_unshared(gradients)
        for group, grad in zip(groups, self.by_group(gradients), strict=True):
            if not group.exchange.sums_gradients:
                continue
            if may_wait:
                group.look_up.leave_backward(group.layout, grad)
            else:
                group.look_up.backward(group.layout, grad)

    def is_finite(self, groups: Sequence[AnyRouteGroup]) -> bool:
        """Whether all summed gradients are finite."""
        found = [group.look_up.is_finite() for group in groups if not group.exchange.is_frozen]
        return not found or bool(torch.stack(found).all())  # a device is waited for once

    def by_group(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradient of the output that each group wrote into."""
        pooled, *sequences = map(Tensor.contiguous, gradients)
        if not sequences:
            return [pooled] * len(self._is_sequence)
        of_sequences = iter(sequences)
        return [next(of_sequences) if is_sequence else pooled for is_sequence in self._is_sequence]


class WeightGradients:
    """Gradients of the weights of ids that were just looked up; has their rows as they are now.

    Args:
        pooling: of the groups.
        groups: what was looked up; their route must live as long as this.
        weights: of the ids, `[N]`.
    """

    def __init__(self, pooling: Pooling, groups: Sequence[AnyRouteGroup], weights: Tensor) -> None:
        self._pooling, self._groups = pooling, groups
        self._num_ids, self._dtype = weights.numel(), weights.dtype
        self._rows = [group.look_up.keep_rows() for group in groups]

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """`[N]`, of the gradients of all outputs; on a device the host waits for it, since weights are the host's."""
        pooling = self._pooling
        out = torch.empty(self._num_ids, dtype=pooling.dtype, device=pooling.device or "cpu")
        by_group = pooling.by_group(gradients)
        for group, rows, grad in zip(self._groups, self._rows, by_group, strict=True):
            group.look_up.weight_gradients(group.layout, rows, grad, out)
        return out.to("cpu", self._dtype)


class PoolFunction(torch.autograd.Function):
    """The one step that autograd sees: rows in, vectors out; gradients go straight to where push sends them from.

    Args:
        anchor: gives the vectors a place in the graph.
        weights: of the ids, or None; where they require a gradient, they get one.
        pooling: makes them.
        looked_up: arguments of `Pooling.forward`.
        take_gradients: sums the gradients of the vectors by row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        pooling: Pooling,
        looked_up: tuple[Sequence[AnyRouteGroup], SparseBatch, int],
        take_gradients: Callable[[Sequence[Tensor]], None],
    ) -> tuple[Tensor, ...]:
        ctx.take_gradients = take_gradients
        ctx.find_weight_gradients = None
        if weights is not None and ctx.needs_input_grad[1]:
            ctx.find_weight_gradients = WeightGradients(pooling, looked_up[0], weights)
        return pooling.forward(*looked_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None, None, None]:
        if torch.is_grad_enabled():  # so it is under create_graph=True only
            raise RowmeshError(
                "backward(create_graph=True) cannot go through an EmbeddingCollection, whose rows have no second "
                "derivative; for a penalty on gradients take torch.autograd.grad(loss, embeddings.values, "
                "create_graph=True), add what it gives to the loss, and call backward() on that"
            )
        # The graph may live as long as a loss that the program keeps; the buffers of what was looked up must not.
        take_gradients, ctx.take_gradients = ctx.take_gradients, None
        if take_gradients is None:
            raise RowmeshError("backward ran twice through one forward of an EmbeddingCollection; call forward again")
        find_weight_gradients, ctx.find_weight_gradients = ctx.find_weight_gradients, None
        of_weights = None if find_weight_gradients is None else find_weight_gradients(grads)
        take_gradients(grads)
        return None, of_weights, None, None, None

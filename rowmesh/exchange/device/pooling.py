"""Pooling on a device: fetched rows become vectors, and gradients of vectors become gradients of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableGroup
from rowmesh.tables.dense import compute_dtype


class DevicePooling:
    """Pools all groups into one output, and one more for every sequence group.

    Args:
        groups: of the collection.
        width: columns of the pooled output.
        device: where.
    """

    def __init__(self, groups: Sequence[TableGroup], width: int, device: torch.device) -> None:
        from rowmesh.ops.pool import cuda

        self._groups, self._width, self._device, self.kernels = groups, width, device, cuda
        self._dtype = compute_dtype(groups[0].dtype)

    @property
    def num_bytes(self) -> int:
        """Nothing is kept."""
        return 0

    def compress(self, group: Any) -> None:
        """Files the output cells of every row, for the backward; may run while rows travel."""
        if group.filed is None:
            group.filed = self.kernels.file_cells(group.recover, group.bags, group.num_unique, self._dtype)

    def forward(self, groups: Sequence[Any], batch: SparseBatch, num_samples: int) -> tuple[Tensor, ...]:
        """`[num_samples, width]` for the pooled groups, then `[ids of the group, D]` for each sequence group."""
        outputs = [torch.empty(num_samples, self._width, dtype=self._dtype, device=self._device)]
        for of, group in zip(self._groups, groups, strict=True):
            if of.is_sequence:
                size = group.layout.num_ids, of.dim
                outputs.append(torch.empty(*size, dtype=self._dtype, device=self._device))
            target = outputs[-1] if of.is_sequence else outputs[0]
            self.kernels.pool(group.source, group.recover, group.bags, target, group.slots)
        return tuple(outputs)

    def backward(self, groups: Sequence[Any], gradients: Sequence[Tensor]) -> None:
        """Sums the gradients of equal ids, in the order of the ids."""
        for of, group, grad in self.pairs(groups, gradients):
            self.compress(group)
            group.gradients = torch.empty(group.num_unique, of.dim, dtype=self._dtype, device=self._device)
            self.kernels.backward(grad, group.filed, group.gradients, group.unique.num_unique)
            group.filed = None

    def is_finite(self, groups: Sequence[Any]) -> bool:
        """Whether all summed gradients are; the host waits."""
        found = []
        for group in groups:
            numbers = torch.arange(group.num_unique, device=self._device)
            is_unused = numbers >= group.unique.num_unique  # nobody has written those
            found.append((group.summed.isfinite().all(1) | is_unused).all())
        return bool(torch.stack(found).all())

    def pairs(self, groups: Sequence[Any], gradients: Sequence[Tensor]) -> list[tuple[TableGroup, Any, Tensor]]:
        """Each group, its part of a route, and the gradient of the output it wrote into."""
        contiguous = [grad.contiguous() for grad in gradients]
        sequences = iter(contiguous[1:])
        return [
            (of, group, next(sequences) if of.is_sequence else contiguous[0])
            for of, group in zip(self._groups, groups, strict=True)
        ]

"""Device router: takes a batch to a device and routes it there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowmesh.exchange.device.route import DeviceRoute, table_bounds
from rowmesh.exchange.layout import GroupLayout, Layouts
from rowmesh.ops.transfer import upload
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableGroup

_BEGIN, _END, _OFFSETS, _MEAN = 0, 1, 2, 7  # of a descriptor, see `rowmesh.ops.pool.cpu`


class DeviceRouter:
    """Routes on a device.

    The ids of a batch are brought into the order of the tables before, by the host where the features of the batch are
    in another order. Ids outside their table are made the row that its policy names, row 0 where it is to refuse them;
    how many there were stays on the device until the host reads the sizes, before anything is updated.

    Args:
        groups: of the collection.
        layouts: where each feature's ids and vectors are.
        device: where.
    """

    def __init__(self, groups: Sequence[TableGroup], layouts: Layouts, device: torch.device) -> None:
        from rowmesh.ops.bound_ids.cuda import bound_ids
        from rowmesh.ops.pool.cuda import Bags

        self._groups, self._layouts, self._device = groups, layouts, device
        self._bound, self._describe = bound_ids, Bags.describe
        tables = [table for group in groups for table in group.tables for _ in table.features]
        self._features = tuple(feature for group in groups for feature in group.features)
        rows = [0 if table.out_of_range == "error" else table.out_of_range for table in tables]
        self._limits = torch.tensor([table.num_rows for table in tables], device=device)
        self._substitutes = torch.tensor(rows, device=device)
        self._refuses = torch.tensor([table.out_of_range == "error" for table in tables], device=device)

    def __call__(
        self, batch: SparseBatch, exchanges: Sequence[Any], moment: tuple[int, int] | None = None
    ) -> DeviceRoute:  # fmt: skip
        """Routes a batch; the host waits for nothing."""
        self._layouts.check(batch)
        batch = batch.routed(self._take)
        batch = batch if batch.features == self._features else batch.select(self._features)
        layouts = self._layouts(batch)
        bounds = [0, *(int(end) for layout in layouts for end in layout.features[:, _END])]
        ids, weights, jagged = (self._upload(part) for part in (batch.ids, _weights(batch), _jagged(batch)))
        assert ids is not None
        segments = [table_bounds(group, layout) for group, layout in zip(self._groups, layouts, strict=True)]
        sizes = [len(bounds), *map(len, segments)]
        numbers = torch.tensor([*bounds, *(number for part in segments for number in part)], device="cpu")
        offsets, *of_groups = self._upload(numbers).split(sizes)
        outside = torch.zeros_like(self._limits)
        rows = self._bound(ids, offsets, self._limits, self._substitutes, torch.empty_like(ids), outside)
        refused = (outside * self._refuses).sum(0, keepdim=True)
        # First: it tells exchanges when it is gone, even half made.
        route = DeviceRoute(batch, [], outside, refused, moment)
        place, first = 0, 0
        for exchange, layout, begins in zip(exchanges, layouts, of_groups, strict=True):
            own = slice(first, first + layout.num_ids)
            bags = self._bags(batch, layout, place, own, jagged, weights)
            route.groups.append(exchange.route(rows[own], begins, layout, bags))
            place, first = place + layout.num_features, own.stop
        for exchange, group in zip(exchanges, route.groups, strict=True):
            exchange.prefetch(group, batch)  # when all is launched: the host may take its time
        return route

    @property
    def num_bytes(self) -> int:
        """Nothing is kept."""
        return 0

    def _take(self, count: int) -> Tensor:
        """Memory for offsets, from which the device copies without the host."""
        return torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda")

    def _upload(self, tensor: Tensor | None) -> Any:
        return None if tensor is None else upload(tensor, self._device)

    def _bags(
        self, batch: SparseBatch, layout: GroupLayout, place: int, own: slice, jagged: Tensor | None,
        weights: Tensor | None,
    ) -> Any:  # fmt: skip
        """The bags of one group, whose features begin at number `place` of the batch, and ids at `own`."""
        starts = (place + np.arange(layout.num_features)) * batch.batch_size
        features = descriptors(layout, starts)
        return self._describe(features, self._device, jagged, None if weights is None else weights[own])


def descriptors(layout: GroupLayout, first_bags: np.ndarray) -> list[list[int]]:
    """A layout as kernels of a device read it: ids are counted from the group's first, bounds from the batch's first.

    Args:
        layout: of all samples, or of a run of them, whose ids then stand together.
        first_bags: int64 `[F]`: where the bounds of each feature's bags begin among those of the batch.
    """
    described = layout.features.copy()
    lengths = described[:, _END] - described[:, _BEGIN]
    described[:, _END] = np.cumsum(lengths)
    described[:, _BEGIN] = described[:, _END] - lengths
    described[:, _OFFSETS] = np.where(described[:, _OFFSETS] != 0, first_bags, -1)
    described[:, _MEAN] *= layout.is_weighted  # the mean of one row is that row
    return described.tolist()


def _weights(batch: SparseBatch) -> Tensor | None:
    weights = batch.weights
    return weights if weights is None or weights.dtype in (torch.float32, torch.float64) else weights.float()


def _jagged(batch: SparseBatch) -> Tensor | None:
    return batch.offsets if batch.bag_size is None else None

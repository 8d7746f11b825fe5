"""Bags of one feature: from the rows of its distinct ids to their sums or means and back, on a CPU or a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.pool.cpu import file_cells, file_weights, id_weights, kernels
from rowmesh.ops.prefixes import HostPrefixes, Prefixes
from rowmesh.ops.prefixes.handles import DevicePrefixes
from rowmesh.ops.simd import STORAGE


@dataclass(frozen=True)
class Bags:
    """Ids, bag after bag.

    Attributes:
        ids: int64 `[N]`.
        offsets: int64 `[bags + 1]`; None where all bags have `size` ids.
        size: of every bag, where there are no offsets.
        count: bags.
        weights: `[N]`, or None.
    """

    ids: Tensor
    offsets: Tensor | None
    size: int
    count: int
    weights: Tensor | None

    @property
    def bounds(self) -> Tensor:
        """int64 `[bags + 1]`."""
        if self.offsets is not None:
            return self.offsets
        return torch.arange(self.count + 1, device=self.ids.device) * self.size


class HostPool:
    """Sums or means of rows in the host's memory; weights are constants here.

    Args:
        bags: of the ids.
        prefixes: their distinct ones.
        dim: D.
        dtype: of the rows.
        is_mean: divide by the size of each bag.
    """

    def __init__(self, bags: Bags, prefixes: HostPrefixes, dim: int, dtype: torch.dtype, is_mean: bool) -> None:
        self._count, self._prefixes, self._dim, self._dtype = bags.count, prefixes, dim, dtype
        if bags.count * dim >= 1 << 32:
            raise ValueError(f"{bags.count} bags of {dim} values: at most 2**32 values can be pooled at a time")
        self._kernels, self._offsets = kernels(dim, STORAGE[dtype]), bags.offsets
        offsets = 0 if bags.offsets is None else bags.offsets.data_ptr()
        descriptor = [0, prefixes.num_ids, offsets, bags.size, bags.count, 0, dim, is_mean]
        self._feature = np.array(descriptor, np.int64)
        is_weighted = bags.weights is not None or (is_mean and bags.size != 1)
        self._factors = self._weigh(bags.weights) if is_weighted else None

    def _weigh(self, weights: Tensor | None) -> Tensor:
        weights = None if weights is None else weights.detach().to(self._dtype).contiguous()
        factors = torch.empty(self._prefixes.num_ids, dtype=self._dtype, device="cpu")
        is_double = self._dtype == torch.float64
        address = 0 if weights is None else weights.data_ptr()
        id_weights(self._feature.ctypes.data, 1, address, is_double, factors.data_ptr(), is_double)
        return factors

    def row_buffer(self) -> int:
        """Address of memory for the rows of the distinct ids, until the next look-up of this thread."""
        return self._prefixes.row_buffer(self._dim * self._dtype.itemsize)

    def forward(self, rows: Tensor | int) -> Tensor:
        """`[bags, D]` of the rows at an address."""
        assert isinstance(rows, int)
        found, factors = self._prefixes, 0 if self._factors is None else self._factors.data_ptr()
        out = torch.empty(self._count, self._dim, dtype=self._dtype, device="cpu")
        addresses = rows + np.arange(found.num_unique, dtype=np.int64) * (self._dim * self._dtype.itemsize)
        given = (self._feature.ctypes.data, 1, addresses.ctypes.data, found.num_unique, found.inverse)
        self._kernels.pool(*given, factors, out.data_ptr())
        return out

    def backward(self, grad: Tensor) -> Tensor:
        """`[bags, D]` → `[U, D]`: the gradients of equal ids, summed in the order of the ids."""
        found, num = self._prefixes, self._prefixes.num_unique
        out = torch.empty(num, self._dim, dtype=self._dtype, device="cpu")
        if not num:
            return out
        feature, pointers = self._feature.ctypes.data, np.empty(num + 1, np.uint32)
        cells = np.empty(found.num_ids, np.uint32)
        file_cells(feature, 1, found.inverse, found.counts, num, pointers.ctypes.data, cells.ctypes.data)
        weights = None
        if self._factors is not None:
            weights, cursors = torch.empty_like(self._factors), np.empty(num, np.uint32)
            filed = (feature, 1, found.inverse, pointers.ctypes.data, num, cursors.ctypes.data)
            file_weights(*filed, self._factors.data_ptr(), self._dtype.itemsize, weights.data_ptr())
        segments = np.array([0, num], np.int64)
        given = (grad.data_ptr(), pointers.ctypes.data, cells.ctypes.data, 0 if weights is None else weights.data_ptr())
        uniques = found.workspace.identity(num)
        self._kernels.backward(*given, uniques, segments.ctypes.data, 1, 1, out.data_ptr())
        return out


class DevicePool:
    """The same of rows on a device; arguments as for `HostPool`."""

    def __init__(self, bags: Bags, prefixes: DevicePrefixes, dim: int, dtype: torch.dtype, is_mean: bool) -> None:
        from rowmesh.ops.pool import cuda, handles

        self._kernels, self._prefixes, self._count, self._dim, self._dtype = cuda, prefixes, bags.count, dim, dtype
        weights = bags.weights  # a copy, as the backward reads them again: the user may change his own
        weights = None if weights is None else weights.detach().to(dtype, copy=True).contiguous()
        first_bound = -1 if bags.offsets is None else 0
        has_mean = int(is_mean and bags.size != 1)
        feature = (0, bags.ids.numel(), first_bound, bags.size, bags.count, 0, dim, has_mean)
        self._bags = handles.Bags.describe([feature], bags.ids.device, bags.offsets, weights)

    def row_buffer(self) -> Tensor:
        """`[N, D]` for the rows of the distinct ids."""
        return self._prefixes.ids.new_empty(self._prefixes.num_unique, self._dim, dtype=self._dtype)

    def forward(self, rows: Tensor | int) -> Tensor:
        """`[bags, D]` of the rows."""
        assert isinstance(rows, Tensor)
        out = rows.new_empty(self._count, self._dim)
        return self._kernels.pool(rows, self._prefixes.inverse, self._bags, out)

    def backward(self, grad: Tensor) -> Tensor:
        """`[bags, D]` → `[N, D]`, the first U valid: the gradients of equal ids, summed in the order of the ids."""
        found = self._prefixes
        filed = self._kernels.file_cells(found.inverse, self._bags, found.num_unique, self._dtype, is_covered=False)
        out = torch.empty(found.num_unique, self._dim, dtype=self._dtype, device=grad.device)
        return self._kernels.backward(grad, filed, out, found.num)


Pool = HostPool | DevicePool


def pool_of(bags: Bags, prefixes: Prefixes, dim: int, dtype: torch.dtype, *, is_mean: bool) -> Pool:
    """Pools the rows of distinct ids; what made `prefixes` says which kernels run."""
    if isinstance(prefixes, HostPrefixes):
        return HostPool(bags, prefixes, dim, dtype, is_mean)
    return DevicePool(bags, prefixes, dim, dtype, is_mean)

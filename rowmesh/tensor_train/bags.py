"""Bags: which ids belong together, and how their rows become one vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops import pool
from rowmesh.ops.simd import STORAGE
from rowmesh.tensor_train.lookup import Lookup

MODES = ("sum", "mean", "max")


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

    @staticmethod
    def of(
        input: Tensor, offsets: Tensor | None, weights: Tensor | None, include_last_offset: bool
    ) -> Bags:  # fmt: skip
        """From the arguments of `nn.EmbeddingBag.forward`, on a CPU.

        Raises:
            ValueError: they do not fit together; what torch refuses is refused.
            TypeError: ids or offsets are no integers.
        """
        check_arguments(input, offsets, weights, include_last_offset, torch.device("cpu"))
        flat = input.reshape(-1).to(torch.int64).contiguous()
        weights = None if weights is None else weights.reshape(-1)
        if offsets is None:
            return Bags(flat, None, input.shape[1], input.shape[0], weights)
        bounds = _bounds(offsets.to(torch.int64), flat.numel(), include_last_offset)
        used = int(bounds[-1])  # ids past the last bag belong to none
        return Bags(flat[:used], bounds, 0, bounds.numel() - 1, None if weights is None else weights[:used])

    def without(self, padding: int | None) -> Bags:
        """The same bags without the ids that only pad."""
        if padding is None:
            return self
        kept = self.ids != padding
        if bool(kept.all()):
            return self
        before = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), kept.cumsum(0)])
        return Bags(
            self.ids[kept], before[self.bounds], 0, self.count, None if self.weights is None else self.weights[kept]
        )

    @property
    def bounds(self) -> Tensor:
        """int64 `[bags + 1]`."""
        if self.offsets is not None:
            return self.offsets
        return torch.arange(self.count + 1, device=self.ids.device) * self.size


def check_arguments(
    input: Tensor, offsets: Tensor | None, weights: Tensor | None, include_last_offset: bool, device: torch.device
) -> None:  # fmt: skip
    """Raises where arguments of `nn.EmbeddingBag.forward` do not fit together, as far as shapes and types tell.

    Raises:
        ValueError: shapes do not fit, or something is not on the device.
        TypeError: ids or offsets are no integers.
    """
    check_ids("input", input, device)
    if offsets is not None:
        check_ids("offsets", offsets, device)
    if weights is not None:
        _check_device("per_sample_weights", weights, device)
    if weights is not None and weights.shape != input.shape:
        raise ValueError(
            f"per_sample_weights must have the shape of input, {tuple(input.shape)}, got {tuple(weights.shape)}"
        )
    if input.dim() == 2 and offsets is not None:
        raise ValueError(
            f"input is {tuple(input.shape)}, whose lines are the bags: leave offsets out, or pass a 1-D input"
        )
    if input.dim() not in (1, 2):
        raise ValueError(f"input must be 1-D with offsets, or 2-D, got {tuple(input.shape)}")
    if input.dim() == 1 and (offsets is None or offsets.dim() != 1):
        found = "none" if offsets is None else tuple(offsets.shape)
        raise ValueError(f"a 1-D input needs 1-D offsets, where its bags begin, got {found}")
    if offsets is not None and include_last_offset and not offsets.numel():
        raise ValueError("offsets must have at least one element with include_last_offset=True: the number of ids")


def check_ids(name: str, ids: Tensor, device: torch.device) -> None:
    """Raises TypeError where they are no tensor of integers, ValueError where they are not on the device."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name} must be a tensor of int64 or int32, got {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {ids.dtype}")
    _check_device(name, ids, device)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, where the cores are, got {tensor.device}")


def _bounds(offsets: Tensor, num_ids: int, include_last_offset: bool) -> Tensor:
    if not include_last_offset:
        end = num_ids if offsets.numel() else 0  # without a bag no id belongs to one
        offsets = torch.cat([offsets, torch.tensor([end], device="cpu")])
    else:
        offsets = offsets.clone()  # the backward reads them again: the user may have gone on to the next batch
    bounds = offsets.contiguous()
    values = bounds.numpy()
    if values[0] != 0:
        raise ValueError(f"offsets[0] must be 0, where the first bag begins, got {values[0]}")
    if values[-1] > num_ids or bool((values[1:] < values[:-1]).any()):
        raise ValueError(f"offsets must not decrease nor pass the number of ids, {num_ids}, got {offsets.tolist()[:8]}")
    return bounds


class Pooling:
    """Sums or means of the rows of a look-up, and the backward; weights are constants here.

    Args:
        bags: whose ids the look-up holds.
        lookup: of them.
        mean: divide by the size of each bag.
    """

    def __init__(self, bags: Bags, lookup: Lookup, mean: bool) -> None:
        self._bags, self._lookup = bags, lookup
        self._dim, self._dtype = lookup.shape.dim, lookup.dtype
        if bags.count * self._dim >= 1 << 32:
            raise ValueError(f"{bags.count} bags of {self._dim} values: at most 2**32 values can be pooled at a time")
        self._kernels = pool.kernels(self._dim, STORAGE[self._dtype])
        offsets = 0 if bags.offsets is None else bags.offsets.data_ptr()
        self._feature = np.array(
            [0, lookup.num_ids, offsets, bags.size, bags.count, 0, self._dim, mean], np.int64
        )  # fmt: skip
        self._factors = self._weigh() if bags.weights is not None or (mean and bags.size != 1) else None

    def _weigh(self) -> Tensor:
        weights = self._bags.weights
        weights = None if weights is None else weights.detach().to(self._dtype).contiguous()
        factors = torch.empty(self._lookup.num_ids, dtype=self._dtype, device="cpu")
        is_double = self._dtype == torch.float64
        address = 0 if weights is None else weights.data_ptr()
        pool.id_weights(self._feature.ctypes.data, 1, address, is_double, factors.data_ptr(), is_double)
        return factors

    def forward(self, cores: Sequence[Tensor], keep: bool) -> Tensor:
        """Makes the rows of distinct ids, and of them `[bags, D]`; `keep` as for `Lookup.rows`."""
        lookup = self._lookup
        rows = lookup.row_buffer()
        lookup.rows(cores, rows, keep)
        out = torch.empty(self._bags.count, self._dim, dtype=self._dtype, device="cpu")
        addresses = rows + np.arange(lookup.num_unique, dtype=np.int64) * (self._dim * self._dtype.itemsize)
        self._kernels.pool(
            self._feature.ctypes.data, 1, addresses.ctypes.data, lookup.num_unique, lookup.inverse,
            0 if self._factors is None else self._factors.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def backward(self, grad: Tensor) -> Tensor:
        """`[bags, D]` → `[U, D]`: the gradients of equal ids, summed in the order of the ids."""
        lookup = self._lookup
        out = torch.empty(lookup.num_unique, self._dim, dtype=self._dtype, device="cpu")
        if not lookup.num_unique:
            return out
        pointers = np.empty(lookup.num_unique + 1, np.uint32)
        cells = np.empty(lookup.num_ids, np.uint32)
        self._file(pointers, cells)
        segments = np.array([0, lookup.num_unique], np.int64)
        weights = None if self._factors is None else self._file_weights(pointers)
        self._kernels.backward(
            grad.data_ptr(), pointers.ctypes.data, cells.ctypes.data, 0 if weights is None else weights.data_ptr(),
            lookup.identity, segments.ctypes.data, 1, 1, out.data_ptr(),
        )  # fmt: skip
        return out

    def _file(self, pointers: Any, cells: Any) -> None:
        lookup = self._lookup
        pool.file_cells(
            self._feature.ctypes.data, 1, lookup.inverse, lookup.counts, lookup.num_unique, pointers.ctypes.data,
            cells.ctypes.data,
        )  # fmt: skip

    def _file_weights(self, pointers: Any) -> Tensor:
        assert self._factors is not None
        lookup, filed = self._lookup, torch.empty_like(self._factors)
        cursors = np.empty(lookup.num_unique, np.uint32)
        pool.file_weights(
            self._feature.ctypes.data, 1, lookup.inverse, pointers.ctypes.data, lookup.num_unique,
            cursors.ctypes.data, self._factors.data_ptr(), self._dtype.itemsize, filed.data_ptr(),
        )  # fmt: skip
        return filed

"""The device engine: a TensorTrainEmbeddingBag whose cores and batches are in a GPU's memory.

Whether ids and offsets are right is found on the device, where wrong ones are replaced by what kernels can read without
harm, and copied to the host beside the computation: it is looked at before gradients are made, at the next look-up, and
at once where the cores get no gradients. The host waits for that alone, which the device finds before it makes rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.ops.gpu import require_triton
from rowmesh.ops.transfer import Late
from rowmesh.tables.tensor_train import TensorTrainShape
from rowmesh.tensor_train.bags import Bags, check_arguments
from rowmesh.tensor_train.device_lookup import NO_ID, SPARSE, DeviceLookup
from rowmesh.tensor_train.lookup import refusal


class DeviceEngine:
    """A GPU: Triton's kernels.

    Args:
        device: where cores and batches are.

    Attributes:
        device: where they are.

    Raises:
        ConfigurationError: triton is not installed.
    """

    def __init__(self, device: torch.device) -> None:
        require_triton(device)
        self.device = device
        self._unread: LateCheck | None = None

    def check(self, mode: str, sparse: bool) -> None:
        """Raises ConfigurationError for what devices cannot do."""
        if mode == "max":
            raise ConfigurationError(
                "mode = 'max' is for tables on the CPU: on a GPU torch adds its gradients in no fixed order; take "
                "'sum' or 'mean', or leave the table on the CPU"
            )
        if sparse:
            raise ConfigurationError(SPARSE)

    def look_up(self, shape: TensorTrainShape, dtype: torch.dtype, ids: Tensor) -> DeviceLookup:
        """The distinct ids."""
        outside = (ids < 0) | (ids >= shape.num_rows)
        return self._look_up(shape, dtype, ids.clamp(0, shape.num_rows - 1), LateCheck(ids, outside, None, shape))

    def look_up_bags(
        self, shape: TensorTrainShape, dtype: torch.dtype, input: Tensor, offsets: Tensor | None,
        weights: Tensor | None, include_last_offset: bool, padding: int | None,
    ) -> tuple[Bags, DeviceLookup]:  # fmt: skip
        """Bags, and their distinct ids; those that belong to no bag stand last, NO_ID instead."""
        check_arguments(input, offsets, weights, include_last_offset, self.device)
        bags, disorder = _bags_of(input, offsets, weights, include_last_offset)
        bags = _without(bags, padding)
        is_used = torch.arange(bags.ids.numel(), device=self.device) < bags.bounds[-1]
        outside = is_used & ((bags.ids < 0) | (bags.ids >= shape.num_rows))
        ids = torch.where(is_used, bags.ids.clamp(0, shape.num_rows - 1), NO_ID)
        return bags, self._look_up(shape, dtype, ids, LateCheck(bags.ids, outside, disorder, shape))

    def _look_up(
        self, shape: TensorTrainShape, dtype: torch.dtype, ids: Tensor, late_check: LateCheck
    ) -> DeviceLookup:  # fmt: skip
        unread, self._unread = self._unread, None
        if unread is not None and not unread.is_told:
            unread()
        self._unread = late_check
        return DeviceLookup.distinct(shape, dtype, ids, late_check)

    def pooling(self, bags: Bags, lookup: DeviceLookup, mean: bool) -> DevicePooling:
        """From rows to bags."""
        return DevicePooling(bags, lookup, mean)


class LateCheck:
    """Whether the ids and offsets of a look-up were right, which the host learns later.

    Args:
        ids: int64 `[N]`.
        outside: bool `[N]`: which of them are no rows, of those that are looked up.
        disorder: bool `[]`: whether offsets are in disorder; None where there are none.
        shape: of the table.

    Attributes:
        is_told: whether somebody was told that they were wrong.
    """

    def __init__(self, ids: Tensor, outside: Tensor, disorder: Tensor | None, shape: TensorTrainShape) -> None:
        number = outside.sum()
        found = torch.stack([number, torch.zeros_like(number) if disorder is None else disorder.to(number.dtype)])
        self._waiting: tuple[Late, Tensor, Tensor] | None = (Late(found), ids, outside)
        self._num_rows, self._wrong, self._is_disordered = shape.num_rows, [], False
        self.is_told = False

    def __call__(self) -> None:
        """Waits, the first time, for what the device did up to there.

        Raises:
            IdRangeError: ids were outside the table.
            ValueError: offsets were in disorder.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            late, ids, outside = waiting
            num_outside, self._is_disordered = late.read()
            if num_outside:
                self._wrong = ids[outside].unique().tolist()
        self.is_told = bool(self._is_disordered or self._wrong)
        if self._is_disordered:
            raise ValueError("offsets must begin with 0, and must not decrease nor pass the number of ids")
        if self._wrong:
            raise refusal(self._wrong, self._num_rows)


class DevicePooling:
    """Sums or means of the rows of a look-up, and the backward; what `rowmesh.tensor_train.bags.Pooling` is on a CPU.

    Args:
        bags: whose ids the look-up holds.
        lookup: of them.
        mean: divide by the size of each bag.
    """

    def __init__(self, bags: Bags, lookup: DeviceLookup, mean: bool) -> None:
        from rowmesh.ops.pool import cuda

        self._kernels, self._lookup, self._count = cuda, lookup, bags.count
        self._dim, self._dtype = lookup.shape.dim, lookup.dtype
        weights = bags.weights  # a copy, as the backward reads them again: the user may change his own
        weights = None if weights is None else weights.detach().to(self._dtype, copy=True).contiguous()
        first_bound = -1 if bags.offsets is None else 0
        is_mean = int(mean and bags.size != 1)
        feature = (0, bags.ids.numel(), first_bound, bags.size, bags.count, 0, self._dim, is_mean)
        self._bags = cuda.Bags.describe([feature], bags.ids.device, bags.offsets, weights)

    def forward(self, cores: Sequence[Tensor], keep: bool) -> Tensor:
        """Makes the rows of distinct ids, and of them `[bags, D]`."""
        rows = cores[0].new_empty(self._lookup.num_unique, self._dim)
        self._lookup.rows(cores, rows, keep)
        out = cores[0].new_empty(self._count, self._dim)
        return self._kernels.pool(rows, self._lookup.inverse, self._bags, out)

    def backward(self, grad: Tensor) -> Tensor:
        """`[bags, D]` → `[N, D]`, the first U valid: the gradients of equal ids, summed in the order of the ids."""
        lookup = self._lookup
        filed = self._kernels.file_cells(
            lookup.inverse, self._bags, lookup.num_unique, self._dtype, is_covered=False
        )  # fmt: skip
        out = torch.empty(lookup.num_unique, self._dim, dtype=self._dtype, device=grad.device)
        return self._kernels.backward(grad, filed, out, lookup.num_distinct)


def _bags_of(
    input: Tensor, offsets: Tensor | None, weights: Tensor | None, include_last_offset: bool
) -> tuple[Bags, Tensor | None]:  # fmt: skip
    """Bags of checked arguments, and whether offsets are in disorder; bounds are in order in any case."""
    ids = input.reshape(-1).to(torch.int64).contiguous()
    weights = None if weights is None else weights.reshape(-1)
    if offsets is None:
        return Bags(ids, None, input.shape[1], input.shape[0], weights), None
    num_ids = ids.numel()
    given = offsets.to(torch.int64)
    if not include_last_offset:
        given = torch.cat([given, torch.full_like(given[:1], num_ids)]) if given.numel() else given.new_zeros(1)
    if given.numel() == 1:  # without a bag no id belongs to one
        ids, weights = ids[:0], None if weights is None else weights[:0]
    disorder = (given[0] != 0) | (given[-1] > num_ids) | (given.diff() < 0).any()
    bounds = given.clamp(0, num_ids)
    bounds[:1].zero_()
    return Bags(ids, bounds.cummax(0).values, 0, bounds.numel() - 1, weights), disorder


def _without(bags: Bags, padding: int | None) -> Bags:
    """The same bags without the ids that only pad, which go to the end, past all bags."""
    if padding is None:
        return bags
    is_padding = bags.ids == padding
    order = torch.sort(is_padding.to(torch.uint8), stable=True).indices
    kept = is_padding.logical_not().cumsum(0)
    before = torch.cat([kept.new_zeros(1), kept])
    weights = None if bags.weights is None else bags.weights[order]
    return Bags(bags.ids[order], before[bags.bounds], 0, bags.count, weights)

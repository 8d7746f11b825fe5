"""Arguments of `nn.EmbeddingBag.forward`: checked, and as bags of ids."""

from __future__ import annotations

import torch
from torch import Tensor

from rowmesh.ops.pool.one_feature import Bags
from rowmesh.ops.prefixes import NO_ID, refusal
from rowmesh.ops.transfer import Late

MODES = ("sum", "mean", "max")


def bags_of(input: Tensor, offsets: Tensor | None, weights: Tensor | None, includes_last: bool) -> Bags:
    """Bags of checked arguments on a CPU; ids past the last bag are left out.

    Raises:
        ValueError: offsets are in disorder.
    """
    ids = input.reshape(-1).to(torch.int64).contiguous()
    weights = None if weights is None else weights.reshape(-1)
    if offsets is None:
        return Bags(ids, None, input.shape[1], input.shape[0], weights)
    bounds = _bounds(offsets.to(torch.int64), ids.numel(), includes_last)
    used = int(bounds[-1])  # ids past the last bag belong to none
    return Bags(ids[:used], bounds, 0, bounds.numel() - 1, None if weights is None else weights[:used])


def without(bags: Bags, padding: int | None) -> Bags:
    """The same bags on a CPU without the ids that only pad."""
    if padding is None:
        return bags
    kept = bags.ids != padding
    if bool(kept.all()):
        return bags
    before = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), kept.cumsum(0)])
    weights = None if bags.weights is None else bags.weights[kept]
    return Bags(bags.ids[kept], before[bags.bounds], 0, bags.count, weights)


def _bounds(offsets: Tensor, num_ids: int, includes_last: bool) -> Tensor:
    if not includes_last:
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


def device_bags_of(
    input: Tensor, offsets: Tensor | None, weights: Tensor | None, includes_last: bool
) -> tuple[Bags, Tensor | None]:
    """Bags of checked arguments on a device, and whether offsets are in disorder; bounds are in order in any case.

    Ids past the last bag stay: how many there are the host does not know.
    """
    ids = input.reshape(-1).to(torch.int64).contiguous()
    weights = None if weights is None else weights.reshape(-1)
    if offsets is None:
        return Bags(ids, None, input.shape[1], input.shape[0], weights), None
    num_ids = ids.numel()
    given = offsets.to(torch.int64)
    if not includes_last:
        given = torch.cat([given, torch.full_like(given[:1], num_ids)]) if given.numel() else given.new_zeros(1)
    if given.numel() == 1:  # without a bag no id belongs to one
        ids, weights = ids[:0], None if weights is None else weights[:0]
    disorder = (given[0] != 0) | (given[-1] > num_ids) | (given.diff() < 0).any()
    bounds = given.clamp(0, num_ids)
    bounds[:1].zero_()
    return Bags(ids, bounds.cummax(0).values, 0, bounds.numel() - 1, weights), disorder


def padding_last(bags: Bags, padding: int | None) -> Bags:
    """The same bags on a device with the ids that only pad at the end, past all bags."""
    if padding is None:
        return bags
    is_padding = bags.ids == padding
    order = torch.sort(is_padding.to(torch.uint8), stable=True).indices
    kept = is_padding.logical_not().cumsum(0)
    before = torch.cat([kept.new_zeros(1), kept])
    weights = None if bags.weights is None else bags.weights[order]
    return Bags(bags.ids[order], before[bags.bounds], 0, bags.count, weights)


def bounded(bags: Bags, num_rows: int) -> tuple[Tensor, Tensor]:
    """The ids of bags on a device, none of which harms kernels, and which of them were no rows, bool `[N]`.

    Ids that belong to no bag are NO_ID.
    """
    is_used = torch.arange(bags.ids.numel(), device=bags.ids.device) < bags.bounds[-1]
    outside = is_used & ((bags.ids < 0) | (bags.ids >= num_rows))
    return torch.where(is_used, bags.ids.clamp(0, num_rows - 1), NO_ID), outside


class LateBagCheck:
    """Whether the ids and offsets of a look-up on a device were right, which the host learns later.

    Args:
        ids: int64 `[N]`.
        outside: bool `[N]`: which of them are no rows, of those that are looked up.
        disorder: bool `[]`: whether offsets are in disorder; None where there are none.
        num_rows: of the table.

    Attributes:
        was_raised: whether an error said that they were wrong.
    """

    def __init__(self, ids: Tensor, outside: Tensor, disorder: Tensor | None, num_rows: int) -> None:
        number = outside.sum()
        found = torch.stack([number, torch.zeros_like(number) if disorder is None else disorder.to(number.dtype)])
        self._waiting: tuple[Late, Tensor, Tensor] | None = (Late(found), ids, outside)
        self._num_rows, self._wrong, self._is_disordered = num_rows, [], False
        self.was_raised = False

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
        self.was_raised = bool(self._is_disordered or self._wrong)
        if self._is_disordered:
            raise ValueError("offsets must begin with 0, and must not decrease nor pass the number of ids")
        if self._wrong:
            raise refusal(self._wrong, self._num_rows)


def check_arguments(
    input: Tensor, offsets: Tensor | None, weights: Tensor | None, includes_last: bool, device: torch.device
) -> None:
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
    if offsets is not None and includes_last and not offsets.numel():
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

"""The frozen window, counted: how many rows a rank fetches before and pushes after each of its micro-batches.

`rowmesh.exchange.window` says how rows travel: unsplit, naive and delta.

Source: NestPipe §V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowmesh.exchange.window import Form
from rowmesh.pipeline.cutter import BatchRows


@dataclass(frozen=True)
class WindowRows:
    """Distinct rows of a batch by micro-batch. Every tuple has one number a micro-batch.

    Attributes:
        own: rows that the micro-batch has.
        first: rows that it has and no earlier one.
        last: rows that it has and no later one.
    """

    own: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """U, the distinct rows of the batch."""
        return sum(self.first)

    def fetched(self, exchange: Form) -> tuple[int, ...]:
        """Rows fetched for each micro-batch, before it is computed."""
        if exchange == "unsplit":
            return (self.num_rows, *(0 for _ in self.own[1:]))
        return self.own if exchange == "naive" else self.first

    def pushed(self, exchange: Form) -> tuple[int, ...]:
        """Rows whose gradient is pushed after each micro-batch."""
        if exchange == "unsplit":
            return (*(0 for _ in self.own[1:]), self.num_rows)
        return self.own if exchange == "naive" else self.last


def count_window(rows: BatchRows, sizes: Sequence[int], order: Tensor | None = None) -> WindowRows:
    """Counts what the micro-batches of a batch share.

    Args:
        rows: of the batch.
        sizes: samples of each micro-batch, B together.
        order: int64 `[B]`, the samples as `rowmesh.ops.cluster` returns them; None for their own order.

    Raises:
        ValueError: the sizes are of another number of samples, or the order does not have each sample once.

    Example:
        >>> rows = BatchRows(torch.tensor([0, 1, 0, 2]), torch.tensor([2, 1, 1]), bags=1, batch_size=4)
        >>> window = count_window(rows, [2, 2])  # the samples have rows 0, 1, 0 and 2
        >>> window.fetched("naive"), window.fetched("delta"), window.fetched("unsplit")
        ((2, 2), (2, 1), (3, 0))
        >>> count_window(rows, [2, 2], torch.tensor([0, 2, 1, 3])).fetched("naive")
        (1, 2)
    """
    if sum(sizes) != rows.batch_size or not sizes:
        raise ValueError(f"sizes {list(sizes)} add up to {sum(sizes)}; the batch has {rows.batch_size} samples")
    if order is not None and order.sort().values.tolist() != list(range(rows.batch_size)):
        raise ValueError(f"the order must have each of the {rows.batch_size} samples once, got {order.numel()} samples")
    has = torch.zeros(len(sizes), rows.num_rows, dtype=torch.bool, device="cpu")
    has[_part_of_keys(rows, sizes, order), rows.keys.long()] = True
    return WindowRows(
        own=tuple(has.sum(1).tolist()),
        first=tuple(_not_before(has).sum(1).tolist()),
        last=tuple(_not_before(has.flip(0)).sum(1).flip(0).tolist()),
    )


def _part_of_keys(rows: BatchRows, sizes: Sequence[int], order: Tensor | None) -> Tensor:
    """The micro-batch of each key, int64 `[N]`."""
    part = torch.arange(len(sizes), device="cpu").repeat_interleave(torch.tensor(sizes, device="cpu"))
    part_of_sample = part if order is None else torch.empty_like(part).index_copy_(0, order, part)
    if isinstance(rows.bags, int):
        num_bags = rows.keys.numel() // max(rows.bags, 1)
        lengths = torch.full((num_bags,), rows.bags, device="cpu")
    else:
        lengths = rows.bags.diff()
    num_features = lengths.numel() // max(rows.batch_size, 1)
    return part_of_sample.repeat(num_features).repeat_interleave(lengths)


def _not_before(has: Tensor) -> Tensor:
    """Of bool `[micro-batches, U]`, what no earlier micro-batch has."""
    earlier = has.cumsum(0) - has.long()
    return has & (earlier == 0)

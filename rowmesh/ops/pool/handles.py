"""Handles of bags and of cells filed by rows, as kernels on a GPU read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rowmesh.ops.gpu import check
from rowmesh.ops.pool.cpu import DESCRIPTOR

WIDEST = 16  # elements: 16 bytes of any type, and more


@dataclass(frozen=True, eq=False)
class Bags:
    """How the ids of a batch form bags, and where the vectors of bags belong.

    Attributes:
        features: int64 `[F, 8]`, the descriptors of features.
        offsets: int64, the bounds of bags; None where no feature has any.
        weights: `[N]`, float32 or float64: factors of ids, or None.
        num_bags: the most bags of a feature.
        has_mean: whether any feature is a mean.
        is_single: whether every bag has one id.
        alignment: every vector of the output begins at a multiple of so many elements; a power of two.
    """

    features: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    num_bags: int
    has_mean: bool
    is_single: bool
    alignment: int

    @classmethod
    def describe(
        cls,
        features: Sequence[Sequence[int]],
        device: torch.device,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Bags:
        """Takes descriptors to the device, without waiting for it.

        Args:
            features: one feature or more, each as eight numbers::

                    ids_begin  ids_end  offsets  bag_size  num_bags  first_cell  stride  mean

                `offsets` is where its `num_bags` + 1 bounds begin in the tensor of that name (only their differences
                count), or −1 where every bag has `bag_size` ids. The vector of bag i begins at element first_cell +
                i · stride of the output; ids that are not pooled are bags of one. `mean` is 1 where sums are divided
                by the number of ids.
            device: of everything.
            offsets, weights: as above.
        """
        table = torch.tensor(features, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        if table.dim() != 2 or table.shape[1] != DESCRIPTOR:
            raise ValueError(f"a feature has {DESCRIPTOR} numbers, got a table of shape {list(table.shape)}")
        common = math.gcd(WIDEST, *(number for feature in features for number in feature[5:7]))
        return cls(
            table.to(device, non_blocking=True),
            offsets,
            weights,
            num_bags=max(feature[4] for feature in features),
            has_mean=any(feature[7] for feature in features),
            is_single=all(feature[2] < 0 and feature[3] == 1 for feature in features),
            alignment=common,
        )

    @property
    def has_factors(self) -> bool:
        """Whether rows are multiplied before they are added."""
        return self.has_mean or self.weights is not None

    def check(self, num_ids: int, device: torch.device) -> None:
        """Raises where the kernels could not read them.

        Raises:
            TypeError: a dtype is wrong.
            ValueError: a shape, layout or device does not fit.
        """
        check("features", self.features, (torch.int64,), 2, device)
        if self.offsets is not None:
            check("offsets", self.offsets, (torch.int64,), 1, device)
        if self.weights is not None:
            check("weights", self.weights, (torch.float32, torch.float64), 1, device)
            if self.weights.numel() != num_ids:
                raise ValueError(f"{num_ids} ids need as many weights, got {self.weights.numel()}")


@dataclass(frozen=True, eq=False)
class FiledCells:
    """The inverse by rows: row u went into `cells[pointers[u]:pointers[u + 1]]`, in the order of the ids.

    Attributes:
        rows: int32 `[N]`: the row of each entry, ascending.
        pointers: int32 `[U + 1]`; N for rows that do not occur.
        cells: int64 `[N]`: elements of the output.
        factors: `[N]` of the type of the arithmetic, or None.
        alignment: all cells are multiples of it.
    """

    rows: Tensor
    pointers: Tensor
    cells: Tensor
    factors: Tensor | None
    alignment: int

    def of_first(self, num_rows: int) -> FiledCells:
        """The same where it has become known that there are no more rows than so many."""
        return replace(self, pointers=self.pointers[: num_rows + 1])

"""Handle of distinct tensor-train ids on a device, where also their number stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rowmesh.ops.segment_unique.cuda import Unique

NO_ID = -1  # is no row of any table: has no part in anything


@dataclass(frozen=True)
class Arrangement:
    """Ids sorted by prefix and slice of the second core; everything on the device.

    Attributes:
        row_factors: p₁, p₂, p₃.
        order: int64 `[N]`: the position of each sorted id among the ids.
        prefixes: int32 `[N]`: which prefix each sorted id has; −1 past the last one.
        lasts: int32 `[N]`: i₃ of each; p₃ past the last one.
        starts: int32 `[N + 1]`: where each prefix begins; the first `num_prefixes + 1` are valid.
        firsts: int32 `[P]`: i₁ of each prefix; p₁ past the last one. P is N, or p₁·p₂ if less.
        group_starts: int32 `[p₂ + 1]`: where the prefixes of each i₂ begin.
        num_prefixes: int32 `[1]`.

    Ids that are no rows have no part in it.
    """

    row_factors: tuple[int, int, int]
    order: Tensor
    prefixes: Tensor
    lasts: Tensor
    starts: Tensor
    firsts: Tensor
    group_starts: Tensor
    num_prefixes: Tensor


@dataclass(eq=False)
class DevicePrefixes:
    """Distinct ids of one table on a device, sorted by prefix and by slice of the second core.

    Attributes:
        arrangement: of the ids; `order` counts from where their rows begin.
        num_rows: of the table.
        ids: int64 `[N]`, of which the first ones are valid.
        num: int `[1]`: how many.
        first: int64 `[1]`: where their rows and gradients begin among those of several tables; None where there is one.
        unique: where ids may have been equal, what was found of them.
        products: of all prefixes with some cores, where they are kept.
    """

    arrangement: Arrangement
    num_rows: int
    ids: Tensor
    num: Tensor
    first: Tensor | None = None
    unique: Unique | None = None
    products: Tensor | None = None

    @property
    def num_unique(self) -> int:
        """N, the most that there can be."""
        return self.ids.numel()

    @property
    def inverse(self) -> Tensor:
        """int32 `[N]`: which distinct id each id is, where ids may have been equal."""
        assert self.unique is not None
        return self.unique.inverse

    def inverse_ids(self) -> Tensor:
        """int64 `[N]`: the same."""
        return self.inverse.long()

    def id_counts(self) -> Tensor:
        """int32 `[N]`: how often each distinct id occurs; the first ones are valid."""
        assert self.unique is not None
        return self.unique.counts

    def mark_touched(self, out: Sequence[Tensor]) -> None:
        """Sets the elements of slices that any id reads to 1, others to 0; `out` has an element a slice."""
        _mark(self.arrangement.firsts, out[0])
        out[1].copy_(self.arrangement.group_starts.diff() > 0)
        _mark(self.arrangement.lasts, out[2])


def _mark(slices: Tensor, out: Tensor) -> None:
    """Sets the elements of `out` that are named to 1, the others to 0; past its end is named what is none."""
    marks = torch.zeros(len(out) + 1, dtype=out.dtype, device=out.device)
    out.copy_(marks.index_fill_(0, slices.long(), 1)[:-1])

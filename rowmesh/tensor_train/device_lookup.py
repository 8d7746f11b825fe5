"""One look-up on a device: its distinct ids in the order that the kernels want, with what its backward needs.

What `rowmesh.tensor_train.lookup` is on a CPU. How many distinct ids there are stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.tables.tensor_train import TensorTrainShape

if TYPE_CHECKING:
    from rowmesh.ops.segment_unique.cuda import Unique

NO_ID = -1  # is no row of any table: has no part in anything


class DeviceLookup:
    """Distinct ids of one table, sorted by prefix and by slice of the second core.

    Args:
        shape: of the table.
        dtype: of its cores.
        ids: int64 `[N]`, of which the first ones are valid; they are distinct.
        count: int `[1]`: how many.
        first: int64 `[1]`: where their rows and gradients begin among those of several tables; None where there is one.

    Attributes:
        num_unique: N, the most that there can be.
    """

    def __init__(
        self, shape: TensorTrainShape, dtype: torch.dtype, ids: Tensor, count: Tensor, first: Tensor | None = None
    ) -> None:  # fmt: skip
        from rowmesh.ops.tensor_train import cuda

        self.shape, self.dtype, self.num_unique = shape, dtype, ids.numel()
        self._unique: Unique | None = None
        self._late_check: Callable[[], None] | None = None
        self._kernels, self._ids, self._count, self._first = cuda, ids, count, first
        self._products: Tensor | None = None
        self._arrangement = cuda.arrange(ids, shape.row_factors, shape.num_rows, count)
        if first is not None:
            self._arrangement = replace(self._arrangement, order=self._arrangement.order + first)

    @classmethod
    def distinct(
        cls, shape: TensorTrainShape, dtype: torch.dtype, ids: Tensor, late_check: Callable[[], None] | None = None
    ) -> DeviceLookup:  # fmt: skip
        """Of int64 `[N]` ids that may be equal; those that are no rows have no part in anything.

        Args:
            shape: of the table.
            dtype: of its cores.
            ids: of any values.
            late_check: what `check` does, once.
        """
        from rowmesh.ops.segment_unique.cuda import segment_unique

        # One segment; from the host its bounds would have to be copied.
        bounds = torch.arange(2, device=ids.device) * ids.numel()
        unique = segment_unique(ids, bounds)
        lookup = cls(shape, dtype, unique.unique, unique.num_unique)
        lookup._unique, lookup._late_check = unique, late_check
        return lookup

    @classmethod
    def merged(cls, taken: Sequence[tuple[DeviceLookup, Tensor]]) -> tuple[DeviceLookup, Tensor]:
        """Several look-ups in one table, with the gradients of their rows, as one: those of equal ids are summed.

        The sums are in the order of the look-ups.
        """
        from rowmesh.ops.merge_update.cuda import merge, sum_merged

        first = taken[0][0]
        lookup = cls.distinct(first.shape, first.dtype, torch.cat([each._valid_ids() for each, _ in taken]))
        entries = torch.cat([each._own(gradients) for each, gradients in taken])
        # Distinct ids are numbered from 0 without a gap, so that sums by ascending number are in their order.
        return lookup, sum_merged(merge(lookup.inverse), entries, torch.empty_like(entries))

    def check(self) -> None:
        """Raises what is wrong with the ids, where whoever looked up has not bounded them."""
        if self._late_check is not None:
            self._late_check()

    def inverse_ids(self) -> Tensor:
        """int64 `[N]`: which distinct id each id is."""
        return self.inverse.long()

    def id_counts(self) -> Tensor:
        """int32 `[N]`: how often each distinct id occurs; the first ones are valid."""
        assert self._unique is not None
        return self._unique.counts

    @property
    def inverse(self) -> Tensor:
        """int32 `[N]`: which distinct id each id is, where ids may have been equal."""
        assert self._unique is not None
        return self._unique.inverse

    @property
    def num_distinct(self) -> Tensor:
        """Int `[1]`: how many there are."""
        return self._count

    def rows(self, cores: Sequence[Tensor], out: Tensor, keep: bool) -> None:
        """Writes the row of each distinct id; keeps the products for the backward, where asked to.

        Args:
            cores: of the table.
            out: `[M, D]`, of which the rows of this table's ids are written.
            keep: whether a backward may come.
        """
        _, products = self._kernels.forward(cores, self._arrangement, out)
        self._products = products if keep else None

    def new_rows(self, cores: Sequence[Tensor], keep: bool) -> Tensor:
        """As `rows`, `[N, D]` in memory of its own; zero where there is no distinct id."""
        out = torch.zeros(self.num_unique, self.shape.dim, dtype=self.dtype, device=self._ids.device)
        self.rows(cores, out, keep)
        return out

    def release_products(self) -> None:
        """Frees the products of prefixes; a second backward makes them again."""
        self._products = None

    def gradients(self, cores: Sequence[Tensor], row_gradients: Tensor, sparse: bool) -> tuple[Tensor, ...]:
        """The gradients of the cores, dense.

        Args:
            cores: of the table.
            row_gradients: of the rows of the distinct ids, where `rows` wrote them; contiguous.
            sparse: must be False.
        """
        if sparse:
            raise ConfigurationError(SPARSE)
        return self._kernels.backward(cores, self._arrangement, self._products_of(cores), row_gradients)

    def fill_gradients(self, cores: Sequence[Tensor], row_gradients: Tensor, out: Sequence[Tensor]) -> None:
        """Writes the gradients of the cores into contiguous tensors of their shapes."""
        self._kernels.backward(cores, self._arrangement, self._products_of(cores), row_gradients, out)

    def fill_touched(self, out: Sequence[Tensor]) -> None:
        """Sets the elements of slices that any id reads to 1, others to 0; of each core a tensor."""
        arranged = self._arrangement
        _mark(arranged.firsts, out[0])
        out[1].copy_(arranged.group_starts.diff() > 0)
        _mark(arranged.lasts, out[2])

    def update(
        self, cores: Sequence[Tensor], row_gradients: Tensor, rule: str, states: Sequence[Sequence[Tensor]],
        numbers: tuple[float, ...],
    ) -> None:  # fmt: skip
        """Updates the touched slices of the cores in place; arguments as for the CPU's."""
        self._kernels.update(
            cores, [tuple(kept) for kept in states], self._arrangement, self._products_of(cores), row_gradients, rule,
            numbers,
        )  # fmt: skip

    def _products_of(self, cores: Sequence[Tensor]) -> Tensor:
        products = self._products
        if products is None:
            products = self._products = self._kernels.multiply(cores, self._arrangement)
        return products

    def _valid_ids(self) -> Tensor:
        """The ids, NO_ID past the last one."""
        places = torch.arange(self.num_unique, device=self._ids.device)
        return torch.where(places < self._count, self._ids, NO_ID)

    def _own(self, gradients: Tensor) -> Tensor:
        """The gradients of this table's rows among those of several."""
        if self._first is None:
            return gradients
        return gradients.index_select(0, self._first + torch.arange(self.num_unique, device=gradients.device))


SPARSE = (
    "sparse gradients are as long as slices were read, which the host would have to wait for on a device; take dense "
    "ones (sparse=False), which are no longer than the cores, or TensorTrainOptimizer"
)


def _mark(slices: Tensor, out: Tensor) -> None:
    """Sets the elements of `out` that are named to 1, the others to 0; past its end is named what is none."""
    marks = torch.zeros(len(out) + 1, dtype=out.dtype, device=out.device)
    out.copy_(marks.index_fill_(0, slices.long(), 1)[:-1])

"""Look-ups on a device: tensors of torch's allocator, found there and left there.

[Note: what the host waits for]
On one rank nothing: how many unique ids there are stays on the device, and whether all ids were rows of their tables is
copied to the host beside the computation and looked at before the next update or look-up. So it is where ranks read
each other's rows. Where they send them the host waits once a batch, for the sizes that an all-to-all needs: one copy
brings them, those of the other ranks, and the counts of ids outside their tables (these alone, where all tables are
tensor-train). An evaluation, after which nothing may come, looks at once. An update of rows with copies needs the sizes
of what owners send: how many rows they merged, which is copied to the host since the look-up; so does what replicas
send each other, of which ranks that read each other's rows learn only then. Tiered tables are read from their store by
the host, and on several ranks it waits for what is asked of this one (`DeviceGroupExchange.pin_requested`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.ops.pool.handles import Bags, FiledCells
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.unshared import LeftGradient

if TYPE_CHECKING:
    from rowmesh.ops.merge_update import DeviceMerged
    from rowmesh.ops.route.cuda import DeviceMap, Routed
    from rowmesh.ops.segment_unique.cuda import Unique

CountSlots = Callable[["DeviceMerged", Tensor], None]

_BEGIN, _END, _OFFSETS, _MEAN = 0, 1, 2, 7  # of a descriptor, see `rowmesh.ops.pool.cpu`


class DeviceLookUp:
    """One batch of one group, or a run of its samples.

    Attributes:
        layout: where each feature's ids and vectors are.
        bags: the same, as kernels read it.
        unique: the unique ids of each table.
        num_unique: how many there are where the host knows it, else as many as there could be.
        num_found: how many there are, once the host looked.
        recover: int32 `[N]`: which of the fetched rows each id reads.
        routed: where each unique id is asked for, sorted; None where rows are computed.
        source: what is read, `[R, D]`: rows that were fetched, or those of the arena.
        slots: int32 `[num_unique]`: which rows of `source` were fetched; None where all, in their order.
        uniques: int32 `[num_unique]`: for which unique id each row is asked.
        order: int32 `[num_unique]`: which unique id each fetched row is of; None where they stand in their order.
        filed: the cells that every row went into, for the backward.
        gradients: `[num_unique, D]` of the rows, in the order in which they were asked for; None before the backward.
        gradient_dtype: of gradients.
        wanted: uint32 `[U]`: slots, where the host finds them (tiered tables on one rank).
    """

    source: Tensor
    unique: Unique
    uniques: Tensor

    def __init__(self, layout: GroupLayout, bags: Bags | None, recover: Tensor, dtype: torch.dtype) -> None:
        self.layout, self.bags, self.recover, self.gradient_dtype = layout, bags, recover, dtype
        self.num_unique = layout.num_ids
        self.routed: Routed | None = None
        self.num_found: int | None = None
        self.slots: Tensor | None = None
        self.order: Tensor | None = None
        self.filed: FiledCells | None = None
        self.gradients: Tensor | None = None
        self.wanted: NDArray[np.uint32] = np.empty(0, np.uint32)

    @classmethod
    def of_unique(
        cls, layout: GroupLayout, bags: Bags | None, unique: Unique, routed: Routed | None, dtype: torch.dtype
    ) -> DeviceLookUp:
        """A look-up of unique ids."""
        look_up = cls(layout, bags, unique.inverse, dtype)
        look_up.unique, look_up.routed = unique, routed
        if routed is not None:
            look_up.slots, look_up.uniques = routed.keys, routed.uniques
        return look_up

    def read_from(self, source: Tensor) -> None:
        """Takes what is read, `[R, D]`."""
        self.source = source

    def read_at(self, slots: Tensor | None) -> None:
        """Takes which rows of the source are read, int32 `[num_unique]`; None: all, in their order."""
        self.slots = slots

    def ask(self, num_unique: int, uniques: Tensor) -> None:
        """Takes how many unique ids there are, and for which of them each row is asked, int32 `[num_unique]`."""
        self.num_unique, self.uniques = num_unique, uniques

    def want(self, slots: NDArray[np.uint32]) -> None:
        """Takes the slots, uint32 `[U]`, that the host found."""
        self.wanted, self.num_unique = slots, len(slots)

    def note_found(self, count: int) -> None:
        """Takes how many unique ids there are, once the host looked."""
        self.num_found = count

    @property
    def count(self) -> Tensor:
        """Int `[1]`: how many unique ids there are."""
        return self.unique.num_unique

    @property
    def inverse(self) -> Tensor:
        """int32 `[N]`: which unique id each id is."""
        return self.unique.inverse

    @property
    def in_window(self) -> tuple[Tensor, Tensor | None]:
        """The indices that pooling reads in a window, int32 `[N]`; and the slots, None if indices are slots."""
        return self.inverse, self.slots

    @property
    def summed(self) -> Tensor:
        """The gradients, which are there after the backward."""
        assert self.gradients is not None
        return self.gradients

    @property
    def found(self) -> Routed:
        """Where each unique id is asked for."""
        assert self.routed is not None
        return self.routed

    def row_numbers(self, first: Tensor) -> Tensor:
        """Int64 `[num_found]`: the row of each gradient, counted over the tables, of which each begins at `first`."""
        count = int(self.count)
        numbers = self.unique.unique[:count]
        numbers = numbers + torch.repeat_interleave(first, self.unique.offsets.diff(), output_size=count)
        return numbers if self.order is None else numbers[self.order[:count]]

    def add_distinct(self, counts: Tensor) -> None:
        """Adds how many distinct ids of each table there are to int64 `[S]` on the device."""
        counts += self.unique.offsets.diff()

    def touched(self) -> DeviceMerged:
        """The rows of a rank alone that are to be updated, each with one gradient."""
        from rowmesh.ops.merge.cuda import singles

        assert self.slots is not None
        return singles(self.slots.to(torch.int64), self.count)

    def compose(self) -> None:
        """Has ids read the rows that were fetched, which stand in the order in which they were asked for: sorted."""
        self.order = self.uniques
        self.recover = places_in(self.order).index_select(0, self.unique.inverse)

    def compress(self, layout: GroupLayout) -> None:
        """Files the output cells of every row, for the backward; may run while rows travel."""
        if self.filed is None:
            self.filed = self._file(self.recover)

    def file(self) -> FiledCells | DeviceMerged:
        """The output cells by unique id, or by slot, for a window of one micro-batch."""
        return self._file(self.inverse)

    def _file(self, inverse: Tensor) -> FiledCells:
        from rowmesh.ops.pool import cuda

        assert self.bags is not None
        return cuda.file_cells(inverse, self.bags, self.num_unique, self.gradient_dtype)

    def pool(self, layout: GroupLayout, weights: Tensor | None, output: Tensor) -> None:
        """Writes the group's columns of the output; `bags` has the weights."""
        from rowmesh.ops.pool import cuda

        assert self.bags is not None
        cuda.pool(self.source, self.recover, self.bags, output, self.slots)

    def backward(self, layout: GroupLayout, grad: Tensor) -> None:
        """Sums the gradients of equal ids, in the order of the ids."""
        from rowmesh.ops.pool import cuda

        self.compress(layout)
        assert self.filed is not None
        self.gradients = torch.empty(
            self.num_unique, self.source.shape[1], dtype=self.gradient_dtype, device=grad.device
        )
        cuda.backward(grad, self.filed, self.gradients, self.count)
        self.filed = None

    def leave_backward(self, layout: GroupLayout, grad: Tensor) -> None:
        """Sums the gradients, too: they can be left to the update of rows that are read in place alone."""
        self.backward(layout, grad)

    def take_gradients(self) -> DeviceMerged:
        """The rows of a rank alone and their gradients, for one update."""
        return self.touched().with_gradients(self.summed)

    def drop_gradients(self) -> None:
        """The update has them, or needs none: they may be large, and the route may live on."""
        self.gradients = None

    def keep_rows(self) -> Tensor:
        """The rows that `recover` counts, for `weight_gradients`; those of the arena copied, since steps change it."""
        from rowmesh.ops.gather import cuda

        if self.slots is None:
            return self.source
        return cuda.gather(self.source, self.slots, count=self.count)

    def weight_gradients(self, layout: GroupLayout, rows: Tensor, grad: Tensor, out: Tensor) -> None:
        """Writes the gradients of the weights of the group's ids into `out`, `[ids of the batch]`."""
        self._weigh(rows, self.recover, layout, grad, out)

    def _weigh(self, rows: Tensor, inverse: Tensor, layout: GroupLayout, grad: Tensor, out: Tensor) -> None:
        from rowmesh.ops.weigh import cuda

        assert self.bags is not None
        first = int(layout.features[0, _BEGIN])  # ids of a batch on a device stand in the order of the groups
        cuda.weight_gradients(rows, inverse, self.bags, grad, out[first : first + layout.num_ids])

    def is_finite(self) -> Tensor:
        """Whether all summed gradients are finite: one boolean, on the device."""
        numbers = torch.arange(self.num_unique, device=self.summed.device)
        is_unused = numbers >= self.count  # never written
        return (self.summed.isfinite().all(1) | is_unused).all()


class InPlaceLookUp(DeviceLookUp):
    """One batch of one group on a rank alone, whose rows are read and updated where they are.

    Ids are sorted by their slots once, which brings equal ones together for the update; the look-up itself reads each
    row by its slot, and does not need to know which ids are equal.

    Args:
        layout, bags: as of a `DeviceLookUp`.
        slots: int32 `[N]`: of each id.
        dtype: of gradients.
        count_slots: adds how many distinct slots are of each table to int64 `[S]`.

    Attributes:
        by_slot: the ids by distinct slot.
    """

    def __init__(
        self, layout: GroupLayout, bags: Bags | None, slots: Tensor, dtype: torch.dtype, count_slots: CountSlots
    ) -> None:
        from rowmesh.ops.merge.cuda import merge_numbers

        super().__init__(layout, bags, slots, dtype)
        self._count_slots = count_slots
        self.by_slot = merge_numbers(slots)
        self._cells: DeviceMerged | None = None
        self._left: LeftGradient | None = None

    @property
    def count(self) -> Tensor:
        """int32 `[1]`: how many distinct ids there are."""
        return self.by_slot.num

    @property
    def inverse(self) -> Tensor:
        """int32 `[N]`: which of the distinct slots each id has; made for those who ask."""
        assert self.by_slot.order is not None
        assert self.by_slot.ranks is not None
        numbers = self.by_slot.ranks - 1
        return torch.empty_like(numbers).scatter_(0, self.by_slot.order, numbers)

    @property
    def in_window(self) -> tuple[Tensor, Tensor | None]:
        """The slot of each id, and None."""
        return self.recover, None

    def row_numbers(self, first: Tensor) -> Tensor:
        """Int64 `[num_found]`: slots, which on a rank alone tell rows apart as well."""
        return self.by_slot.slots[: int(self.count)]

    def add_distinct(self, counts: Tensor) -> None:
        """Adds how many distinct ids of each table there are, by their slots."""
        self._count_slots(self.touched(), counts)

    def touched(self) -> DeviceMerged:
        """The rows that are to be updated, each with one gradient."""
        from rowmesh.ops.merge.cuda import singles

        return singles(self.by_slot.slots, self.by_slot.num)

    def file(self) -> DeviceMerged:
        """The ids by distinct slot, with the output cell of each."""
        from rowmesh.ops.pool.cuda import file_merged

        if self._cells is None:
            assert self.bags is not None
            self._cells = file_merged(self.by_slot, self.bags, self.gradient_dtype)
        return self._cells

    def compress(self, layout: GroupLayout) -> None:
        """Finds the output cell of every id, for the backward; may be done before."""
        self.file()

    def backward(self, layout: GroupLayout, grad: Tensor) -> None:
        """Sums the gradients of equal ids, in the order of the ids."""
        self.leave_backward(layout, grad)
        self._sum()

    def leave_backward(self, layout: GroupLayout, grad: Tensor) -> None:
        """Leaves the sums to the update; the gradient, contiguous, must stay as it is until then."""
        self.file()
        self._left = LeftGradient(grad)

    def _sum(self) -> None:
        from rowmesh.ops.merge_update.cuda import sum_merged

        if self._left is not None:
            grad, self._left = self._left.take(), None
            self.gradients = grad.new_empty(self.num_unique, self.source.shape[1])
            sum_merged(self.file(), grad, self.gradients)
            self._cells = None

    @property
    def summed(self) -> Tensor:
        """The gradients by distinct slot."""
        self._sum()
        assert self.gradients is not None
        return self.gradients

    def take_gradients(self) -> DeviceMerged:
        """The rows and their gradients, for one update: which sums them, where nobody has asked for sums."""
        if self._left is None:
            return self.touched().with_gradients(self.summed)
        grad, self._left = self._left.take(), None
        cells, self._cells = self.file(), None
        return cells.with_gradients(grad)

    def drop_gradients(self) -> None:
        """The update has them, or needs none, as of frozen rows."""
        self.gradients = self._left = self._cells = None

    def keep_rows(self) -> Tensor:
        """The rows of the distinct slots, copied, since steps change them."""
        from rowmesh.ops.gather import cuda

        return cuda.gather(self.source, self.by_slot.slots, count=self.count)

    def weight_gradients(self, layout: GroupLayout, rows: Tensor, grad: Tensor, out: Tensor) -> None:
        """Writes the gradients of the weights of the group's ids into `out`, `[ids of the batch]`."""
        self._weigh(rows, self.inverse, layout, grad, out)


class DeviceLookUps:
    """The look-ups of one group.

    Args:
        device_map: where rows are asked for; None where they are computed, or the host finds them.
        dtype: of vectors and gradients.
        count_slots: adds how many distinct slots are of each table to int64 `[S]`; given where the device has all
            rows, and other ranks none, so that they are read and updated in place.

    Attributes:
        num_lent: look-ups that routes have.
    """

    num_bytes = 0  # torch's allocator has the memory

    def __init__(self, device_map: DeviceMap | None, dtype: torch.dtype, count_slots: CountSlots | None = None) -> None:
        self._map, self._dtype, self._count_slots = device_map, dtype, count_slots
        self.num_lent = 0

    def find(self, ids: Tensor, offsets: Tensor, layout: GroupLayout, bags: Bags | None) -> DeviceLookUp:
        """Finds the unique ids of a batch, and where each is asked for.

        Args:
            ids: int64 `[N]`, all of them rows, a table's after the other's.
            offsets: int64 `[S + 1]`: where those of each table begin.
            layout: of the group's features.
            bags: the same for kernels; None where there is none.
        """
        from rowmesh.ops.route.cuda import place, route
        from rowmesh.ops.segment_unique.cuda import segment_unique

        if self._count_slots is not None:
            assert self._map is not None
            self.num_lent += 1
            return InPlaceLookUp(layout, bags, place(self._map, ids, offsets), self._dtype, self._count_slots)
        unique = segment_unique(ids, offsets)
        routed = None
        if self._map is not None:
            routed = route(self._map, unique.unique, unique.offsets, unique.counts)
        self.num_lent += 1
        return DeviceLookUp.of_unique(layout, bags, unique, routed, self._dtype)

    def give_back(self, look_up: DeviceLookUp) -> None:
        """The route of a look-up is gone."""
        self.num_lent -= 1


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


def places_in(order: Tensor) -> Tensor:
    """int32: where in an order of 0 … n − 1 each number stands.

    >>> places_in(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    places = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    return torch.empty_like(places).scatter_(0, order.to(torch.int64), places)

"""Look-ups on a device: tensors of torch's allocator, found there and left there.

[Note: what the host waits for]
On one rank nothing: how many unique ids there are stays on the device, and whether all ids were rows of their tables is
copied to the host beside the computation and looked at before the next update or look-up. So it is where ranks read
each other's rows. Where they send them the host waits once a batch, for the sizes that an all-to-all needs: one copy
brings them, those of the other ranks, and the counts of ids outside their tables (these alone, where all tables are
tensor-train). An evaluation, after which nothing may come, looks at once. An update of rows with copies needs the sizes
of what owners send: how many rows they merged, which is copied to the host since the look-up; so does what replicas
send each other, of which ranks that read each other's rows learn only then. Tiered tables are read from their store by
the host, and on several ranks it waits for what is asked of this one (`GroupExchange.pin_requested`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.ops.pool.handles import Bags, FiledCells
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.streams import Mark, Stream
from rowmesh.ops.transfer import upload

if TYPE_CHECKING:
    from rowmesh.ops.route.cuda import DeviceMap, Routed
    from rowmesh.ops.segment_unique.cuda import Unique

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
    uniques: Tensor

    def __init__(
        self, layout: GroupLayout, bags: Bags | None, unique: Unique, routed: Routed | None, dtype: torch.dtype
    ) -> None:
        self.layout, self.bags, self.unique, self.routed, self.gradient_dtype = layout, bags, unique, routed, dtype
        self.num_unique, self.recover = layout.num_ids, unique.inverse
        self.num_found: int | None = None
        self.slots: Tensor | None = None
        self.order: Tensor | None = None
        self.filed: FiledCells | None = None
        self.gradients: Tensor | None = None
        self.wanted: NDArray[np.uint32] = np.empty(0, np.uint32)
        if routed is not None:
            self.slots, self.uniques = routed.keys, routed.uniques

    @property
    def summed(self) -> Tensor:
        """The gradients, which are there after the backward."""
        assert self.gradients is not None
        return self.gradients

    @property
    def places(self) -> Tensor:
        """int32 `[num_unique]`: where rows that need not travel are in the arena."""
        assert self.slots is not None
        return self.slots

    @property
    def found(self) -> Routed:
        """Where each unique id is asked for."""
        assert self.routed is not None
        return self.routed

    def compose(self) -> None:
        """Has ids read the rows that were fetched, which stand in the order in which they were asked for: sorted."""
        self.order = self.uniques
        self.recover = places_in(self.order).index_select(0, self.unique.inverse)

    def compress(self, layout: GroupLayout) -> None:
        """Files the output cells of every row, for the backward; may run while rows travel."""
        from rowmesh.ops.pool import cuda

        if self.filed is None:
            assert self.bags is not None
            self.filed = cuda.file_cells(self.recover, self.bags, self.num_unique, self.gradient_dtype)

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
        cuda.backward(grad, self.filed, self.gradients, self.unique.num_unique)
        self.filed = None

    def keep_rows(self) -> Tensor:
        """The rows that `recover` counts, for `weight_gradients`; those of the arena copied, since steps change it."""
        from rowmesh.ops.gather import cuda

        if self.slots is None:
            return self.source
        return cuda.gather(self.source, self.slots, count=self.unique.num_unique)

    def weight_gradients(self, layout: GroupLayout, rows: Tensor, grad: Tensor, out: Tensor) -> None:
        """Writes the gradients of the weights of the group's ids into `out`, `[ids of the batch]`."""
        from rowmesh.ops.weigh import cuda

        assert self.bags is not None
        first = int(layout.features[0, _BEGIN])  # ids of a batch on a device stand in the order of the groups
        cuda.weight_gradients(rows, self.recover, self.bags, grad, out[first : first + layout.num_ids])

    def is_finite(self) -> Tensor:
        """Whether all summed gradients are finite: one boolean, on the device."""
        numbers = torch.arange(self.num_unique, device=self.summed.device)
        is_unused = numbers >= self.unique.num_unique  # never written
        return (self.summed.isfinite().all(1) | is_unused).all()


class DeviceLookUps:
    """The look-ups of one group.

    Args:
        device_map: where rows are asked for; None where they are computed.
        dtype: of vectors and gradients.

    Attributes:
        num_lent: look-ups that routes have.
    """

    num_bytes = 0  # torch's allocator has the memory

    def __init__(self, device_map: DeviceMap | None, dtype: torch.dtype) -> None:
        self._map, self._dtype = device_map, dtype
        self.num_lent = 0

    def find(self, ids: Tensor, offsets: Tensor, layout: GroupLayout, bags: Bags | None) -> DeviceLookUp:
        """Finds the unique ids of a batch, and where each is asked for.

        Args:
            ids: int64 `[N]`, all of them rows, a table's after the other's.
            offsets: int64 `[S + 1]`: where those of each table begin.
            layout: of the group's features.
            bags: the same for kernels; None where there is none.
        """
        from rowmesh.ops.route.cuda import route
        from rowmesh.ops.segment_unique.cuda import segment_unique

        unique = segment_unique(ids, offsets)
        routed = None
        if self._map is not None:
            routed = route(self._map, unique.unique, unique.offsets, unique.counts)
        self.num_lent += 1
        return DeviceLookUp(layout, bags, unique, routed, self._dtype)

    def give_back(self, look_up: DeviceLookUp) -> None:
        """The route of a look-up is gone."""
        self.num_lent -= 1


class DeviceIds:
    """The ids of a batch on a device, those outside their table made the row that its policy names.

    Where the policy is to refuse them that is row 0; how many there were stays on the device until the host reads the
    sizes, before anything is updated.

    Args:
        limits: rows of the table of each feature.
        substitutes: the row that ids outside it are made, or None where they are refused.
        device: where.

    Attributes:
        refuses: bool `[F]` on the device: where there is none.
    """

    def __init__(self, limits: Sequence[int], substitutes: Sequence[int | None], device: torch.device) -> None:
        self._device = device
        self._limits = torch.tensor(limits, device=device)
        self._substitutes = torch.tensor([row or 0 for row in substitutes], device=device)
        self.refuses = torch.tensor([row is None for row in substitutes], device=device)

    def offsets_room(self, count: int) -> Tensor:
        """Memory for offsets, from which the device copies without the host."""
        return torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda")

    def bound(self, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """The rows; and how many ids of each feature were none, int64 `[F]`.

        Args:
            ids: int64 `[N]` on the device.
            offsets: int64 `[F + 1]` on the device: where those of each feature begin.
        """
        from rowmesh.ops.bound_ids.cuda import bound_ids

        outside = torch.zeros_like(self._limits)
        return bound_ids(ids, offsets, self._limits, self._substitutes, torch.empty_like(ids), outside), outside

    def upload(self, tensor: Tensor) -> Tensor:
        """A copy on the device; the host goes on."""
        return upload(tensor, self._device)

    def mark(self) -> Mark:
        """What was asked of the current stream so far."""
        return Stream.current(self._device).mark()

    def wait_for(self, mark: Mark) -> None:
        """What is asked of the current stream from now on begins when a mark has passed; the host goes on."""
        if not mark.has_passed:
            Stream.current(self._device).wait_for([mark])

    def bags(self, layout: GroupLayout, first_bags: np.ndarray, offsets: Tensor | None) -> Bags:
        """The bags of a group, or of a run of its samples, whose ids then stand together; without weights.

        Args:
            layout: of the group's features.
            first_bags: int64 `[F]`: where the bounds of each feature's bags begin among those of the batch.
            offsets: of all bags of the batch; None where they are equally long.
        """
        return Bags.describe(descriptors(layout, first_bags), self._device, offsets)


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

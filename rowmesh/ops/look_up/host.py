"""Look-ups in the host's memory: one piece of memory a batch, lent to a route and reused when the route is gone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.ops import pool as ops
from rowmesh.ops.memory import Buffer, Memory, Scratch, held_bytes, round_up
from rowmesh.ops.merge_update.handles import Unsummed, UnsummedBySource
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.route import route
from rowmesh.ops.segment_unique.cpu import SegmentHash
from rowmesh.ops.simd import COMPUTE_DTYPE, STORAGE
from rowmesh.ops.unshared import LeftGradient
from rowmesh.ops.weigh import kernels as weighing_kernels

_numbers = itertools.count()  # identifies send buffers for as long as the process lives
_STRIDE = 8 * ops.DESCRIPTOR
_KEY_BYTES = 4


def slots_offset(world_size: int, num_segments: int) -> int:
    """Where the slots begin in the lists of a send buffer, in bytes."""
    return round_up(8 * world_size * (2 * num_segments + 1), 64)


class SendBuffer:
    """The memory that a rank lays out for the owners of rows: lists of slots, and the gradients of these slots.

    Lists: segment offsets int64 `[W, S + 1]`, accesses int64 `[W, S]`, slots uint32 `[U]` sorted by (owner, segment).
    Gradients: `[U, D]` in the same order. Each part grows by being made anew, which changes its generation.

    Args:
        allocate: makes memory, private or such as other ranks can map.
        world_size, num_segments: W and S.
    """

    def __init__(self, allocate: Callable[[int], Memory], world_size: int, num_segments: int) -> None:
        self.number = next(_numbers)
        self._allocate = allocate
        self._shape = (world_size, num_segments)
        self.slots_offset = slots_offset(world_size, num_segments)
        self.generation = 0
        self.lists: Memory = allocate(self.slots_offset + 4096)
        self.gradients: Memory = allocate(4096)
        self._map_lists()

    def _map_lists(self) -> None:
        world_size, num_segments = self._shape
        self.num_slots = (self.lists.num_bytes - self.slots_offset) // _KEY_BYTES  # that there is room for
        self.slots_address = self.lists.address + self.slots_offset
        accesses = 8 * world_size * (num_segments + 1)
        self.accesses_address = self.lists.address + accesses
        self.segment_offsets = self.lists.array(np.int64, world_size, num_segments + 1)
        self.accesses = self.lists.array(np.int64, world_size, num_segments, offset=accesses)

    def reserve_lists(self, num_slots: int) -> None:
        """Makes room for so many slots. Contents are lost where it has to grow."""
        if num_slots > self.num_slots:
            needed = self.slots_offset + _KEY_BYTES * num_slots
            self.lists = self._allocate(needed + needed // 4)
            self.generation += 1
            self._map_lists()

    def reserve_gradients(self, num_bytes: int) -> None:
        """Makes room for gradients. Contents are lost where it has to grow."""
        if num_bytes > self.gradients.num_bytes:
            self.gradients = self._allocate(num_bytes + num_bytes // 4)
            self.generation += 1

    @property
    def num_bytes(self) -> int:
        """All memory held."""
        return self.lists.num_bytes + self.gradients.num_bytes


class HostLookUp:
    """One batch of one group.

    Attributes:
        send: what is asked of the owners, and the gradients for them.
        inverse: address of uint32: which unique id each id of the batch is.
        num_unique: U.
        bounds: where the requests of each destination begin, and U.
        reply_bounds: where the replies of each destination begin, and how many there are.
        is_filed: whether the output cells of every row are filed for the backward.
        uniques: address of uint32 `[U]`: which unique id each slot of the send buffer is.
        addresses: address of int64 `[U]`: where its row is.
        received: `[U, D]`: rows that had to be copied here.
        relayed: rows of other nodes that any rank of this node asked this one for, as a node leader.
        requests: uint32: slots that other ranks asked of this one.
        replies: rows sent to other ranks, then gradients received from them.
        waiting: a gradient of the output that is still to be summed, and the address of its factors.
    """

    def __init__(self, of: HostLookUps, send: SendBuffer) -> None:
        self._of, self.send = of, send
        self.inverse = self.num_unique = self._batch_ids = 0
        self.bounds: list[int] = []
        self.reply_bounds: list[int] = []
        self.reply_offsets = np.zeros(of.world_size + 1, np.int64)
        self.reply_address: int = self.reply_offsets.ctypes.data
        self.received, self.relayed, self.requests, self.replies = Scratch(), Scratch(), Scratch(), Scratch()
        self.factors = Scratch()  # [N]: the factor of each id, where sums are weighted
        self._weights = Scratch()  # [ids of the group]: the factors in the order of the cells
        self.num_ids = -1
        self.make_room(0)
        self.is_filed = False
        self.waiting: tuple[LeftGradient, int] | None = None

    def make_room(self, num_ids: int) -> None:
        """For all that depends on the number of ids; contents are lost."""
        num_ids += num_ids // 4
        sizes = (4, 4, 8, 4, 4, 4)
        parts = [round_up(size * (num_ids + 1), 64) for size in sizes]
        self._memory, self.num_ids = Buffer(sum(parts)), num_ids
        ends = itertools.accumulate(parts, initial=self._memory.address)
        self.counts, self.uniques, self.addresses, self.pointers, self.cells, self._cursors, _ = ends

    def place(self, unique: UniqueIds, inverse: int, num_ids: int) -> bool:
        """Finds where each unique id is asked for; false, and given back, where an id is not a row of its table.

        Args:
            unique: of `HostLookUps.find_unique`, which are given back; they may have become rows meanwhile.
            inverse: address of uint32 `[N]`, as there.
            num_ids: N, of the batch.
        """
        of, send = self._of, self.send
        try:
            found = int(unique.offsets[-1])
            if found > send.num_slots:
                send.reserve_lists(found)
            received = self.received.reserve(found * of.row_bytes) if of.has_remote else 0
            refused = route(
                of.header_address,
                unique.ids,
                unique.offsets_address,
                self.counts,
                unique.stops,
                unique.keys,
                received,
                send.slots_address,
                self.uniques,
                send.lists.address,
                send.accesses_address,
                self.reply_address,
                self.addresses,
            )
        except BaseException:  # peers know this send buffer: it must not be lost
            of.give_back(self)
            raise
        finally:
            of.idle_uniques.append(unique)
        if refused >= 0:
            of.give_back(self)
            return False
        self.inverse, self.num_unique, self._batch_ids, self.is_filed = inverse, found, num_ids, False
        self.bounds = [*send.segment_offsets[:, 0].tolist(), found]
        self.reply_bounds = self.reply_offsets.tolist()
        return True

    def take_nothing(self) -> None:
        """Asks for no row."""
        self.send.segment_offsets[:] = self.send.accesses[:] = self.reply_offsets[:] = 0
        self.inverse = self.num_unique = self._batch_ids = 0
        self.is_filed = False
        self.bounds = [0] * (self._of.world_size + 1)
        self.reply_bounds = self.reply_offsets.tolist()

    def compress(self, layout: GroupLayout) -> None:
        """Files the output cells of every row, for the backward; may run while rows travel."""
        if not self.is_filed:
            self.is_filed = True
            ops.file_cells(
                layout.address,
                layout.num_features,
                self.inverse,
                self.counts,
                self.num_unique,
                self.pointers,
                self.cells,
            )

    def pool(self, layout: GroupLayout, weights: Tensor | None, output: Tensor) -> None:
        """Writes the group's columns of the output.

        Args:
            layout: of the batch, or of a run of its samples.
            weights: of the ids of the batch, or None.
            output: where vectors go.
        """
        factors = self.weigh(layout, weights) if layout.is_weighted else 0
        self._of.kernels.pool(
            layout.address,
            layout.num_features,
            self.addresses,
            self.num_unique,
            self.inverse,
            factors,
            output.data_ptr(),
        )

    def weigh(self, layout: GroupLayout, weights: Tensor | None) -> int:
        """The factor of each id; returns their address."""
        dtype = self._of.dtype
        factors = self.factors.reserve(dtype.itemsize * self._batch_ids)
        if weights is not None and weights.dtype not in (torch.float32, torch.float64):
            weights = weights.float()
        ops.id_weights(
            layout.address,
            layout.num_features,
            0 if weights is None else weights.data_ptr(),
            weights is not None and weights.dtype == torch.float64,
            factors,
            dtype == torch.float64,
        )
        return factors

    def backward(self, layout: GroupLayout, grad: Tensor) -> None:
        """Writes the summed gradient of every row into the send buffer."""
        self.compress(layout)
        self._sum(grad, self.file_weights(layout, self.pointers) if layout.is_weighted else 0)

    def leave_backward(self, layout: GroupLayout, grad: Tensor) -> None:
        """Leaves the sums to the update, or to `sum`, where no other rank reads the send buffer.

        Args:
            layout: of the batch.
            grad: of the output, contiguous; must stay as it is until then.
        """
        assert self._of.world_size == 1
        self.compress(layout)
        weights = self.file_weights(layout, self.pointers) if layout.is_weighted else 0
        self.waiting = LeftGradient(grad), weights

    def is_waiting(self) -> bool:
        """Whether sums wait, for the update to make.

        Raises:
            RowmeshError: the gradient that they are of was changed since.
        """
        if self.waiting is None or not self.num_unique:
            return False
        self.waiting[0].take()
        return True

    def sum(self) -> None:
        """Makes sums that wait, for whoever reads the send buffer."""
        if self.waiting is not None:
            self.send.reserve_gradients(self.num_unique * self._of.gradient_bytes)  # or what waits would be lost
            self._sum(*self._take_waiting())

    @property
    def summed(self) -> Tensor:
        """The summed gradients, `[U, D]`, in the order of the send buffer."""
        self.sum()
        return self.send.gradients.tensor(self._of.dtype, self.num_unique, self._of.dim)

    def unsummed(self) -> Unsummed | None:
        """Sums that wait, for the update to make; None where none do."""
        if self.waiting is None or not self.num_unique:
            return None
        grad, weights = self._take_waiting()
        return Unsummed(
            self.num_unique,
            self.send.slots_address,
            gradient=grad,
            pointers=self.pointers,
            cells=self.cells,
            weights=weights,
            uniques=self.uniques,
        )

    def unsummed_by_source(
        self, layout: GroupLayout, grad: Tensor, ends: NDArray[np.int64], per_node: int
    ) -> UnsummedBySource:
        """The same where its bags are of several sources, which are summed one by one.

        Args:
            layout: of the batch; `weigh` has run where it is weighted.
            grad: of the output.
            ends: int64 `[sources]`: one past the last cell of each.
            per_node: so many sources are of one node.
        """
        self.compress(layout)
        weights = self.file_weights(layout, self.pointers) if layout.is_weighted else 0
        return UnsummedBySource(
            self.num_unique,
            self.send.slots_address,
            gradient=grad,
            pointers=self.pointers,
            cells=self.cells,
            weights=weights,
            uniques=self.uniques,
            ends=ends,
            per_node=per_node,
        )

    def give_back(self) -> None:
        """Drops sums that wait, when its route is gone, and may be taken again."""
        self.waiting = None
        self._of.idle.append(self)

    def _take_waiting(self) -> tuple[Tensor, int]:
        assert self.waiting is not None
        left, weights = self.waiting
        gradient = left.take()
        self.waiting = None  # last: what cannot be taken still waits
        return gradient, weights

    def _sum(self, grad: Tensor, weights: int) -> None:
        send, of = self.send, self._of
        num_bytes = self.num_unique * of.gradient_bytes
        if num_bytes > send.gradients.num_bytes:
            send.reserve_gradients(num_bytes)
        of.kernels.backward(
            grad.data_ptr(),
            self.pointers,
            self.cells,
            weights,
            self.uniques,
            send.lists.address,
            of.num_segments,
            of.world_size,
            send.gradients.address,
        )

    def keep_rows(self) -> Tensor:
        """A copy of the rows by unique id, for `weight_gradients`: a step may change them before the backward."""
        of = self._of
        rows = torch.empty(self.num_unique, of.row_bytes, dtype=torch.uint8, device="cpu")
        of.weighing.copy_rows(self.addresses, self.num_unique, rows.data_ptr())
        return rows

    def weight_gradients(self, layout: GroupLayout, rows: Tensor, grad: Tensor, out: Tensor) -> None:
        """Writes the gradients of the weights of the group's ids into `out`, `[ids of the batch]`."""
        given = layout.address, layout.num_features, rows.data_ptr(), self.inverse
        self._of.weighing.weight_gradients(*given, grad.data_ptr(), out.data_ptr())

    def file_weights(self, layout: GroupLayout, pointers: int) -> int:
        """The factors in the order of the cells; returns their address."""
        element = self._of.dtype.itemsize
        filed = self._weights.reserve(element * layout.num_ids)
        ops.file_weights(
            layout.address,
            layout.num_features,
            self.inverse,
            pointers,
            self.num_unique,
            self._cursors,
            self.factors.buffer.address,
            element,
            filed,
        )
        return filed

    def is_finite(self) -> Tensor:
        """Whether all summed gradients are finite: one boolean."""
        return self.summed.isfinite().all()

    def by_row(self) -> list[HostLookUp]:
        """Look-ups that have the gradients of all its rows summed."""
        return [self]

    @property
    def num_bytes(self) -> int:
        """All memory held."""
        return held_bytes(self) + self.send.num_bytes


class UniqueIds:
    """Unique ids of a group, and what finding them needs; lent to one look-up at a time.

    Attributes:
        ids: address of int64 `[U]`, by table.
        offsets: int64 `[tables + 1]`: where the ids of each table begin.
    """

    def __init__(self, num_rows: Sequence[int]) -> None:
        self.hash = SegmentHash(list(num_rows))
        self.offsets = np.zeros(len(num_rows) + 1, np.int64)
        self.offsets_address: int = self.offsets.ctypes.data  # asking NumPy costs more than some kernels take
        self.num_ids = -1
        self.make_room(0)

    def make_room(self, num_ids: int) -> None:
        num_ids += num_ids // 4
        parts = [round_up(size * (num_ids + 1), 64) for size in (8, 4, 4)]
        self._memory, self.num_ids = Buffer(sum(parts)), num_ids
        self.ids, self.stops, self.keys, _ = itertools.accumulate(parts, initial=self._memory.address)

    @property
    def num_bytes(self) -> int:
        return held_bytes(self) + held_bytes(self.hash)


class HostLookUps:
    """The look-ups of one group, and their memory.

    Args:
        num_rows: of each table; 0 where ids may be any number.
        tables: int64 `[F]`: which table each feature is of.
        header: the words of the group's address map that `rowmesh.ops.route` reads.
        shape: W and S.
        dim, dtype: of rows.
        allocate: makes memory for send buffers.
        kind: makes a look-up.

    Attributes:
        has_remote: whether rows have to be received; false where all can be read in place.
        dtype: of vectors and gradients.
        kernels: of pooling.
        weighing: of the gradients of weights.
        idle: look-ups that no route has, to be taken before one more is made.
        idle_uniques: unique ids that no look-up has.
        give_back: takes a look-up whose route is gone.
        header_address: of the header.
    """

    def __init__(
        self,
        num_rows: Sequence[int],
        tables: np.ndarray,
        header: np.ndarray,
        shape: tuple[int, int],
        dim: int,
        dtype: torch.dtype,
        allocate: Callable[[int], Memory],
        kind: Callable[[HostLookUps, SendBuffer], HostLookUp] = HostLookUp,
    ) -> None:
        self._kind = kind
        storage = STORAGE[dtype]
        self.world_size, self.num_segments = shape
        self.dim, self.dtype = dim, COMPUTE_DTYPE[storage]
        self.row_bytes, self.gradient_bytes = dim * dtype.itemsize, dim * self.dtype.itemsize
        self.kernels, self.weighing = ops.kernels(dim, storage), weighing_kernels(dim, storage)
        self.has_remote = self.world_size > 1
        self.idle: list[HostLookUp] = []
        self._made: list[HostLookUp] = []  # and those that routes have
        self._num_rows, self._allocate = num_rows, allocate
        self._keep = tables, header
        self._tables_address: int = tables.ctypes.data
        self.header_address: int = header.ctypes.data
        self.idle_uniques: list[UniqueIds] = []
        # A rank alone may have left sums to the update.
        self.give_back: Callable[[HostLookUp], None] = self.idle.append if self.has_remote else HostLookUp.give_back
        self._uniques: list[UniqueIds] = []

    def read_in_place(self) -> None:
        """All rows can be read where they are from now on."""
        self.has_remote = False

    def take_nothing(self) -> HostLookUp:
        """A look-up that asks for no row."""
        try:
            look_up = self.idle.pop()
        except IndexError:  # as in `find_unique`
            look_up = self._make()
        look_up.take_nothing()
        return look_up

    def _make(self) -> HostLookUp:
        made = self._kind(self, SendBuffer(self._allocate, self.world_size, self.num_segments))
        self._made.append(made)
        return made

    def find_unique(self, ids: Tensor, layout: GroupLayout, inverse: int) -> tuple[HostLookUp, UniqueIds]:
        """Finds the unique ids of a batch; they and the look-up that takes them go to `HostLookUp.place`, or to `drop`.

        Args:
            ids: int64 `[N]`, of the batch.
            layout: where those of the group's features are.
            inverse: address of uint32 `[N]`: where the inverse goes.
        """
        try:
            unique = self.idle_uniques.pop()
        except IndexError:  # asking before would not do: another thread may take the last one
            unique = UniqueIds(self._num_rows)
            self._uniques.append(unique)
        try:
            look_up = self.idle.pop()
        except IndexError:
            look_up = self._make()
        try:
            if layout.num_ids > look_up.num_ids:
                look_up.make_room(layout.num_ids)
            if layout.num_ids > unique.num_ids:
                unique.make_room(layout.num_ids)
            unique.hash(
                ids.data_ptr(),
                layout.address,
                _STRIDE,
                self._tables_address,
                len(layout.features),
                unique.ids,
                look_up.counts,
                inverse,
                unique.offsets_address,
            )
        except BaseException:  # peers know this send buffer: it must not be lost
            self.drop(look_up, unique)
            raise
        return look_up, unique

    def look_up(self, ids: Tensor, layout: GroupLayout, inverse: Scratch) -> HostLookUp:
        """Looks ids up that are rows of their tables, and those of a rank that has them; goes to `give_back`.

        Args:
            ids, layout: as for `find_unique`.
            inverse: memory for it, as long as the look-up is used.
        """
        inverse.reserve(4 * ids.numel())
        look_up, unique = self.find_unique(ids, layout, inverse.buffer.address)
        is_found = look_up.place(unique, inverse.buffer.address, ids.numel())
        assert is_found
        return look_up

    def drop(self, look_up: HostLookUp, unique: UniqueIds) -> None:
        """What `find_unique` returned is of no use any more."""
        self.idle_uniques.append(unique)
        self.give_back(look_up)

    @property
    def num_lent(self) -> int:
        """Look-ups that routes have."""
        return len(self._made) - len(self.idle)

    @property
    def num_bytes(self) -> int:
        """Memory of all look-ups, lent or idle."""
        return sum(memory.num_bytes for memory in (*self._made, *self._uniques))

"""A window of one group on a CPU: its memory, kept from window to window, and what kernels do there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.look_up import HostLookUp
from rowmesh.ops.memory import Scratch, array_at
from rowmesh.ops.merge_update import HostMerged, Merger, Singles, sum_merged
from rowmesh.ops.pool import file_cells
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.simd import COMPUTE_BYTES, FLOAT64, STORAGE, STORAGE_BYTES
from rowmesh.ops.window import cpu
from rowmesh.ops.window.order import Order


class HostWindow:
    """Memory of one window of one group, beside that of its route.

    Args:
        dim, dtype: of rows.
        num_segments: S.
        world_size, rank: W, and which one this is.
        arena: address of this rank's rows.

    Attributes:
        merger: the distinct slots that ranks ask for, once they are merged.
        merged: the same, with the sums of gradients in the place of gradients once these are summed up.
        sent, asked: requests for and of each rank.
        places: address of uint32 `[entries]`: where in the arena the row of each entry is.
        rows_in, rows_out, gradients_out, gradients_in: what travels when; none of what a rank asks of itself.
        others: uint32: slots of rows that other replicas alone change.
        is_fresh: whether gradients that travel are those of one micro-batch each: the paper's form.
    """

    def __init__(self, dim: int, dtype: torch.dtype, num_segments: int, world_size: int, rank: int, arena: int) -> None:
        storage = STORAGE[dtype]
        self._shape = num_segments, world_size
        self.rank, self._element = rank, COMPUTE_BYTES[storage]
        self._row_bytes, self._gradient_bytes = dim * STORAGE_BYTES[storage], dim * self._element
        self._arena, self._kernels = arena, cpu.kernels(dim, storage)
        self.merger = Merger(num_segments, arena, self._row_bytes)
        self.merged: HostMerged = self.merger
        self._summed = Singles()
        self._sums = Scratch()
        self._sums_shape = dim, torch.float64 if storage == FLOAT64 else torch.float32
        self._counts = Scratch()  # uint32 [U]: how often each unique id occurs in a micro-batch
        self._pointers = Scratch()  # uint32 [N, U + 1]: where the cells of each unique id begin
        self._cells = Scratch()  # uint32 [ids]: the cells, micro-batch after micro-batch
        self._unordered = Scratch()  # uint32 [U]: uses by unique id
        self._uses, self._asked_uses = Scratch(), Scratch()  # uint32 [U], [entries]: phases that use each request
        self._fetches, self._pushes = Scratch(), Scratch()  # uint32 [U]: phases of each request
        self._asked_fetches, self._asked_pushes = Scratch(), Scratch()  # the same of the entries that this rank owns
        self._places, self._expected = Scratch(), Scratch()  # uint32 [entries]: where rows are; what `verify` expects
        self._before = Scratch()  # uint32 [distinct]: the window that touched each row last
        self._bits, self._asked_bits = Scratch(), Scratch()  # which rows are final
        self._orders, self._phase_cursors = [Scratch() for _ in range(4)], Scratch()
        self._rows = Scratch()  # rows that this rank sends in one phase
        self._gradients = Scratch()  # gradients that this rank sends, phase after phase
        self._arrived = Scratch()  # gradients that came, phase after phase
        self.sent: list[int] = []
        self.asked: list[int] = []
        self.places, self.is_fresh = 0, False
        self.others = np.empty(0, np.uint32)

    def cut(self, batch: HostLookUp, layouts: Sequence[GroupLayout]) -> None:
        """Files the cells of every micro-batch, and which micro-batches have each row.

        Args:
            batch: the look-up of the whole batch, whose route must live as long as the window.
            layouts: of each micro-batch.
        """
        self._batch, self._layouts, self.is_fresh, self.merged = batch, [*layouts], False, self.merger
        self._first_cells, size = list(accumulate((each.num_ids for each in layouts), initial=0)), batch.num_unique
        pointers = self._pointers.reserve(4 * len(layouts) * (size + 1))
        cells = self._cells.reserve(4 * self._first_cells[-1])
        unordered, counts = self._unordered.reserve(4 * size), self._counts.reserve(4 * size)
        self._unordered.buffer.bytes[: 4 * size] = 0
        for k, layout in enumerate(layouts):
            self._counts.buffer.bytes[: 4 * size] = 0
            features = layout.address, layout.num_features, batch.inverse
            cpu.count_cells(*features, k + 1, counts, unordered)
            where = pointers + 4 * k * (size + 1), cells + 4 * self._first_cells[k]
            file_cells(*features, counts, size, *where)
        cpu.order_uses(unordered, batch.uniques, size, self._uses.reserve(4 * size))

    def weigh(self, part: int, layout: GroupLayout) -> None:
        """A micro-batch has weights: another layout than it was cut with."""
        self._layouts[part] = layout

    def add_gradients(self, part: int, grad: Tensor) -> None:
        """Adds the gradients of a micro-batch's rows to the sums, given that of its vectors."""
        batch, size, (num_segments, world_size) = self._batch, self._batch.num_unique, self._shape
        pointers = self._pointers.buffer.address + 4 * part * (size + 1)
        layout, kept = self._layouts[part], (0, size)
        weights = batch.file_weights(layout, pointers) if layout.is_weighted else 0
        if self.is_fresh:
            kept = int(self._sent[self.rank]), int(self._sent[self.rank + 1])
        cells = self._cells.buffer.address + 4 * self._first_cells[part]
        order = batch.uniques, batch.send.lists.address, num_segments, world_size, self._uses.buffer.address, part + 1
        self._kernels.backward(grad.data_ptr(), pointers, cells, weights, *order, *kept, batch.send.gradients.address)

    # Messages, by micro-batch

    def open(self, sent: np.ndarray, asked: np.ndarray) -> None:
        """Takes where the requests for and of each rank begin; int64 `[W + 1]`."""
        self._sent, self._asked = sent, asked
        self.sent, self.asked = np.diff(sent).tolist(), np.diff(asked).tolist()

    def take_others(self, slots: np.ndarray) -> None:
        """Takes which rows other replicas change, and this one does not ask for."""
        self.others = slots

    @property
    def num_asked(self) -> int:
        """Requests of all ranks."""
        return int(self._asked[-1])

    def uses(self, form: str) -> tuple[Tensor, Tensor] | None:
        """Which micro-batches use each row that this rank asks for; and room for the same of what it is asked."""
        self._asked_uses.reserve(4 * self.num_asked)
        out, into = self._uses.buffer, self._asked_uses.buffer
        return out.tensor(torch.int32, self._batch.num_unique), into.tensor(torch.int32, self.num_asked)

    def choose(self, form: str) -> None:
        """Chooses when each row and its gradient travel."""
        for uses, count, fetches, pushes in (
            (self._uses, self._batch.num_unique, self._fetches, self._pushes),
            (self._asked_uses, self.num_asked, self._asked_fetches, self._asked_pushes),
        ):
            masks = fetches.reserve(4 * count), pushes.reserve(4 * count)
            cpu.choose_phases(uses.buffer.address, count, cpu.FORMS[form], len(self._layouts), *masks)
        self.is_fresh = form == "naive"

    def leave_out(self, sent: np.ndarray, asked: np.ndarray) -> None:
        """Rows of requests from these on, to or of each rank, do not travel: every rank has a copy of them."""
        mine = array_at(self._fetches.buffer.address, np.uint32, self._batch.num_unique)
        theirs = array_at(self._asked_fetches.buffer.address, np.uint32, self.num_asked)
        for masks, begins, bounds in ((mine, sent, self._sent), (theirs, asked, self._asked)):
            for begin, end in zip(begins.tolist(), bounds[1:].tolist(), strict=True):
                masks[begin:end] = 0

    def read_at(self, places: int) -> None:
        """Takes where in the arena the row of each entry is, address of uint32 `[entries]`."""
        self.places = places

    def spread_places(self, places: int) -> None:
        """Has entries find their rows elsewhere than in their slots, given where that of each distinct slot is."""
        merger, self.places = self.merger, self._places.reserve(4 * self.num_asked)
        cpu.spread(places, merger.heads, merger.nexts, merger.num_merged, self.places)

    def note_touched(self, slots: int, touched: np.ndarray, number: int) -> None:
        """Notes which window touched the distinct slots last, and that this one does."""
        before = self._before.reserve(4 * self.merger.num_merged)
        cpu.note_touched(slots, self.merger.num_merged, touched.ctypes.data, number, before)

    def mark_final(self, number: int, count: int) -> None:
        """Finds which of the first distinct slots the window before does not touch: these rows may come at once."""
        merger, before = self.merger, self._before.buffer.address
        cpu.mark_final(before, merger.heads, merger.nexts, count, number, self._asked_fetches.buffer.address)

    def final(self) -> tuple[Tensor, list[int], list[int], Tensor]:
        """Which of the rows that ranks asked for are final, in bits; bytes for and of each rank; room for theirs."""
        out, into = ([0, *accumulate(-(-size // 8) for size in sizes)] for sizes in (self.asked, self.sent))
        self._bits.reserve(into[-1])
        begin = self._asked_bits.reserve(out[-1])
        for member, at in enumerate(out[:-1]):
            bounds = int(self._asked[member]), int(self._asked[member + 1])
            cpu.pack_bits(self._asked_fetches.buffer.address, *bounds, begin + at)
        mine, theirs = self._asked_bits.buffer, self._bits.buffer
        sizes = np.diff(out).tolist(), np.diff(into).tolist()
        return mine.tensor(torch.uint8, out[-1]), *sizes, theirs.tensor(torch.uint8, into[-1])

    def take_final(self, bits: Tensor) -> None:
        """Takes what owners say of the rows that this rank asked for."""
        begin = self._bits.buffer.address
        for member, size in enumerate(self.sent):
            if member != self.rank:
                bounds = int(self._sent[member]), int(self._sent[member + 1])
                cpu.unpack_bits(begin, *bounds, self._fetches.buffer.address)
            begin += -(-size // 8)

    def sort(self) -> list[Tensor]:
        """Sorts what travels by phase; the host waits for no sizes."""
        ins, outs = (self._fetches, self._asked_fetches), (self._pushes, self._asked_pushes)
        masks, bounds = (*ins, *outs), (self._sent, self._asked) * 2
        orders = [self._sorted(*each) for each in zip(masks, bounds, self._orders, strict=True)]
        self.rows_in, self.rows_out, self.gradients_out, self.gradients_in = orders
        return []

    def _sorted(self, masks: Scratch, bounds: np.ndarray, order: Scratch) -> Order:
        world_size, num_phases = len(bounds) - 1, len(self._layouts) + 1
        sizes, where = np.empty((num_phases, world_size), np.int64), (masks.buffer.address, bounds.ctypes.data)
        cpu.count_phases(*where, world_size, self.rank, num_phases, sizes.ctypes.data)
        count, cursors = int(sizes.sum()), self._phase_cursors.reserve(sizes.nbytes)
        into = sizes.ctypes.data, cursors, order.reserve(4 * count)
        cpu.sort_phases(*where, world_size, self.rank, num_phases, *into)
        return Order(order.buffer.tensor(torch.int32, count), sizes.tolist())

    def make_room(self, numbers: Iterator[int]) -> None:
        """Makes room for all that this window will bring, so that nothing moves while threads write there.

        Rows and gradients stay where they arrive: pooling and the update read them there.
        """
        batch, row_bytes, gradient_bytes = self._batch, self._row_bytes, self._gradient_bytes
        self._rows.reserve(self.rows_out.most * row_bytes)
        self._received = _room(batch.received, self.rows_in.count, row_bytes)
        self._packed = _room(self._gradients, self.gradients_out.count, gradient_bytes)
        self._came = _room(self._arrived, self.gradients_in.count, gradient_bytes)
        for order, numbers_of, scratch, num_bytes, addresses in (
            (self.rows_in, batch.uniques, batch.received, row_bytes, batch.addresses),
            (self.gradients_in, 0, self._arrived, gradient_bytes, self.merger.addresses),
        ):
            assert order.entries is not None
            cpu.place(order.entries.data_ptr(), order.count, numbers_of, scratch.buffer.address, num_bytes, addresses)

    def take_rows(self, phase: int) -> Tensor:
        """The rows that others need in a phase."""
        order, count = _entries(self.rows_out, phase)
        self._kernels.take_rows(self._arena, self.places, order, count, self._rows.buffer.address)
        return self._rows.buffer.tensor(torch.uint8, count, self._row_bytes)

    def rows_into(self, phase: int) -> Tensor:
        """Where the rows of a phase go."""
        return self._received[self.rows_in.part(phase)]

    def pack_gradients(self, phase: int) -> None:
        """Copies the gradients that go in a phase, which may change after that."""
        order, count = _entries(self.gradients_out, phase)
        into = self._gradients.buffer.address + self.gradients_out.part(phase).start * self._gradient_bytes
        self._kernels.take_gradients(self._batch.send.gradients.address, order, count, into)

    def packed_gradients(self, phase: int) -> Tensor:
        """The gradients that go in a phase."""
        return self._packed[self.gradients_out.part(phase)]

    def gradients_into(self, phase: int) -> Tensor:
        """Where the gradients of a phase go."""
        return self._came[self.gradients_in.part(phase)]

    def take_gradients(self, phase: int) -> None:
        """Adds the gradients of a phase, once they are here, to those of earlier ones, where there may be any."""
        if self.is_fresh:
            order, count = _entries(self.gradients_in, phase)
            packed = self._arrived.buffer.address + self.gradients_in.part(phase).start * self._gradient_bytes
            masks = self._asked_pushes.buffer.address
            self._kernels.add_gradients(packed, order, count, masks, phase, self.merger.addresses)

    def sum_up(self) -> Tensor:
        """Sums the gradients of each distinct slot, `[M, D]`: they are read where they arrived, and not any more."""
        merger, (dim, dtype) = self.merger, self._sums_shape
        self._sums.reserve(merger.num_merged * self._gradient_bytes)
        sums = self._sums.buffer.tensor(dtype, merger.num_merged, dim)
        sum_merged(merger, sums)
        self._summed(merger.merged_slots, sums.data_ptr(), self._gradient_bytes, merger.num_merged)
        self.merged = self._summed
        return sums

    def read_in(self, phase: int) -> np.ndarray:
        """Uint32: entries whose rows are read in a phase; this rank's own with those of the first micro-batch."""
        assert self.rows_out.entries is not None
        read = self.rows_out.entries[self.rows_out.part(phase)].numpy().view(np.uint32)
        if phase == cpu.FINAL + 1:
            own = np.arange(self._asked[self.rank], self._asked[self.rank + 1], dtype=np.uint32)
            read = np.concatenate([read, own])
        return np.sort(read)

    def expected(self) -> np.ndarray:
        """Uint32 `[entries]`: the window that touched the row of each entry last."""
        merger, out = self.merger, self._expected.reserve(4 * self.num_asked)
        cpu.spread(self._before.buffer.address, merger.heads, merger.nexts, merger.num_merged, out)
        return array_at(out, np.uint32, self.num_asked)


def _room(scratch: Scratch, count: int, num_bytes: int) -> Tensor:
    """uint8 `[count, num_bytes]`."""
    scratch.reserve(count * num_bytes)
    return scratch.buffer.tensor(torch.uint8, count, num_bytes)


def _entries(order: Order, phase: int) -> tuple[int, int]:
    """Where the entries of a phase are, uint32, and how many."""
    assert order.entries is not None
    part = order.part(phase)
    return order.entries.data_ptr() + 4 * part.start, part.stop - part.start

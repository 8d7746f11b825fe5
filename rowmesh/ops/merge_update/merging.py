"""Merge of requests for the same slot, on a CPU."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from torch import Tensor

from rowmesh.ops.memory import Buffer, Scratch, round_up
from rowmesh.ops.merge_update.handles import END, HostMerged
from rowmesh.ops.route.cpu import PREFETCHED_ROW_BYTES
from rowmesh.ops.simd import (
    FLOAT32,
    kernel,
    load_i64,
    load_u32,
    prefetch,
    store_i64,
    store_row,
    store_u32,
    zero_row,
)

_SOURCE = struct.Struct("=3q")  # addresses of slots, offsets and gradients
_FIBONACCI = np.uint64(0x9E3779B97F4A7C15)


@kernel
def _merge(
    num_segments,
    num_sources,
    sources,
    gradient_bytes,
    arena,
    row_bytes,
    table,
    merged_slots,
    merged_offsets,
    heads,
    tails,
    nexts,
    addresses,
):
    """Chains the requests of all sources for each distinct slot, in the order of the sources.

    sources: int64 `[sources, 3]`, the addresses of each source's slots, segment offsets and gradients, in its own
    numbering; entries are numbered source by source. A cell of the table is slot << 32 | (merged index + 1), and 0
    where it is free. Returns the number of distinct slots.

    The slots of one source are distinct, so where it is alone there is nothing to look for.
    """
    if num_sources == 1:
        slots, offsets, gradients = load_i64(sources), load_i64(sources + 8), load_i64(sources + 16)
        begin = load_i64(offsets)
        for s in range(num_segments + 1):
            store_i64(merged_offsets + 8 * s, load_i64(offsets + 8 * s) - begin)
        count = load_i64(offsets + 8 * num_segments) - begin
        for m in range(count):
            slot = load_u32(slots + 4 * (begin + m))
            store_u32(merged_slots + 4 * m, slot)
            if row_bytes <= PREFETCHED_ROW_BYTES:
                prefetch(arena + slot * row_bytes, 64)
            store_u32(heads + 4 * m, m)
            store_u32(nexts + 4 * m, END)
            store_i64(addresses + 8 * m, gradients + (begin + m) * gradient_bytes)
        return count
    merged = 0
    for s in range(num_segments):
        store_i64(merged_offsets + 8 * s, merged)
        count = 0
        for r in range(num_sources):
            offsets = load_i64(sources + 24 * r + 8)
            count += load_i64(offsets + 8 * s + 8) - load_i64(offsets + 8 * s)
        if count == 0:
            continue
        bits = 4
        while (1 << bits) < 2 * count:
            bits += 1
        shift, mask = np.uint64(64 - bits), (8 << bits) - 1
        for line in range(table, table + (8 << bits), 64):
            store_row(line, zero_row(16, FLOAT32), FLOAT32)
        entry_base = 0
        for r in range(num_sources):
            list_, offsets = load_i64(sources + 24 * r), load_i64(sources + 24 * r + 8)
            gradients = load_i64(sources + 24 * r + 16)
            begin = load_i64(offsets)
            for position in range(load_i64(offsets + 8 * s), load_i64(offsets + 8 * s + 8)):
                entry = entry_base + position - begin
                store_i64(addresses + 8 * entry, gradients + position * gradient_bytes)
                store_u32(nexts + 4 * entry, END)
                slot = load_u32(list_ + 4 * position)
                cell = table + 8 * np.int64((np.uint64(slot) * _FIBONACCI) >> shift)
                while True:
                    held = load_i64(cell)
                    if held == 0:
                        store_i64(cell, (slot << 32) | (merged + 1))
                        store_u32(merged_slots + 4 * merged, slot)
                        if row_bytes <= PREFETCHED_ROW_BYTES:
                            prefetch(arena + slot * row_bytes, 64)
                        store_u32(heads + 4 * merged, entry)
                        store_u32(tails + 4 * merged, entry)
                        merged += 1
                        break
                    if np.uint64(held ^ (slot << 32)) <= np.uint64(0xFFFFFFFF):
                        m = (held & 0xFFFFFFFF) - 1
                        store_u32(nexts + 4 * load_u32(tails + 4 * m), entry)
                        store_u32(tails + 4 * m, entry)
                        break
                    cell = table + (cell - table + 8 & mask)
            entry_base += load_i64(offsets + 8 * num_segments) - begin
    store_i64(merged_offsets + 8 * num_segments, merged)
    return merged


class Merger(HostMerged):
    """Owner-side unique over the requests of all ranks; buffers are kept from step to step.

    Args:
        num_segments: tables of the group.
        arena, row_bytes: the rows that will be read or updated next, for prefetching.

    Attributes:
        merged_offsets: int64 `[S + 1]`, the distinct slots of each segment.
    """

    def __init__(self, num_segments: int, arena: int = 0, row_bytes: int = 1 << 30) -> None:
        self._node_ends = Buffer(64)
        super().__init__(node_ends=self._node_ends.address)
        self.merged_offsets = np.zeros(num_segments + 1, np.int64)
        self._num_segments = num_segments
        self._rows = (arena, row_bytes)
        self._offsets_address: int = self.merged_offsets.ctypes.data
        self._sources = Buffer(64)
        self._most_entries = 0
        self._make_room(16)

    def _make_room(self, num_entries: int) -> None:
        """For all that depends on the number of requests."""
        most = num_entries + num_entries // 4
        parts = [round_up(size * most, 64) for size in (4, 4, 4, 4, 8, 32)]
        self._memory, self._most_entries = Buffer(sum(parts)), most
        ends = accumulate(parts, initial=self._memory.address)
        self.merged_slots, self.heads, self._tails, self.nexts, self.addresses, self._table, _ = ends

    def make_room(self, num_entries: int, num_sources: int, num_nodes: int = 1) -> None:
        """Makes room to merge so many requests of so many sources. Loses what was merged where it has to grow."""
        if num_nodes > 1 and 8 * num_nodes > self._node_ends.num_bytes:
            self._node_ends = Buffer(8 * num_nodes)
            self.node_ends = self._node_ends.address
        if num_entries > self._most_entries:
            self._make_room(num_entries)
        if 24 * num_sources > self._sources.num_bytes:
            self._sources = Buffer(24 * num_sources)

    def __call__(
        self,
        sources: Sequence[tuple[int, int, int]],
        gradient_bytes: int,
        num_entries: int,
        node_ends: Sequence[int] = (),
    ) -> None:
        """Merges.

        Args:
            sources: addresses of each source's slots, segment offsets and gradients, in the source's own numbering.
            gradient_bytes: of one gradient.
            num_entries: requests of all sources together.
            node_ends: where they come from several nodes, one past each node's last entry.
        """
        self.num_nodes = max(len(node_ends), 1)
        if (
            num_entries > self._most_entries
            or 24 * len(sources) > self._sources.num_bytes
            or 8 * len(node_ends) > self._node_ends.num_bytes
        ):
            self.make_room(num_entries, len(sources), len(node_ends))
        if len(node_ends) > 1:
            self._node_ends.array(np.int64, len(node_ends))[:] = node_ends
        for number, source in enumerate(sources):  # one array of all would cost more than merging a small batch
            _SOURCE.pack_into(self._sources.bytes.data, 24 * number, *source)
        self.num_merged = _merge(
            self._num_segments,
            len(sources),
            self._sources.address,
            gradient_bytes,
            *self._rows,
            self._table,
            self.merged_slots,
            self._offsets_address,
            self.heads,
            self._tails,
            self.nexts,
            self.addresses,
        )


def merge(merger: Merger, slots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Merges lists of slots; see `rowmesh.ops.merge_update.merge`."""
    sizes = [len(part) for part in slots]
    offsets = np.zeros((len(sizes), 2), np.int64)
    offsets[:, 1] = sizes
    begin, addresses = offsets.ctypes.data, [part.data_ptr() for part in gradients] or [0] * len(sizes)
    sources = [
        (part.data_ptr(), begin + 16 * number, address)
        for number, (part, address) in enumerate(zip(slots, addresses, strict=True))
    ]
    merger(sources, gradients[0].shape[1] * gradients[0].itemsize if gradients else 0, sum(sizes))


@kernel
def chain_singles(count, gradients, gradient_bytes, heads, nexts, addresses):
    """Chains of one entry each, gradient after gradient, for slots that are distinct already."""
    for m in range(count):
        store_u32(heads + 4 * m, m)
        store_u32(nexts + 4 * m, END)
        store_i64(addresses + 8 * m, gradients + m * gradient_bytes)


class Singles(HostMerged):
    """Distinct slots with one gradient each."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = [Scratch() for _ in range(3)]

    def make_room(self, count: int) -> None:
        """For so many slots."""
        for scratch, size in zip(self._scratch, (4, 4, 8), strict=True):
            scratch.reserve(count * size)

    def __call__(self, slots: int, gradients: int, gradient_bytes: int, count: int) -> None:
        """`slots` and `gradients` are addresses: uint32 `[count]`, and one gradient after the other."""
        self.merged_slots, self.num_merged = slots, count
        self.heads, self.nexts, self.addresses = (
            scratch.reserve(count * size) for scratch, size in zip(self._scratch, (4, 4, 8), strict=True)
        )
        chain_singles(count, gradients, gradient_bytes, self.heads, self.nexts, self.addresses)

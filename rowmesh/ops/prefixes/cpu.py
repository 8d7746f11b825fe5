"""Distinct tensor-train ids on a CPU, sorted by (i₂, i₁): a counting sort a factor, in memory that is used again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import IdRangeError
from rowmesh.ops.memory import Buffer, Scratch
from rowmesh.ops.segment_unique.cpu import SegmentHash
from rowmesh.ops.simd import inlined, kernel, load_i64, load_u32, store_i64, store_u32

_MOST_IDLE = 8
_LONGS, _WORDS = 4, 13  # arrays as long as the ids: int64 and uint32
_COUNTED = 5  # int64 values that `arrange` counts


class Loan:
    """A buffer that goes back to the idle ones with its last reference."""

    __slots__ = ("_idle", "buffer")

    def __init__(self, idle: deque[Buffer], num_bytes: int) -> None:
        self._idle = idle
        try:
            buffer = idle.pop()
        except IndexError:
            buffer = Buffer(64)
        if not num_bytes <= buffer.num_bytes <= 8 * num_bytes + (1 << 20):
            buffer = Buffer(num_bytes + num_bytes // 8)
        self.buffer = buffer

    def __del__(self) -> None:
        if (buffer := getattr(self, "buffer", None)) is not None:  # else there was no memory for it
            self._idle.append(buffer)


class Workspace(threading.local):
    """Memory that look-ups of a table use again and again; each thread has its own. Copies and pickles are empty.

    Attributes:
        hash: finds distinct ids.
        scratch: by use.
        index, products: idle buffers of handles, and of products of prefixes.
    """

    def __init__(self) -> None:
        self.hash = SegmentHash([0])
        uses = ("buckets", "products", "group", "slices", "gradients", "slice", "rows")
        self.scratch = {use: Scratch() for use in uses}
        self.index: deque[Buffer] = deque(maxlen=_MOST_IDLE)
        self.products: deque[Buffer] = deque(maxlen=_MOST_IDLE)
        self.segments = np.zeros(1, np.int64)
        self._identity = np.arange(0, dtype=np.uint32)

    def identity(self, count: int) -> int:
        """Address of uint32 0, 1, 2, …"""
        if count > len(self._identity):
            self._identity = np.arange(2 * count, dtype=np.uint32)
        return self._identity.ctypes.data

    @property
    def num_bytes(self) -> int:
        """Memory that no look-up uses now."""
        idle = [*self.scratch.values(), *self.index, *self.products]
        return self._identity.nbytes + sum(memory.num_bytes for memory in idle)

    def __reduce__(self) -> Any:
        return (Workspace, ())


class HostPrefixes:
    """Distinct ids in the host's memory, sorted by prefix and by slice of the second core.

    Args:
        ids: int64 `[N]`, contiguous.
        num_rows: ids are 0 … num_rows − 1.
        row_factors: p₁, p₂, p₃.
        workspace: where memory comes from.
        is_distinct: whether the ids are known to differ; `inverse` and `counts` are then not made.

    Attributes:
        num_ids, num_unique, num_prefixes, num_groups: N, U, distinct (i₁, i₂), distinct i₂.
        largest_group: prefixes of the largest one.
        num_touched: distinct i₁, i₂ and i₃.
        unique: address of int64 `[U]`: the distinct ids, in order of first appearance.
        inverse: address of uint32 `[N]`: which of them each id is.
        counts: address of uint32 `[U]`: how often each occurs.
        arranged … group_starts, touched: addresses of what `arrange` writes.
        products: of all prefixes with some cores, where they are kept.

    Raises:
        IdRangeError: an id is below 0 or past the table.
    """

    def __init__(
        self,
        ids: Tensor,
        num_rows: int,
        row_factors: tuple[int, int, int],
        workspace: Workspace,
        is_distinct: bool = False,
    ) -> None:
        self.num_rows, self.row_factors, self.workspace, self.num_ids = num_rows, row_factors, workspace, ids.numel()
        self.products: Loan | None = None
        count = self.num_ids + 1
        self._memory = Loan(workspace.index, count * (8 * _LONGS + 4 * _WORDS))
        first_long = self._memory.buffer.address
        first_word = first_long + 8 * _LONGS * count
        self.unique, *self.touched = range(first_long, first_word, 8 * count)
        words = iter(range(first_word, first_word + 4 * _WORDS * count, 4 * count))
        self.inverse, self.counts, order = next(words), next(words), next(words)
        self.arranged, self.lasts, self.last_slots, self.starts = next(words), next(words), next(words), next(words)
        self.firsts, self.first_slots, self.group_starts, keys = next(words), next(words), next(words), next(words)
        self.num_unique = self._copy(ids) if is_distinct else self._find_unique(ids)
        found, buckets = np.zeros(_COUNTED, np.int64), workspace.scratch["buckets"].reserve(8 * max(row_factors))
        given = (self.unique, self.num_unique, num_rows, *row_factors, keys, order, buckets)
        by_id = (self.arranged, self.lasts, self.last_slots)
        by_prefix = (self.starts, self.firsts, self.first_slots, self.group_starts)
        if arrange(*given, *by_id, *by_prefix, *self.touched, found.ctypes.data) >= 0:
            unique = self.longs(self.unique, self.num_unique)
            raise refusal(unique[(unique < 0) | (unique >= num_rows)].tolist(), num_rows)
        self.num_prefixes, self.num_groups, touched1, touched3, self.largest_group = found.tolist()
        self.num_touched = (touched1, self.num_groups, touched3)

    def _copy(self, ids: Tensor) -> int:
        self.longs(self.unique, self.num_ids)[:] = ids.numpy()
        return self.num_ids

    def _find_unique(self, ids: Tensor) -> int:
        bounds, found = np.array([0, self.num_ids], np.int64), np.zeros(2, np.int64)
        segments = self.workspace.segments.ctypes.data
        out = (self.unique, self.counts, self.inverse, found.ctypes.data)
        self.workspace.hash(ids.data_ptr(), bounds.ctypes.data, 8, segments, 1, *out)
        return int(found[1])

    def longs(self, address: int, count: int) -> np.ndarray:
        """int64 `[count]` of what is at one of the addresses, as a view."""
        return self._memory.buffer.array(np.int64, count, offset=address - self._memory.buffer.address)

    def words(self, address: int, count: int) -> np.ndarray:
        """uint32 `[count]` of what is at one of the addresses, as a view."""
        return self._memory.buffer.array(np.uint32, count, offset=address - self._memory.buffer.address)

    def inverse_ids(self) -> Tensor:
        """int64 `[N]`: which distinct id each id is, a copy."""
        return torch.from_numpy(self.words(self.inverse, self.num_ids).astype(np.int64))

    def id_counts(self) -> Tensor:
        """int64 `[U]`: how often each distinct id occurs, a copy."""
        return torch.from_numpy(self.words(self.counts, self.num_unique).astype(np.int64))

    def touched_slices(self, core: int) -> Tensor:
        """int64: the slices of a core that any id reads, ascending, a copy."""
        return torch.from_numpy(self.longs(self.touched[core], self.num_touched[core]).copy())

    def mark_touched(self, out: Sequence[Tensor]) -> None:
        """Sets the elements of slices that any id reads to 1; `out` has for each core an element a slice."""
        for core, marks in enumerate(out):
            marks.numpy()[self.longs(self.touched[core], self.num_touched[core])] = 1

    def row_buffer(self, row_bytes: int) -> int:
        """Address of memory for a row each distinct id, until the next look-up of this thread."""
        return self.workspace.scratch["rows"].reserve(self.num_unique * row_bytes)


def merge(found: Sequence[tuple[HostPrefixes, Tensor]]) -> tuple[HostPrefixes, Tensor]:
    """The distinct ids of several, and the sums of their rows' gradients `[U, D]`, in the order of `found`."""
    ids = torch.cat([torch.from_numpy(each.longs(each.unique, each.num_unique)) for each, _ in found])
    one, _ = found[0]
    merged = HostPrefixes(ids, one.num_rows, one.row_factors, one.workspace)
    entries = torch.cat([gradients for _, gradients in found])
    summed = torch.zeros(merged.num_unique, entries.shape[1], dtype=entries.dtype, device="cpu")
    return merged, summed.index_add_(0, merged.inverse_ids(), entries)


@inlined
def _sort(keys, order, count, buckets, num_buckets, sorted_order):
    """A stable counting sort of `order` by `keys[order]`; afterwards `buckets[k]` is where k's part ends."""
    for k in range(num_buckets):
        store_u32(buckets + 4 * k, 0)
    for i in range(count):
        cell = buckets + 4 * load_u32(keys + 4 * i)
        store_u32(cell, load_u32(cell) + 1)
    total = 0
    for k in range(num_buckets):
        size = load_u32(buckets + 4 * k)
        store_u32(buckets + 4 * k, total)
        total += size
    for i in range(count):
        position = load_u32(order + 4 * i)
        cell = buckets + 4 * load_u32(keys + 4 * position)
        store_u32(sorted_order + 4 * load_u32(cell), position)
        store_u32(cell, load_u32(cell) + 1)


@inlined
def _touched(buckets, num_buckets, slots, touched):
    """Numbers the keys that occur, in place of where their parts end; returns how many there are."""
    found, begin = 0, 0
    for k in range(num_buckets):
        end = load_u32(buckets + 4 * k)
        store_u32(slots + 4 * k, found)
        if end > begin:
            store_i64(touched + 8 * found, k)
            found += 1
        begin = end
    return found


@kernel
def arrange(
    ids,
    count,
    num_rows,
    p1,
    p2,
    p3,
    keys,
    order,
    buckets,
    arranged,
    lasts,
    last_slots,
    starts,
    firsts,
    first_slots,
    group_starts,
    touched1,
    touched2,
    touched3,
    counts,
):
    """Sorts distinct ids by (i₂, i₁) and says where prefixes and groups begin.

    Args:
        ids: int64 `[count]`, distinct.
        keys, order: uint32 `[3 · count]` and `[count]`, scratch.
        buckets: uint32 `[2 · max(p₁, p₂, p₃)]`, scratch.
        arranged: uint32 `[count]` out: the position in `ids` of each id in sorted order.
        lasts: uint32 `[count]` out: i₃ of each, in that order; `last_slots`: which of the distinct i₃ that is.
        starts: uint32 `[prefixes + 1]` out: where each prefix begins in that order.
        firsts: uint32 `[prefixes]` out: i₁ of each; `first_slots`: which of the distinct i₁ that is.
        group_starts: uint32 `[groups + 1]` out: where each group begins among the prefixes.
        touched1, touched2, touched3: int64 out: the distinct i₁, i₂ (one a group) and i₃, ascending.
        counts: int64 `[5]` out: prefixes, groups, distinct i₁, distinct i₃, prefixes of the largest group.

    Returns:
        −1, or the position of an id that is not in [0, num_rows); nothing else is valid then.
    """
    keys2, keys3 = keys + 4 * count, keys + 8 * count
    for i in range(count):
        row = load_i64(ids + 8 * i)
        if row < 0 or row >= num_rows:
            return i
        prefix = row // p3
        first = prefix // p2
        store_u32(keys + 4 * i, first)
        store_u32(keys2 + 4 * i, prefix - first * p2)
        store_u32(keys3 + 4 * i, row - prefix * p3)
        store_u32(arranged + 4 * i, i)
    slots = buckets + 4 * max(p1, p2, p3)
    _sort(keys3, arranged, count, buckets, p3, order)
    store_i64(counts + 24, _touched(buckets, p3, slots, touched3))
    for i in range(count):  # for now by position in `ids`; the keys themselves are wanted in sorted order below
        store_u32(lasts + 4 * i, load_u32(slots + 4 * load_u32(keys3 + 4 * i)))
    _sort(keys, arranged, count, buckets, p1, order)
    store_i64(counts + 16, _touched(buckets, p1, slots, touched1))
    _sort(keys2, order, count, buckets, p2, arranged)
    for i in range(count):
        store_u32(last_slots + 4 * i, load_u32(lasts + 4 * load_u32(arranged + 4 * i)))
    prefixes, groups, largest, group_start = 0, 0, 0, 0
    before1, before2 = -1, -1
    for i in range(count):
        position = load_u32(arranged + 4 * i)
        first, second = load_u32(keys + 4 * position), load_u32(keys2 + 4 * position)
        store_u32(lasts + 4 * i, load_u32(keys3 + 4 * position))
        if second != before2:
            store_u32(group_starts + 4 * groups, prefixes)
            store_i64(touched2 + 8 * groups, second)
            groups += 1
            largest = max(largest, prefixes - group_start)
            group_start = prefixes
        if first != before1 or second != before2:
            store_u32(starts + 4 * prefixes, i)
            store_u32(firsts + 4 * prefixes, first)
            store_u32(first_slots + 4 * prefixes, load_u32(slots + 4 * first))
            prefixes += 1
        before1, before2 = first, second
    store_u32(starts + 4 * prefixes, count)
    store_u32(group_starts + 4 * groups, prefixes)
    store_i64(counts, prefixes)
    store_i64(counts + 8, groups)
    store_i64(counts + 32, max(largest, prefixes - group_start))
    return -1


def refusal(wrong: list[int], num_rows: int) -> IdRangeError:
    """The error for distinct ids that are no rows.

    >>> refusal([9, -1], 5)
    IdRangeError('2 distinct ids are outside the table, whose ids are 0 to 4: [9, -1]')
    """
    return IdRangeError(
        f"{len(wrong)} distinct ids are outside the table, whose ids are 0 to {num_rows - 1}: {wrong[:5]}"
        f"{' …' if len(wrong) > 5 else ''}"
    )

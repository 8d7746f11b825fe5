"""The cache table on a CPU: a hash by open addressing, of twice as many cells as entries, and three queues of entries.

A cell is slot << 32 | (cache slot + 1), and 0 where it is empty. An entry is 32 bytes, one a cache slot: its slot, its
number of pins, flags, and its neighbours in the queue it is in: of free entries, of clean ones, of dirty ones. An entry
that is pinned or is being written is in none. The queues' ends are three entries more.
"""

from __future__ import annotations

import numpy as np

from rowmesh.ops.memory import Buffer
from rowmesh.ops.simd import inlined, kernel, prefetch

MISSING = 0xFFFFFFFF
MAX_CACHE_SLOTS = 2**31 - 4
_SLOT, _PINS, _FLAGS, _BEFORE, _AFTER, _COLUMNS = 0, 1, 2, 3, 4, 8
_DIRTY, _WRITING = 1, 2
_FREE, _CLEAN, _CHANGED = 0, 1, 2  # the queues: their ends, after the cache slots, and places in `counts`
_PINNED = 3  # the place after those of the queues in `counts`
_AHEAD = 12
_FIBONACCI = np.uint64(0x9E3779B97F4A7C15)


@inlined
def _first_cell(slot, shift):
    """The cell where the search for a slot begins."""
    return np.int64((np.uint64(slot) * _FIBONACCI) >> shift)


@inlined
def _append(entries, counts, queue, entry):
    end = len(entries) - 3 + queue
    last = entries[end, _BEFORE]
    entries[last, _AFTER] = entry
    entries[entry, _BEFORE] = last
    entries[entry, _AFTER] = end
    entries[end, _BEFORE] = entry
    counts[queue] += 1


@inlined
def _unlink(entries, counts, queue, entry):
    before, after = entries[entry, _BEFORE], entries[entry, _AFTER]
    entries[before, _AFTER] = after
    entries[after, _BEFORE] = before
    counts[queue] -= 1


@inlined
def _pin(entries, counts, entry):
    if entries[entry, _PINS] == 0:
        counts[_PINNED] += 1
        if not entries[entry, _FLAGS] & _WRITING:
            _unlink(entries, counts, _CHANGED if entries[entry, _FLAGS] & _DIRTY else _CLEAN, entry)
    entries[entry, _PINS] += 1


@inlined
def _erase(cells, shift, slot):
    """Takes a slot out of the hash, and moves back those that would not be found any more."""
    mask = len(cells) - 1
    hole = _first_cell(slot, shift)
    while (cells[hole] >> 32) & MISSING != slot or cells[hole] == 0:
        hole = (hole + 1) & mask
    place = (hole + 1) & mask
    while cells[place] != 0:
        first_cell = _first_cell((cells[place] >> 32) & MISSING, shift)
        if ((place - first_cell) & mask) >= ((place - hole) & mask):
            cells[hole] = cells[place]
            hole = place
        place = (place + 1) & mask
    cells[hole] = 0


@inlined
def _queue(cells, shift, entries, counts, entry, retain):
    """Puts an entry that is neither pinned nor being written into its queue; returns whether that is the free one."""
    queue = _CHANGED if entries[entry, _FLAGS] & _DIRTY else (_CLEAN if retain else _FREE)
    if queue == _FREE:
        _erase(cells, shift, np.int64(entries[entry, _SLOT]))
    _append(entries, counts, queue, entry)
    return queue == _FREE


@kernel
def _find(cells, cells_address, shift, slots, out):
    """The cache slot of each slot, or MISSING; returns how many are missing."""
    mask = len(cells) - 1
    missing = 0
    for i in range(len(slots)):
        prefetch(cells_address + 8 * _first_cell(np.int64(slots[min(i + _AHEAD, len(slots) - 1)]), shift), 8)
        slot = np.int64(slots[i])
        cell = _first_cell(slot, shift)
        while cells[cell] != 0 and (cells[cell] >> 32) & MISSING != slot:
            cell = (cell + 1) & mask
        out[i] = (cells[cell] & MISSING) - 1  # of an empty cell this is MISSING
        missing += cells[cell] == 0
    return missing


@kernel
def _pin_found(entries, entries_address, counts, found):
    for i in range(len(found)):
        ahead = np.int64(found[min(i + _AHEAD, len(found) - 1)])
        if ahead != MISSING:
            prefetch(entries_address + 4 * _COLUMNS * ahead, 8)
        entry = np.int64(found[i])
        if entry != MISSING:
            _pin(entries, counts, entry)


@kernel
def _assign(cells, shift, entries, counts, slots, found, taken):
    """Assigns cache slots to the missing; returns how many, and writes their positions."""
    mask = len(cells) - 1
    count = 0
    for i in range(len(slots)):
        if found[i] != MISSING:
            continue
        queue = _FREE if counts[_FREE] > 0 else _CLEAN
        entry = np.int64(entries[len(entries) - 3 + queue, _AFTER])
        slot = np.int64(slots[i])
        cell = _first_cell(slot, shift)
        while cells[cell] != 0 and (cells[cell] >> 32) & MISSING != slot:
            cell = (cell + 1) & mask
        if cells[cell] != 0:  # the slot was named twice
            entry = (cells[cell] & MISSING) - 1
            _pin(entries, counts, entry)
            found[i] = entry
            continue
        cells[cell] = (slot << 32) | (entry + 1)
        _unlink(entries, counts, queue, entry)
        if queue == _CLEAN:
            _erase(cells, shift, np.int64(entries[entry, _SLOT]))
        entries[entry, _SLOT] = slot
        entries[entry, _PINS] = 1
        entries[entry, _FLAGS] = 0
        counts[_PINNED] += 1
        found[i] = entry
        taken[count] = i
        count += 1
    return count


@kernel
def _unpin(cells, shift, entries, entries_address, counts, held, changed, retain, freed):
    """Unpins; returns how many cache slots became free, and writes them."""
    count = 0
    for i in range(len(held)):
        prefetch(entries_address + 4 * _COLUMNS * np.int64(held[min(i + _AHEAD, len(held) - 1)]), 8)
        entry = np.int64(held[i])
        if changed:
            entries[entry, _FLAGS] |= _DIRTY
        entries[entry, _PINS] -= 1
        if entries[entry, _PINS] == 0:
            counts[_PINNED] -= 1
            if not entries[entry, _FLAGS] & _WRITING and _queue(cells, shift, entries, counts, entry, retain):
                freed[count] = entry
                count += 1
    return count


@kernel
def _oldest_dirty(entries, counts, pinned, out):
    """Cache slots to write, oldest first; marks them clean, and as being written."""
    count = 0
    while count < len(out) and counts[_CHANGED] > 0:
        entry = np.int64(entries[len(entries) - 3 + _CHANGED, _AFTER])
        _unlink(entries, counts, _CHANGED, entry)
        entries[entry, _FLAGS] = _WRITING
        out[count] = entry
        count += 1
    if pinned:
        for entry in range(len(entries) - 3):
            if count < len(out) and entries[entry, _PINS] > 0 and entries[entry, _FLAGS] == _DIRTY:
                entries[entry, _FLAGS] = _WRITING
                out[count] = entry
                count += 1
    return count


@kernel
def _written(cells, shift, entries, counts, written, ok, retain, freed):
    """Ends writing; returns how many cache slots became free, and writes them."""
    count = 0
    for i in range(len(written)):
        entry = np.int64(written[i])
        entries[entry, _FLAGS] &= ~_WRITING
        if not ok:
            entries[entry, _FLAGS] |= _DIRTY
        if entries[entry, _PINS] == 0 and _queue(cells, shift, entries, counts, entry, retain):
            freed[count] = entry
            count += 1
    return count


@kernel
def _discard(cells, shift, entries, counts, taken):
    for i in range(len(taken)):
        entry = np.int64(taken[i])
        entries[entry, _PINS] = 0
        counts[_PINNED] -= 1
        _queue(cells, shift, entries, counts, entry, False)


class CacheTable:
    """Which slot is in which of `num_cache_slots` cache slots; both are given as uint32 arrays.

    Example:
        >>> table = CacheTable(2)
        >>> slots, cache_slots = np.array([7, 9], np.uint32), np.empty(2, np.uint32)
        >>> table.pin(slots, cache_slots), len(table.assign(slots, cache_slots)), table.num_pinned
        (2, 2, 2)
        >>> len(table.unpin(cache_slots, changed=False, retain=True)), table.num_clean
        (0, 2)
        >>> table.pin(slots[:1], cache_slots[:1])
        0
    """

    def __init__(self, num_cache_slots: int) -> None:
        self.num_cache_slots = num_cache_slots
        bits = max(4, (2 * num_cache_slots - 1).bit_length())
        self._cells_memory, self._entries_memory = Buffer(8 << bits), Buffer(4 * _COLUMNS * (num_cache_slots + 3))
        self._cells = self._cells_memory.array(np.int64, 1 << bits)
        self._shift = np.uint64(64 - bits)
        self._entries = self._entries_memory.array(np.uint32, num_cache_slots + 3, _COLUMNS)
        self._counts = np.zeros(4, np.int64)
        self._positions, self._freed = np.empty(num_cache_slots, np.uint32), np.empty(num_cache_slots, np.uint32)
        self._link()

    def _link(self) -> None:
        """All cache slots become free, in order; the other queues are empty."""
        count, entries = self.num_cache_slots, self._entries
        ends = np.arange(count, count + 3)
        entries[ends, _BEFORE] = entries[ends, _AFTER] = ends
        order = np.concatenate(([count], np.arange(count), [count]))
        entries[order[1:], _BEFORE], entries[order[:-1], _AFTER] = order[:-1], order[1:]
        self._counts[_FREE] = count

    @property
    def slots(self) -> np.ndarray:
        """The slot that each cache slot has, or had last."""
        return self._entries[: self.num_cache_slots, _SLOT]

    @property
    def num_available(self) -> int:
        """Cache slots that can be assigned now."""
        return int(self._counts[_FREE] + self._counts[_CLEAN])

    @property
    def num_clean(self) -> int:
        """Cache slots that can be assigned, and whose rows are found until they are."""
        return int(self._counts[_CLEAN])

    @property
    def num_dirty(self) -> int:
        """Cache slots that can be assigned once they are written."""
        return int(self._counts[_CHANGED])

    @property
    def num_pinned(self) -> int:
        """Cache slots with a pin."""
        return int(self._counts[_PINNED])

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        arrays = self._cells.nbytes + self._entries.nbytes
        return arrays + self._positions.nbytes + self._freed.nbytes

    def find(self, slots: np.ndarray, cache_slots: np.ndarray) -> int:
        """Writes the cache slot of each slot, or MISSING; returns how many are missing."""
        return _find(self._cells, self._cells_memory.address, self._shift, slots, cache_slots)

    def pin(self, slots: np.ndarray, cache_slots: np.ndarray) -> int:
        """Does what `find` does, and pins what was found."""
        missing = self.find(slots, cache_slots)
        _pin_found(self._entries, self._entries_memory.address, self._counts, cache_slots)
        return missing

    def assign(self, slots: np.ndarray, cache_slots: np.ndarray) -> np.ndarray:
        """Assigns a cache slot, pinned, to each that is missing; as many must be available.

        Returns:
            The positions of those that were, valid until the next call.
        """
        count = _assign(self._cells, self._shift, self._entries, self._counts, slots, cache_slots, self._positions)
        return self._positions[:count]

    def unpin(self, cache_slots: np.ndarray, changed: bool, retain: bool) -> np.ndarray:
        """Unpins; with `changed` they are dirty. Clean ones can still be found with `retain`, else become free.

        Returns:
            The cache slots that became free, valid until the next call.
        """
        count = _unpin(
            self._cells,
            self._shift,
            self._entries,
            self._entries_memory.address,
            self._counts,
            cache_slots,
            changed,
            retain,
            self._freed,
        )
        return self._freed[:count]

    def oldest_dirty(self, cache_slots: np.ndarray, pinned: bool = False) -> int:
        """Lists cache slots to be written, at most as many as there is room for, and returns how many.

        With `pinned`, those that are pinned too. They count as clean until they change again, and cannot be assigned
        before `written` is called with them.
        """
        return _oldest_dirty(self._entries, self._counts, pinned, cache_slots)

    def written(self, cache_slots: np.ndarray, ok: bool, retain: bool) -> np.ndarray:
        """Ends the writing; not `ok` makes them dirty again. Returns what `unpin` does."""
        count = _written(self._cells, self._shift, self._entries, self._counts, cache_slots, ok, retain, self._freed)
        return self._freed[:count]

    def discard(self, cache_slots: np.ndarray) -> None:
        """Frees cache slots that were just assigned, with one pin, and never filled."""
        _discard(self._cells, self._shift, self._entries, self._counts, cache_slots)

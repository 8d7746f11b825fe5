"""Frames on a CPU: an open-addressing hash of twice as many cells as frames, and three queues linked through them.

A cell is slot << 32 | (frame + 1), and 0 where it is empty. A frame is 32 bytes: its slot, how many leases pin it,
flags, and its neighbours in the queue it is in: of free frames, of clean ones, of dirty ones. A frame that is pinned or
is being written is in none. The queues' ends are three frames more.
"""

from __future__ import annotations

import numpy as np

from rowmesh.ops.memory import Buffer
from rowmesh.ops.simd import inlined, kernel, prefetch

MISSING = 0xFFFFFFFF
MAX_FRAMES = 2**31 - 4
_SLOT, _PINS, _FLAGS, _BEFORE, _AFTER, _COLUMNS = 0, 1, 2, 3, 4, 8
_DIRTY, _WRITING = 1, 2
_FREE, _CLEAN, _CHANGED = 0, 1, 2  # the queues, counted from the first frame that is none; and places in `counts`
_PINNED = 3  # the place after those of the queues in `counts`
_AHEAD = 12
_FIBONACCI = np.uint64(0x9E3779B97F4A7C15)


@inlined
def _home(slot, shift):
    """The cell where the search for a slot begins."""
    return np.int64((np.uint64(slot) * _FIBONACCI) >> shift)


@inlined
def _append(frames, counts, queue, frame):
    end = len(frames) - 3 + queue
    last = frames[end, _BEFORE]
    frames[last, _AFTER] = frame
    frames[frame, _BEFORE] = last
    frames[frame, _AFTER] = end
    frames[end, _BEFORE] = frame
    counts[queue] += 1


@inlined
def _unlink(frames, counts, queue, frame):
    before, after = frames[frame, _BEFORE], frames[frame, _AFTER]
    frames[before, _AFTER] = after
    frames[after, _BEFORE] = before
    counts[queue] -= 1


@inlined
def _pin(frames, counts, frame):
    if frames[frame, _PINS] == 0:
        counts[_PINNED] += 1
        if not frames[frame, _FLAGS] & _WRITING:
            _unlink(frames, counts, _CHANGED if frames[frame, _FLAGS] & _DIRTY else _CLEAN, frame)
    frames[frame, _PINS] += 1


@inlined
def _erase(cells, shift, slot):
    """Takes a slot out of the hash, and moves back those that would not be found any more."""
    mask = len(cells) - 1
    hole = _home(slot, shift)
    while (cells[hole] >> 32) & MISSING != slot or cells[hole] == 0:
        hole = (hole + 1) & mask
    place = (hole + 1) & mask
    while cells[place] != 0:
        home = _home((cells[place] >> 32) & MISSING, shift)
        if ((place - home) & mask) >= ((place - hole) & mask):
            cells[hole] = cells[place]
            hole = place
        place = (place + 1) & mask
    cells[hole] = 0


@inlined
def _settle(cells, shift, frames, counts, frame, retain):
    """Puts a frame that nobody pins or writes into its queue; whether that is the free ones'."""
    queue = _CHANGED if frames[frame, _FLAGS] & _DIRTY else (_CLEAN if retain else _FREE)
    if queue == _FREE:
        _erase(cells, shift, np.int64(frames[frame, _SLOT]))
    _append(frames, counts, queue, frame)
    return queue == _FREE


@kernel
def _look(cells, cells_address, shift, slots, out):
    """The frame of each slot, or MISSING; returns how many are missing."""
    mask = len(cells) - 1
    missing = 0
    for i in range(len(slots)):
        prefetch(cells_address + 8 * _home(np.int64(slots[min(i + _AHEAD, len(slots) - 1)]), shift), 8)
        slot = np.int64(slots[i])
        cell = _home(slot, shift)
        while cells[cell] != 0 and (cells[cell] >> 32) & MISSING != slot:
            cell = (cell + 1) & mask
        out[i] = (cells[cell] & MISSING) - 1  # of an empty cell this is MISSING
        missing += cells[cell] == 0
    return missing


@kernel
def _pin_found(frames, frames_address, counts, found):
    for i in range(len(found)):
        ahead = np.int64(found[min(i + _AHEAD, len(found) - 1)])
        if ahead != MISSING:
            prefetch(frames_address + 4 * _COLUMNS * ahead, 8)
        frame = np.int64(found[i])
        if frame != MISSING:
            _pin(frames, counts, frame)


@kernel
def _take(cells, shift, frames, counts, slots, found, taken):
    """Gives frames to the missing; returns how many, and writes their positions."""
    mask = len(cells) - 1
    count = 0
    for i in range(len(slots)):
        if found[i] != MISSING:
            continue
        queue = _FREE if counts[_FREE] > 0 else _CLEAN
        frame = np.int64(frames[len(frames) - 3 + queue, _AFTER])
        slot = np.int64(slots[i])
        cell = _home(slot, shift)
        while cells[cell] != 0 and (cells[cell] >> 32) & MISSING != slot:
            cell = (cell + 1) & mask
        if cells[cell] != 0:  # the slot was named twice
            frame = (cells[cell] & MISSING) - 1
            _pin(frames, counts, frame)
            found[i] = frame
            continue
        cells[cell] = (slot << 32) | (frame + 1)
        _unlink(frames, counts, queue, frame)
        if queue == _CLEAN:
            _erase(cells, shift, np.int64(frames[frame, _SLOT]))
        frames[frame, _SLOT] = slot
        frames[frame, _PINS] = 1
        frames[frame, _FLAGS] = 0
        counts[_PINNED] += 1
        found[i] = frame
        taken[count] = i
        count += 1
    return count


@kernel
def _release(cells, shift, frames, frames_address, counts, held, changed, retain, freed):
    """Unpins; returns how many frames became free, and writes them."""
    count = 0
    for i in range(len(held)):
        prefetch(frames_address + 4 * _COLUMNS * np.int64(held[min(i + _AHEAD, len(held) - 1)]), 8)
        frame = np.int64(held[i])
        if changed:
            frames[frame, _FLAGS] |= _DIRTY
        frames[frame, _PINS] -= 1
        if frames[frame, _PINS] == 0:
            counts[_PINNED] -= 1
            if not frames[frame, _FLAGS] & _WRITING and _settle(cells, shift, frames, counts, frame, retain):
                freed[count] = frame
                count += 1
    return count


@kernel
def _oldest_dirty(frames, counts, pinned, out):
    """Frames to write, oldest first; marks them clean, and as being written."""
    count = 0
    while count < len(out) and counts[_CHANGED] > 0:
        frame = np.int64(frames[len(frames) - 3 + _CHANGED, _AFTER])
        _unlink(frames, counts, _CHANGED, frame)
        frames[frame, _FLAGS] = _WRITING
        out[count] = frame
        count += 1
    if pinned:
        for frame in range(len(frames) - 3):
            if count < len(out) and frames[frame, _PINS] > 0 and frames[frame, _FLAGS] == _DIRTY:
                frames[frame, _FLAGS] = _WRITING
                out[count] = frame
                count += 1
    return count


@kernel
def _written(cells, shift, frames, counts, written, ok, retain, freed):
    """Ends writing; returns how many frames became free, and writes them."""
    count = 0
    for i in range(len(written)):
        frame = np.int64(written[i])
        frames[frame, _FLAGS] &= ~_WRITING
        if not ok:
            frames[frame, _FLAGS] |= _DIRTY
        if frames[frame, _PINS] == 0 and _settle(cells, shift, frames, counts, frame, retain):
            freed[count] = frame
            count += 1
    return count


@kernel
def _forget(cells, shift, frames, counts, taken):
    for i in range(len(taken)):
        frame = np.int64(taken[i])
        frames[frame, _PINS] = 0
        counts[_PINNED] -= 1
        _settle(cells, shift, frames, counts, frame, False)


class FrameTable:
    """Which slot is in which of `num_frames` frames.

    Slots and frames are uint32 arrays.

    Example:
        >>> table = FrameTable(2)
        >>> slots, frames = np.array([7, 9], np.uint32), np.empty(2, np.uint32)
        >>> table.find(slots, frames), len(table.take(slots, frames)), table.num_pinned
        (2, 2, 2)
        >>> len(table.release(frames, changed=False, retain=True)), table.num_clean
        (0, 2)
        >>> table.find(slots[:1], frames[:1])
        0
    """

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        bits = max(4, (2 * num_frames - 1).bit_length())
        self._cells_memory, self._frames_memory = Buffer(8 << bits), Buffer(4 * _COLUMNS * (num_frames + 3))
        self._cells = self._cells_memory.array(np.int64, 1 << bits)
        self._shift = np.uint64(64 - bits)
        self._frames = self._frames_memory.array(np.uint32, num_frames + 3, _COLUMNS)
        self._counts = np.zeros(4, np.int64)
        self._positions, self._freed = np.empty(num_frames, np.uint32), np.empty(num_frames, np.uint32)
        self._link()

    def _link(self) -> None:
        """All frames become free ones, in order; the other queues are empty."""
        count, frames = self.num_frames, self._frames
        ends = np.arange(count, count + 3)
        frames[ends, _BEFORE] = frames[ends, _AFTER] = ends
        order = np.concatenate(([count], np.arange(count), [count]))
        frames[order[1:], _BEFORE], frames[order[:-1], _AFTER] = order[:-1], order[1:]
        self._counts[_FREE] = count

    @property
    def slots(self) -> np.ndarray:
        """The slot that each frame has, or had last."""
        return self._frames[: self.num_frames, _SLOT]

    @property
    def num_available(self) -> int:
        """Frames that can be taken now."""
        return int(self._counts[_FREE] + self._counts[_CLEAN])

    @property
    def num_clean(self) -> int:
        """Frames that can be taken, and whose rows can be found until they are."""
        return int(self._counts[_CLEAN])

    @property
    def num_dirty(self) -> int:
        """Frames that can be taken once they are written."""
        return int(self._counts[_CHANGED])

    @property
    def num_pinned(self) -> int:
        """Frames that a lease holds."""
        return int(self._counts[_PINNED])

    def is_pinned(self, frames: np.ndarray) -> np.ndarray:
        """Which frames leases hold."""
        return self._frames[frames, _PINS] > 0

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        arrays = self._cells.nbytes + self._frames.nbytes
        return arrays + self._positions.nbytes + self._freed.nbytes

    def look(self, slots: np.ndarray, frames: np.ndarray) -> int:
        """Writes the frame of each slot, or MISSING; returns how many are missing."""
        return _look(self._cells, self._cells_memory.address, self._shift, slots, frames)

    def find(self, slots: np.ndarray, frames: np.ndarray) -> int:
        """Does what `look` does, and pins the frames that were found."""
        missing = self.look(slots, frames)
        _pin_found(self._frames, self._frames_memory.address, self._counts, frames)
        return missing

    def take(self, slots: np.ndarray, frames: np.ndarray) -> np.ndarray:
        """Gives a frame, pinned, to each that is missing; as many must be available.

        Returns:
            The positions of those that were, valid until the next call.
        """
        count = _take(self._cells, self._shift, self._frames, self._counts, slots, frames, self._positions)
        return self._positions[:count]

    def release(self, frames: np.ndarray, changed: bool, retain: bool) -> np.ndarray:
        """Unpins frames; with `changed` they are dirty. Clean ones stay to be found with `retain`, else become free.

        Returns:
            The frames that became free, valid until the next call.
        """
        count = _release(
            self._cells, self._shift, self._frames, self._frames_memory.address, self._counts, frames, changed, retain,
            self._freed,
        )  # fmt: skip
        return self._freed[:count]

    def oldest_dirty(self, frames: np.ndarray, pinned: bool = False) -> int:
        """Writes which frames are to be written, at most as many as there is room for, and returns how many.

        With `pinned`, those that leases hold too. They count as clean until they change again, and cannot be taken
        before `written` is called with them.
        """
        return _oldest_dirty(self._frames, self._counts, pinned, frames)

    def written(self, frames: np.ndarray, ok: bool, retain: bool) -> np.ndarray:
        """Ends the writing of frames; not `ok` makes them dirty again. Returns what `release` does."""
        count = _written(self._cells, self._shift, self._frames, self._counts, frames, ok, retain, self._freed)
        return self._freed[:count]

    def forget(self, frames: np.ndarray) -> None:
        """Frees frames that were just taken, pinned by one lease, and never filled."""
        _forget(self._cells, self._shift, self._frames, self._counts, frames)

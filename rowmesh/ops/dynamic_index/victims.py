"""Scores of records, and the records of the smallest (score, id), found exactly.

A key is (score, last step where it breaks ties, else 0, id). A selection finds the smallest keys of a shard and keeps
their slots in ascending order, its run, and the largest of them, its limit. Who gets a key within the limit later goes
to the shard's heap, with that key. An entry of the run holds while its record was not seen since the selection; an
entry of the heap holds while its record has that key. So the smaller of the first that hold is the smallest key of the
shard. Where both are used up, where the heap has no room, and where frequencies halve (which makes ties of what were
none), the next victim is found by a new selection.
"""

from __future__ import annotations

import numpy as np

from rowmesh.ops.dynamic_index.cpu import (
    ADDRESS,
    COUNT,
    EPOCH,
    GROUP,
    GROUPS,
    HEAP_SIZE,
    ID,
    LIMIT,
    RUN_END,
    RUN_SEEN,
    RUN_START,
    SCORE,
    SEEN,
    USED,
    ask_for,
    holds,
    mix,
    place_with,
    slot_at,
    take_out,
)
from rowmesh.ops.simd import inlined, kernel, prefetch

RECENCY, FREQUENCY, BOTH, GIVEN = 0, 1, 2, 3
_MAX = np.int64(2**63 - 1)
_AHEAD = 16
_BUCKETS = 2048
_FEW = 16


class Selection:
    """What shards know of their smallest keys, and scratch memory for a selection in the largest shard.

    Args:
        num_shards: of one rank.
        largest: the capacity of the largest.
    """

    def __init__(self, num_shards: int, largest: int) -> None:
        self.heaps = np.zeros((num_shards, max(8, largest // 40), 4), np.int64)
        self._runs = np.zeros((num_shards, max(8, largest // 4)), np.uint32)
        slots, kept = np.empty(largest, np.uint32), np.empty_like(self.heaps[:1].reshape(-1, 4))
        rows, ordered = np.empty((largest, 4), np.int64), np.empty((largest, 4), np.int64)
        stack, ends = np.empty((64, 2), np.int64), np.empty(_BUCKETS + 1, np.int64)
        self.arguments = (self._runs, slots, rows, ordered, ends, stack, kept)

    @property
    def num_bytes(self) -> int:
        """Of what grows with the shards, without scratch memory."""
        return self.heaps.nbytes + self._runs.nbytes


@inlined
def _add(a, b):
    return _MAX if a > _MAX - b else a + b


@inlined
def _halved(records, slot, epoch, decay_steps):
    """The frequency as of an epoch: shifted once for every multiple of `decay_steps` since the last sighting."""
    shift = epoch - (records[slot, SEEN] - 1) // decay_steps if decay_steps > 0 else 0
    return records[slot, SCORE] >> min(shift, 63)


@inlined
def _new_score(kind, old, count, given):
    if kind == GIVEN:
        score = given
    else:
        score = _add(old, _MAX if count > _MAX >> 16 else count << 16)
    return score


@inlined
def _primary(kind, records, slot, epoch, decay_steps):
    if kind == RECENCY:
        score = records[slot, SEEN]
    elif kind == GIVEN:
        score = records[slot, SCORE]
    else:
        score = _halved(records, slot, epoch, decay_steps)
    return score


@inlined
def _less(a0, a1, a2, b0, b1, b2):
    return a0 < b0 or (a0 == b0 and (a1 < b1 or (a1 == b1 and a2 < b2)))


@inlined
def _sift_down(heap, start, size):
    """Moves an entry down until both entries below it are larger."""
    e0, e1, e2, e3 = heap[start, 0], heap[start, 1], heap[start, 2], heap[start, 3]
    at, child = start, 2 * start + 1
    while child < size:
        if child + 1 < size and _less(
            heap[child + 1, 0], heap[child + 1, 1], heap[child + 1, 2], heap[child, 0], heap[child, 1], heap[child, 2]
        ):
            child += 1
        if not _less(heap[child, 0], heap[child, 1], heap[child, 2], e0, e1, e2):
            break
        for k in range(4):
            heap[at, k] = heap[child, k]
        at, child = child, 2 * child + 1
    heap[at, 0], heap[at, 1], heap[at, 2], heap[at, 3] = e0, e1, e2, e3


@inlined
def _push(heap, size, e0, e1, e2, e3):
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if not _less(e0, e1, e2, heap[above, 0], heap[above, 1], heap[above, 2]):
            break
        for k in range(4):
            heap[at, k] = heap[above, k]
        at = above
    heap[at, 0], heap[at, 1], heap[at, 2], heap[at, 3] = e0, e1, e2, e3


@kernel
def _offer(header, heap, kind, records, slot, epoch, decay_steps):
    """Adds a record whose key has changed to its shard's heap, if the key is within the limit."""
    size = header[HEAP_SIZE]
    if size >= 0:
        first = _primary(kind, records, slot, epoch, decay_steps)
        second = records[slot, SEEN] if kind == BOTH else np.int64(0)
        if not _less(header[LIMIT], header[LIMIT + 1], header[LIMIT + 2], first, second, records[slot, ID]):
            if size < len(heap):
                _push(heap, size, first, second, records[slot, ID], slot)
                header[HEAP_SIZE] = size + 1
            else:
                header[HEAP_SIZE] = -1


@kernel
def touch(headers, records, records_address, heaps, kind, decay_steps, step, slots, shards, counts, given):
    """Counts and scores of known ids; those of a slot below zero are passed over. Returns how many are new in the step.

    An id may come several times, in one call or in several: its counts add up.
    """
    epoch, num_new = step // decay_steps if decay_steps > 0 else 0, 0
    for i in range(len(slots)):
        ahead = slots[min(i + _AHEAD, len(slots) - 1)]
        prefetch(records_address + 8 * records.shape[1] * max(ahead, 0), 32)
        slot = slots[i]
        if slot >= 0:
            is_new, changes = records[slot, SEEN] != step + 1, True
            if kind != RECENCY:
                old = _halved(records, slot, epoch, decay_steps)
                records[slot, SCORE] = _new_score(kind, old, counts[i], given[i])
                changes = records[slot, SCORE] != old
            records[slot, COUNT] = _add(records[slot, COUNT], counts[i])
            records[slot, SEEN] = step + 1
            num_new += is_new
            if kind == RECENCY:  # its new key is beyond every limit
                continue
            shard = shards[i]
            if headers[shard, EPOCH] != epoch:
                headers[shard, HEAP_SIZE] = -1
                headers[shard, EPOCH] = epoch
            # A heap that had one key of a record twice would give it away twice.
            if (is_new or changes) and _primary(kind, records, slot, epoch, decay_steps) <= headers[shard, LIMIT]:
                _offer(headers[shard], heaps[shard], kind, records, slot, epoch, decay_steps)
    return num_new


@kernel
def fill(headers, records, records_address, heaps, kind, decay_steps, step, slots, shards, counts, given):
    """The first counts and scores of ids that have just been inserted."""
    epoch = step // decay_steps if decay_steps > 0 else 0
    for i in range(len(slots)):
        prefetch(records_address + 8 * records.shape[1] * slots[min(i + _AHEAD, len(slots) - 1)], 32)
        slot, shard = slots[i], shards[i]
        records[slot, SEEN] = step + 1
        records[slot, COUNT] = counts[i]
        if kind != RECENCY:
            records[slot, SCORE] = _new_score(kind, np.int64(0), counts[i], given[i])
        if headers[shard, EPOCH] != epoch:
            headers[shard, HEAP_SIZE] = -1
            headers[shard, EPOCH] = epoch
        if _primary(kind, records, slot, epoch, decay_steps) <= headers[shard, LIMIT]:
            _offer(headers[shard], heaps[shard], kind, records, slot, epoch, decay_steps)


@kernel
def _gather(header, records, records_address, kind, epoch, decay_steps, step, frames, rows):
    """The keys of a shard's records: from the front those that this batch has not seen, from the back the others.

    Returns how many are in front.
    """
    address, groups = header[ADDRESS], header[GROUPS]
    count = 0
    for group in range(groups):
        for place in range(16 * group, 16 * group + GROUP):
            if holds(address, place):
                frames[count] = slot_at(address, place)
                count += 1
    front, back = 0, count
    for i in range(count):
        prefetch(records_address + 8 * records.shape[1] * np.int64(frames[min(i + _AHEAD, count - 1)]), 32)
        slot = np.int64(frames[i])
        if records[slot, SEEN] == step + 1:
            back -= 1
            row = back
        else:
            row = front
            front += 1
        rows[row, 0] = _primary(kind, records, slot, epoch, decay_steps)
        rows[row, 1] = records[slot, SEEN] if kind == BOTH else np.int64(0)
        rows[row, 2] = records[slot, ID]
        rows[row, 3] = slot
    return front


@inlined
def _swap(rows, a, b):
    for k in range(4):
        rows[a, k], rows[b, k] = rows[b, k], rows[a, k]


@inlined
def _split(rows, low, high):
    """Splits `[low, high]` in two by the median of three keys, which are distinct; returns where."""
    middle = (low + high) >> 1
    if _less(rows[middle, 0], rows[middle, 1], rows[middle, 2], rows[low, 0], rows[low, 1], rows[low, 2]):
        _swap(rows, low, middle)
    if _less(rows[high, 0], rows[high, 1], rows[high, 2], rows[low, 0], rows[low, 1], rows[low, 2]):
        _swap(rows, low, high)
    if _less(rows[high, 0], rows[high, 1], rows[high, 2], rows[middle, 0], rows[middle, 1], rows[middle, 2]):
        _swap(rows, middle, high)
    p0, p1, p2 = rows[middle, 0], rows[middle, 1], rows[middle, 2]
    i, j = low, high
    while i <= j:
        while _less(rows[i, 0], rows[i, 1], rows[i, 2], p0, p1, p2):
            i += 1
        while _less(p0, p1, p2, rows[j, 0], rows[j, 1], rows[j, 2]):
            j -= 1
        if i <= j:
            _swap(rows, i, j)
            i += 1
            j -= 1
    return i, j


@kernel
def _sort(rows, low, high, wanted, stack):
    """Sorts `[low, high)` so far that positions below `wanted` hold what they hold in ascending order."""
    depth, first, last = 0, low, high - 1
    while True:
        while last - first > _FEW:
            i, j = _split(rows, first, last)
            if i >= wanted:  # what is above does not matter
                last = j
            elif j - first > last - i:
                stack[depth, 0], stack[depth, 1] = first, j
                depth += 1
                first = i
            else:
                stack[depth, 0], stack[depth, 1] = i, last
                depth += 1
                last = j
        for at in range(first + 1, last + 1):
            e0, e1, e2, e3 = rows[at, 0], rows[at, 1], rows[at, 2], rows[at, 3]
            to = at
            while to > first and _less(e0, e1, e2, rows[to - 1, 0], rows[to - 1, 1], rows[to - 1, 2]):
                for k in range(4):
                    rows[to, k] = rows[to - 1, k]
                to -= 1
            rows[to, 0], rows[to, 1], rows[to, 2], rows[to, 3] = e0, e1, e2, e3
        if depth == 0:
            break
        depth -= 1
        first, last = stack[depth, 0], stack[depth, 1]


@kernel
def _order(rows, count, chosen, ordered, ends, stack):
    """Writes the `chosen` smallest of `count` keys in ascending order: in buckets by the score, then sorted in each."""
    least, most = rows[0, 0], rows[0, 0]
    for i in range(count):
        least, most = min(least, rows[i, 0]), max(most, rows[i, 0])
    shift, span = np.uint64(0), np.uint64(most) - np.uint64(least)
    while span >> shift >= np.uint64(_BUCKETS):
        shift += np.uint64(1)
    ends[:] = 0
    for i in range(count):
        ends[np.int64((np.uint64(rows[i, 0]) - np.uint64(least)) >> shift) + 1] += 1
    last = 0  # the bucket in which the last of the chosen is
    for bucket in range(_BUCKETS):
        ends[bucket + 1] += ends[bucket]
        if ends[bucket] < chosen:
            last = bucket
    for i in range(count):
        bucket = np.int64((np.uint64(rows[i, 0]) - np.uint64(least)) >> shift)
        if bucket <= last:
            for k in range(4):
                ordered[ends[bucket], k] = rows[i, k]
            ends[bucket] += 1
    first = np.int64(0)  # a plain 0 is a type of its own, which functions called with it are compiled for once more
    for bucket in range(last + 1):
        if ends[bucket] - first > 1:
            _sort(ordered, first, ends[bucket], chosen, stack)
        first = ends[bucket]


@inlined
def _holds(records, entry, kind, epoch, decay_steps):
    """Whether a heap's entry is its record's key still."""
    slot = entry[3]
    return (
        records[slot, SEEN] > 0
        and records[slot, ID] == entry[2]
        and _primary(kind, records, slot, epoch, decay_steps) == entry[0]
        and (kind != BOTH or records[slot, SEEN] == entry[1])
    )


@inlined
def _pop(heap, size):
    """Takes the first entry out of a heap; returns its size then."""
    size -= 1
    if size > 0:
        for k in range(4):
            heap[0, k] = heap[size, k]
        _sift_down(heap, 0, size)
    return size


@kernel
def _select(header, heap, records, records_address, kind, decay_steps, step, wanted, usual, share, scratch):
    """Begins a new run of the `usual` smallest keys, or `wanted` if that is more, in `ordered`; returns how many."""
    frames, rows, ordered, ends, stack = scratch
    epoch = step // decay_steps if decay_steps > 0 else 0
    front = _gather(header, records, records_address, kind, epoch, decay_steps, step, frames, rows)
    # The first run of each shard is of another length, so that shards which fill alike do not all select together.
    length = usual if header[RUN_SEEN] > 0 else np.int64(usual * (0.25 + 0.75 * share))
    chosen = min(front, max(length, wanted))
    _order(rows, front, chosen, ordered, ends, stack)
    for k in range(3):
        header[LIMIT + k] = ordered[chosen - 1, k]
    header[HEAP_SIZE], header[RUN_SEEN] = 0, step + 1
    header[RUN_START], header[RUN_END] = 0, chosen
    for i in range(front, header[USED]):
        _offer(header, heap, kind, records, rows[i, 3], epoch, decay_steps)


@kernel
def _take(
    header, heap, run, records, records_address, kind, epoch, decay_steps, step, wanted, victims, seen_in, first, kept
):
    """Takes victims from a run and a heap until there are enough or both are empty; returns how many it took.

    Entries of records that this batch has seen stay in the heap.
    """
    taken, num_kept, size = 0, 0, max(np.int64(0), header[HEAP_SIZE])
    at, end, seen = header[RUN_START], header[RUN_END], header[RUN_SEEN]
    while taken < wanted:
        while at < end and (records[run[at], SEEN] <= 0 or records[run[at], SEEN] >= seen):
            at += 1
        while size > 0:
            holds = _holds(records, heap[0], kind, epoch, decay_steps)
            if holds and records[heap[0, 3], SEEN] != step + 1:
                break
            if holds:
                for k in range(4):
                    kept[num_kept, k] = heap[0, k]
                num_kept += 1
            size = _pop(heap, size)
        if at >= end and size == 0:
            break
        from_run = size == 0
        slot = heap[0, 3] if size > 0 else np.int64(0)
        if at < end:
            prefetch(records_address + 8 * records.shape[1] * np.int64(run[min(at + _AHEAD, end - 1)]), 32)
            if size > 0:
                second = records[run[at], SEEN] if kind == BOTH else np.int64(0)
                score = _primary(kind, records, np.int64(run[at]), epoch, decay_steps)
                from_run = _less(score, second, records[run[at], ID], heap[0, 0], heap[0, 1], heap[0, 2])
            if from_run:
                slot = np.int64(run[at])
                at += 1
        if not from_run:
            size = _pop(heap, size)
        victims[first + taken], seen_in[first + taken] = slot, records[slot, SEEN]
        records[slot, SEEN] = 0
        taken += 1
    for i in range(num_kept):
        _push(heap, size, kept[i, 0], kept[i, 1], kept[i, 2], kept[i, 3])
        size += 1
    header[RUN_START] = at
    if header[HEAP_SIZE] >= 0:
        header[HEAP_SIZE] = size
    return taken


@kernel
def _remove(header, records, seed, victims, ids, first, last):
    """Removes victims, whose records are known, from their shard's index."""
    address, groups = header[ADDRESS], header[GROUPS]
    for i in range(first, last):
        ids[i] = records[victims[i], ID]
        ask_for(address, groups, mix(np.uint64(ids[i]) ^ seed))
    for i in range(first, last):
        hashed = mix(np.uint64(ids[i]) ^ seed)
        take_out(address, groups, hashed, place_with(address, groups, hashed, victims[i]))
    header[USED] -= last - first


@kernel
def evict(
    headers,
    records,
    records_address,
    heaps,
    kind,
    decay_steps,
    step,
    seed,
    missing,
    runs,
    frames,
    rows,
    ordered,
    ends,
    stack,
    kept,
    victims,
    ids,
    seen_in,
):
    """Removes `missing[s]` ids of the smallest keys from each shard s, but for those seen in this step; writes their
    slots, their ids, and what `SEEN` was. Scratch, for a whole shard: `frames`, `rows`, `ordered`; `ends`, `stack`,
    `kept`.
    """
    epoch = step // decay_steps if decay_steps > 0 else 0
    count = np.int64(0)
    for shard in range(len(missing)):
        following = min(shard + 1, len(missing) - 1)
        start = headers[following, RUN_START]
        for i in range(start, min(start + min(missing[following], _AHEAD), headers[following, RUN_END])):
            prefetch(records_address + 8 * records.shape[1] * np.int64(runs[following, i]), 32)
        if missing[shard] == 0:
            continue
        header, heap, run, wanted, first = headers[shard], heaps[shard], runs[shard], missing[shard], count
        if header[EPOCH] != epoch:
            header[HEAP_SIZE] = -1
            header[EPOCH] = epoch
        at = (records, records_address, kind)
        if header[HEAP_SIZE] >= 0:
            count += _take(header, heap, run, *at, epoch, decay_steps, step, wanted, victims, seen_in, count, kept)
            _remove(header, records, seed, victims, ids, first, count)  # a selection is among those that stay
        wanted -= count - first
        if wanted > 0:
            first = count
            share = shard * 0.6180339887498949 % 1.0
            scratch = (frames, rows, ordered, ends, stack)
            _select(header, heap, *at, decay_steps, step, wanted, len(run), share, scratch)
            chosen = header[RUN_END]
            if chosen > len(run):  # it serves this step alone
                header[HEAP_SIZE] = -1
                run = frames
            for i in range(chosen):
                run[i] = ordered[i, 3]
            count += _take(header, heap, run, *at, epoch, decay_steps, step, wanted, victims, seen_in, count, kept)
            _remove(header, records, seed, victims, ids, first, count)
    return count

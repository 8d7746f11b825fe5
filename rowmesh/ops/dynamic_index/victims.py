"""Scores of records, and the records of the smallest (score, id), found exactly.

A shard keeps a heap of the smallest keys of its last selection and their limit, the largest of them. A key is (score,
last step where it breaks ties, else 0, id). Every record whose key is within the limit has an entry with that key: who
gets such a key later is added. So the smallest valid entry is the smallest key of the shard; an entry whose record has
another key by now, or has left, is passed over. Where no entry is left, where the heap has no room, and where
frequencies halve (which makes ties of what were none), the next victim is found by a new selection.
"""

from __future__ import annotations

import numpy as np

from rowmesh.ops.dynamic_index.cpu import (
    ADDRESS,
    COUNT,
    EPOCH,
    GROUPS,
    HEAP_SIZE,
    ID,
    LIMIT,
    SCORE,
    SEEN,
    USED,
    mix,
    place_of,
    take_out,
)
from rowmesh.ops.simd import inlined, kernel, load_i64, load_u32, prefetch

RECENCY, FREQUENCY, BOTH, GIVEN = 0, 1, 2, 3
_MAX = np.int64(2**63 - 1)
_AHEAD = 16


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


@inlined
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
    """Counts and scores of known ids; those of a slot below zero are passed over."""
    epoch = step // decay_steps if decay_steps > 0 else 0
    for i in range(len(slots)):
        ahead = slots[min(i + _AHEAD, len(slots) - 1)]
        prefetch(records_address + 8 * records.shape[1] * max(ahead, 0), 32)
        slot = slots[i]
        if slot >= 0:
            if kind != RECENCY:
                old = _halved(records, slot, epoch, decay_steps)
                records[slot, SCORE] = _new_score(kind, old, counts[i], given[i])
            records[slot, COUNT] = _add(records[slot, COUNT], counts[i])
            records[slot, SEEN] = step + 1
            shard = shards[i]
            if headers[shard, EPOCH] != epoch:
                headers[shard, HEAP_SIZE] = -1
                headers[shard, EPOCH] = epoch
            _offer(headers[shard], heaps[shard], kind, records, slot, epoch, decay_steps)


@kernel
def fill(headers, records, heaps, kind, decay_steps, step, slots, shards, counts, given):
    """The first counts and scores of ids that have just been inserted."""
    epoch = step // decay_steps if decay_steps > 0 else 0
    for i in range(len(slots)):
        slot, shard = slots[i], shards[i]
        records[slot, SEEN] = step + 1
        records[slot, COUNT] = counts[i]
        if kind != RECENCY:
            records[slot, SCORE] = _new_score(kind, np.int64(0), counts[i], given[i])
        if headers[shard, EPOCH] != epoch:
            headers[shard, HEAP_SIZE] = -1
            headers[shard, EPOCH] = epoch
        _offer(headers[shard], heaps[shard], kind, records, slot, epoch, decay_steps)


@inlined
def _gather(header, records, records_address, kind, epoch, decay_steps, frames, rows):
    """The keys of all records of a shard; returns how many."""
    address, groups = header[ADDRESS], header[GROUPS]
    count = 0
    for word_number in range(2 * groups):
        word = np.uint64(load_i64(address + 8 * word_number))
        for byte in range(8):
            if (word >> np.uint64(8 * byte)) & np.uint64(0x80) != np.uint64(0):
                frames[count] = np.int64(load_u32(address + 20 * groups + 4 * (8 * word_number + byte)))
                count += 1
    for i in range(count):
        prefetch(records_address + 8 * records.shape[1] * frames[min(i + _AHEAD, count - 1)], 32)
        slot = frames[i]
        rows[i, 0] = _primary(kind, records, slot, epoch, decay_steps)
        rows[i, 1] = records[slot, SEEN] if kind == BOTH else np.int64(0)
        rows[i, 2] = records[slot, ID]
        rows[i, 3] = slot
    return count


@inlined
def _swap(rows, a, b):
    for k in range(4):
        rows[a, k], rows[b, k] = rows[b, k], rows[a, k]


@inlined
def _partition(rows, count, smallest):
    """Brings the `smallest` smallest keys to the front (quickselect; keys are distinct)."""
    low, high = 0, count - 1
    while low < high:
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
        if smallest - 1 <= j:
            high = j
        elif smallest - 1 >= i:
            low = i
        else:
            break


@inlined
def _largest(header, rows, count):
    """Sets the limit of a shard to the largest of some keys."""
    at = 0
    for i in range(1, count):
        if _less(rows[at, 0], rows[at, 1], rows[at, 2], rows[i, 0], rows[i, 1], rows[i, 2]):
            at = i
    header[LIMIT], header[LIMIT + 1], header[LIMIT + 2] = rows[at, 0], rows[at, 1], rows[at, 2]


@inlined
def _current(records, entry, kind, epoch, decay_steps):
    """Whether a heap's entry is its record's key still."""
    slot = entry[3]
    return (
        records[slot, SEEN] > 0
        and records[slot, ID] == entry[2]
        and _primary(kind, records, slot, epoch, decay_steps) == entry[0]
        and (kind != BOTH or records[slot, SEEN] == entry[1])
    )


@inlined
def _remove(header, records, seed, slot):
    hashed = mix(np.uint64(records[slot, ID]) ^ seed)
    place = place_of(header[ADDRESS], header[GROUPS], hashed, records[slot, ID], records)
    take_out(header[ADDRESS], header[GROUPS], hashed, place)
    header[USED] -= 1
    records[slot, SEEN] = 0


@inlined
def _pop(header, heap, size, records, kind, epoch, decay_steps, step, seed, missing, victims, count, kept):
    """Takes victims from a heap until none is missing or it is empty; returns how many it took, and its size then.

    Entries of records that this batch has seen are kept in it.
    """
    taken, num_kept = 0, 0
    while taken < missing and size > 0:
        if _current(records, heap[0], kind, epoch, decay_steps):
            slot = heap[0, 3]
            if records[slot, SEEN] == step + 1:
                for k in range(4):
                    kept[num_kept, k] = heap[0, k]
                num_kept += 1
            else:
                _remove(header, records, seed, slot)
                victims[count + taken] = slot
                taken += 1
        size -= 1
        if size > 0:
            for k in range(4):
                heap[0, k] = heap[size, k]
            _sift_down(heap, 0, size)
    for i in range(num_kept):
        _push(heap, size, kept[i, 0], kept[i, 1], kept[i, 2], kept[i, 3])
        size += 1
    return taken, size


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
    touched,
    selected,
    frames,
    rows,
    kept,
    victims,
):
    """Removes `missing[s]` ids of the smallest keys from each shard s, but for those seen in this step, of which it has
    `touched[s]`; writes their slots. Scratch: `frames`, `rows` and `kept`, for a whole shard.
    """
    epoch = step // decay_steps if decay_steps > 0 else 0
    count = 0
    for shard in range(len(missing)):
        if missing[shard] == 0:
            continue
        header, heap, wanted = headers[shard], heaps[shard], missing[shard]
        if header[EPOCH] != epoch:
            header[HEAP_SIZE] = -1
            header[EPOCH] = epoch
        if header[HEAP_SIZE] > 0:
            taken, size = _pop(
                header,
                heap,
                header[HEAP_SIZE],
                records,
                kind,
                epoch,
                decay_steps,
                step,
                seed,
                wanted,
                victims,
                count,
                kept,
            )
            header[HEAP_SIZE] = size
            count += taken
            wanted -= taken
        if wanted > 0:
            total = _gather(header, records, records_address, kind, epoch, decay_steps, frames, rows)
            chosen = min(total, max(selected, wanted + touched[shard]))
            _partition(rows, total, chosen)
            for start in range(chosen // 2 - 1, -1, -1):
                _sift_down(rows, start, chosen)
            fits = chosen <= len(heap)
            if fits:
                _largest(header, rows, chosen)
            taken, size = _pop(
                header, rows, chosen, records, kind, epoch, decay_steps, step, seed, wanted, victims, count, kept
            )
            count += taken
            header[HEAP_SIZE] = size if fits else -1
            if fits:
                for i in range(size):
                    for k in range(4):
                        heap[i, k] = rows[i, k]
    return count

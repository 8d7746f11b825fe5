"""Scores of records, and the records of the smallest (score, id), found exactly.

A key is (score, last step where it breaks ties, else 0, id). A selection finds the smallest keys of a shard and keeps
their slots in ascending order, its run, and the largest of them, its limit. A record that gets a key within the limit
later is appended to the shard's later keys, with that key; they are sorted when ids are to leave. An entry of the run
holds while its record was not seen since the selection; a later key holds while its record has it. So the smaller of
the first that hold is the smallest key of the shard. Where both are used up, where later keys have no room, and where
frequencies halve (which makes ties of what were none), the next victim is found by a new selection.
"""

from __future__ import annotations

import numpy as np

from rowmesh.ops.dynamic_index.cpu import (
    ADDRESS,
    COUNT,
    EPOCH,
    GROUP,
    GROUPS,
    ID,
    LIMIT,
    NUM_LATER,
    NUM_SORTED,
    RUN_END,
    RUN_SEEN,
    RUN_START,
    SCORE,
    SEEN,
    USED,
    ask_for,
    ask_for_next,
    ask_for_record,
    ask_for_room,
    holds,
    mix,
    place_with,
    put,
    slot_at,
    take_out,
)
from rowmesh.ops.dynamic_index.ordering import NUM_ENDS, less, order
from rowmesh.ops.memory import Buffer, populate
from rowmesh.ops.simd import inlined, kernel, prefetch

RECENCY, FREQUENCY, BOTH, GIVEN = 0, 1, 2, 3
_MAX = np.int64(2**63 - 1)
_AHEAD = 16
_MOST_EAGER_BYTES = 256 << 20
_GOLDEN_RATIO = 0.6180339887498949


class Selection:
    """The smallest keys of shards, as far as they are known, and scratch memory for a selection in the largest shard.

    Args:
        num_shards: of one rank.
        largest: the capacity of the largest.
        kind: of the scores.
    """

    def __init__(self, num_shards: int, largest: int, kind: int) -> None:
        # By recency, new keys are beyond every limit: runs get the memory that later ones do not need.
        num_later, in_run = (0, 9 * largest // 20) if kind == RECENCY else (largest // 40, largest // 4)
        self.later = _zeros(np.int64, num_shards, max(8, num_later), 4)
        self._runs = _zeros(np.uint32, num_shards, max(8, in_run))
        slots, kept = np.empty(largest, np.uint32), np.empty_like(self.later[:1].reshape(-1, 4))
        rows, scratch = np.empty((2, max(8, largest), 4), np.int64)
        ends, stack = np.empty(NUM_ENDS, np.int64), np.empty((1 + largest // 32, 2), np.int64)
        self.arguments = (self._runs, slots, rows, scratch, ends, stack, kept)

    @property
    def num_bytes(self) -> int:
        """Memory that grows with the shards, without scratch memory."""
        return self.later.nbytes + self._runs.nbytes


def _zeros(dtype: type, *shape: int) -> np.ndarray:
    """Zeros, committed at once unless they are many: else the step in which the shards are full would commit them."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = Buffer(num_bytes)
    if num_bytes <= _MOST_EAGER_BYTES:
        populate(buffer.address, num_bytes)
    return buffer.array(dtype, *shape)


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
def _offer(headers, later, shard, kind, records, slot, epoch, decay_steps):
    """Adds a record whose key has changed to those that came later to its shard, if the key is within the limit."""
    size = headers[shard, NUM_LATER]
    if size >= 0:
        first, id = _primary(kind, records, slot, epoch, decay_steps), records[slot, ID]
        second = records[slot, SEEN] if kind == BOTH else np.int64(0)
        if not less(headers[shard, LIMIT], headers[shard, LIMIT + 1], headers[shard, LIMIT + 2], first, second, id):
            if size < later.shape[1]:
                later[shard, size, 0], later[shard, size, 1] = first, second
                later[shard, size, 2], later[shard, size, 3] = id, slot
                headers[shard, NUM_LATER] = size + 1
            else:
                headers[shard, NUM_LATER] = -1


@kernel
def touch(headers, records, records_address, later, kind, decay_steps, step, slots, shards, counts, given):
    """Counts and scores of known ids; those of a slot below zero are passed over. Returns how many are new in the step.

    An id may come several times, in one call or in several: its counts add up.
    """
    epoch, num_new = step // decay_steps if decay_steps > 0 else 0, 0
    for i in range(len(slots)):
        ahead = slots[min(i + _AHEAD, len(slots) - 1)]
        ask_for_record(records_address, records.shape[1], max(ahead, 0))
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
                headers[shard, NUM_LATER] = -1
                headers[shard, EPOCH] = epoch
            # Later keys that had one of a record twice would give it away twice.
            if (is_new or changes) and _primary(kind, records, slot, epoch, decay_steps) <= headers[shard, LIMIT]:
                _offer(headers, later, shard, kind, records, slot, epoch, decay_steps)
    return num_new


@kernel
def enter(headers, records, records_address, later, kind, decay_steps, step, ids, hashes, shards, slots, counts, given):
    """Adds ids that are not there to the index, which has room, with their first counts and scores."""
    epoch = step // decay_steps if decay_steps > 0 else 0
    later_address = np.int64(later.ctypes.data)
    for i in range(-3 * _AHEAD, len(ids)):
        ask_for_room(headers, hashes, shards, i)
        if i + _AHEAD >= 0 and i + _AHEAD < len(ids):
            ask_for_record(records_address, records.shape[1], slots[i + _AHEAD])
            if kind != RECENCY:
                ahead = shards[i + _AHEAD]
                entry = ahead * later.shape[1] + max(np.int64(0), headers[ahead, NUM_LATER])
                prefetch(later_address + 32 * entry, 32)
        if i < 0:
            continue
        slot, shard = slots[i], shards[i]
        put(headers[shard, ADDRESS], headers[shard, GROUPS], hashes[i], slot)
        headers[shard, USED] += 1
        records[slot, ID], records[slot, SEEN], records[slot, COUNT] = ids[i], step + 1, counts[i]
        if kind == RECENCY:  # beyond every limit
            continue
        records[slot, SCORE] = _new_score(kind, np.int64(0), counts[i], given[i])
        if headers[shard, EPOCH] != epoch:
            headers[shard, NUM_LATER] = -1
            headers[shard, EPOCH] = epoch
        if _primary(kind, records, slot, epoch, decay_steps) <= headers[shard, LIMIT]:
            _offer(headers, later, shard, kind, records, slot, epoch, decay_steps)


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
        ask_for_record(records_address, records.shape[1], np.int64(frames[min(i + _AHEAD, count - 1)]))
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
def _holds(records, later, at, kind, epoch, decay_steps):
    """Whether a later key is its record's still."""
    slot = later[at, 3]
    return (
        records[slot, SEEN] > 0
        and records[slot, ID] == later[at, 2]
        and _primary(kind, records, slot, epoch, decay_steps) == later[at, 0]
        and (kind != BOTH or records[slot, SEEN] == later[at, 1])
    )


@kernel
def _sort_later(header, later, rows, scratch, ends, stack):
    """Sorts the keys that came later, which fell to those that were sorted before: the smallest is the last then."""
    first, size = header[NUM_SORTED], header[NUM_LATER]
    count, to = size - first, size - 1
    for i in range(count):
        for k in range(4):
            rows[i, k] = later[first + i, k]
    order(rows, count, count, scratch, ends, stack)
    for i in range(count):
        e0, e1, e2 = rows[i, 0], rows[i, 1], rows[i, 2]
        while first > 0 and less(later[first - 1, 0], later[first - 1, 1], later[first - 1, 2], e0, e1, e2):
            first -= 1
            for k in range(4):
                later[to, k] = later[first, k]
            to -= 1
        for k in range(4):
            later[to, k] = rows[i, k]
        to -= 1
    header[NUM_SORTED] = size


@kernel
def _select(headers, all_later, shard, records, records_address, kind, decay_steps, step, wanted, usual, scratch):
    """Begins a new run of the `usual` smallest keys, or `wanted` if that is more, which come first in the rows."""
    header, frames, rows = headers[shard], scratch[0], scratch[1]
    share = shard * _GOLDEN_RATIO % 1.0
    epoch = step // decay_steps if decay_steps > 0 else 0
    front = _gather(header, records, records_address, kind, epoch, decay_steps, step, frames, rows)
    # The first run of each shard is of another length, so that shards which fill alike do not all select together.
    length = usual if header[RUN_SEEN] > 0 else np.int64(usual * (0.25 + 0.75 * share))
    chosen = min(front, max(length, wanted))
    # Rows from `front` on are used below: the ranges that are ordered end before them.
    if chosen == 0:  # this batch has seen them all
        return
    order(rows, front, chosen, *scratch[2:])
    for k in range(3):
        header[LIMIT + k] = rows[chosen - 1, k]
    header[NUM_LATER], header[NUM_SORTED], header[RUN_SEEN] = 0, 0, step + 1
    header[RUN_START], header[RUN_END] = 0, chosen
    for i in range(front, header[USED] if kind != RECENCY else front):
        _offer(headers, all_later, shard, kind, records, rows[i, 3], epoch, decay_steps)


@kernel
def _take(
    header, later, run, records, records_address, kind, epoch, decay_steps, step, wanted, victims, facts, first, kept
):
    """Takes victims from a run and from later keys until there are enough or both are empty; returns how many it took.

    Entries of records that this batch has seen stay there.
    """
    taken, num_kept, size = 0, 0, max(np.int64(0), header[NUM_LATER])
    at, end, seen = header[RUN_START], header[RUN_END], header[RUN_SEEN]
    for i in range(max(np.int64(0), size - wanted), size):
        ask_for_record(records_address, records.shape[1], later[i, 3])
    while taken < wanted:
        while at < end and (records[run[at], SEEN] <= 0 or records[run[at], SEEN] >= seen):
            at += 1
        while size > 0:
            holds = _holds(records, later, size - 1, kind, epoch, decay_steps)
            if holds and records[later[size - 1, 3], SEEN] != step + 1:
                break
            if holds:
                for k in range(4):
                    kept[num_kept, k] = later[size - 1, k]
                num_kept += 1
            size -= 1
        if at >= end and size == 0:
            break
        from_run = size == 0
        slot = later[size - 1, 3] if size > 0 else np.int64(0)
        if at < end:
            ask_for_record(records_address, records.shape[1], np.int64(run[min(at + _AHEAD, end - 1)]))
            if size > 0:
                l0, l1, l2 = later[size - 1, 0], later[size - 1, 1], later[size - 1, 2]
                second = records[run[at], SEEN] if kind == BOTH else np.int64(0)
                score = _primary(kind, records, np.int64(run[at]), epoch, decay_steps)
                from_run = less(score, second, records[run[at], ID], l0, l1, l2)
            if from_run:
                slot = np.int64(run[at])
                at += 1
        if not from_run:
            size -= 1
        victims[first + taken] = slot
        facts[first + taken, 0], facts[first + taken, 1] = records[slot, SEEN], records[slot, COUNT]
        facts[first + taken, 2] = np.int64(0) if kind == RECENCY else records[slot, SCORE]
        records[slot, SEEN] = 0
        taken += 1
    for i in range(num_kept - 1, -1, -1):
        for k in range(4):
            later[size, k] = kept[i, k]
        size += 1
    header[RUN_START] = at
    if header[NUM_LATER] >= 0:
        header[NUM_LATER], header[NUM_SORTED] = size, size
    return taken


@kernel
def _remove(header, records, seed, victims, ids, first, last):
    """Removes victims, whose records are known, from their shard's index."""
    address, groups = header[ADDRESS], header[GROUPS]
    for i in range(first, last):
        ids[i] = records[victims[i], ID]
        ask_for(address, groups, mix(np.uint64(ids[i]) ^ seed))
    for i in range(first, last):
        ask_for_next(address, groups, mix(np.uint64(ids[i]) ^ seed), victims[i])
    for i in range(first, last):
        hashed = mix(np.uint64(ids[i]) ^ seed)
        take_out(address, groups, hashed, place_with(address, groups, hashed, victims[i]))
    header[USED] -= last - first


@inlined
def _ask_for_next(headers, runs, records_address, num_columns, missing, shard):
    """Prefetches the first entries of the run two shards ahead, and of the next run their records."""
    second, first = min(shard + 2, len(missing) - 1), min(shard + 1, len(missing) - 1)
    start = headers[second, RUN_START]
    for i in range(start, min(start + missing[second] + _AHEAD, headers[second, RUN_END]), 16):
        prefetch(np.int64(runs.ctypes.data) + 4 * (second * runs.shape[1] + i), 4)
    start = headers[first, RUN_START]
    for i in range(start, min(start + min(missing[first], _AHEAD), headers[first, RUN_END])):
        ask_for_record(records_address, num_columns, np.int64(runs[first, i]))


@kernel
def evict(
    headers,
    records,
    records_address,
    later,
    kind,
    decay_steps,
    step,
    seed,
    missing,
    runs,
    frames,
    rows,
    scratch,
    ends,
    stack,
    kept,
    victims,
    ids,
    facts,
):
    """Removes `missing[s]` ids of the smallest keys from each shard s, but for those seen in this step; writes their
    slots, their ids, and their facts: `SEEN`, `COUNT` and `SCORE` (0 by recency). Scratch, for a whole shard: `frames`,
    `rows`, `scratch`; `ends`, `stack`, `kept`.
    """
    epoch = step // decay_steps if decay_steps > 0 else 0
    count = np.int64(0)
    for shard in range(len(missing)):
        _ask_for_next(headers, runs, records_address, records.shape[1], missing, shard)
        if missing[shard] == 0:
            continue
        header, mine, run, wanted, first = headers[shard], later[shard], runs[shard], missing[shard], count
        if header[EPOCH] != epoch:
            header[NUM_LATER] = -1
            header[EPOCH] = epoch
        at = (records, records_address, kind)
        if header[NUM_LATER] >= 0:
            if header[NUM_SORTED] < header[NUM_LATER]:
                _sort_later(header, mine, rows, scratch, ends, stack)
            count += _take(header, mine, run, *at, epoch, decay_steps, step, wanted, victims, facts, count, kept)
            _remove(header, records, seed, victims, ids, first, count)  # a selection is among those that stay
        wanted -= count - first
        if wanted > 0:
            first = count
            selected = (frames, rows, scratch, ends, stack)
            _select(headers, later, shard, *at, decay_steps, step, wanted, len(run), selected)
            chosen = header[RUN_END]
            if chosen > len(run):  # it serves this step alone
                header[NUM_LATER] = -1
                run = frames
            for i in range(chosen):
                run[i] = rows[i, 3]
            if header[NUM_LATER] >= 0:
                _sort_later(header, mine, rows, scratch, ends, stack)
            count += _take(header, mine, run, *at, epoch, decay_steps, step, wanted, victims, facts, count, kept)
            _remove(header, records, seed, victims, ids, first, count)
    return count


@kernel
def begin(headers, records, records_address, later, kind, decay_steps, step, capacities, arguments):
    """Selects in some shards that will be full soon, each at another fill, so that not all select when they are full.

    Keys that come within the limit until then must fit among the later keys; by recency none does, so there it begins
    earlier. `arguments` are those of a `Selection`.
    """
    runs, frames, rows, scratch, ends, stack, _ = arguments
    epoch = step // decay_steps if decay_steps > 0 else 0
    first, range_of = (0.4, 0.55) if kind == RECENCY else (0.8, 0.19)
    left = 1 + len(headers) // 32
    for shard in range(len(headers)):
        fill = first + range_of * (shard * _GOLDEN_RATIO % 1.0)
        if left > 0 and headers[shard, RUN_SEEN] == 0 and headers[shard, USED] > fill * capacities[shard]:
            headers[shard, EPOCH] = epoch
            at = (records, records_address, kind, decay_steps, step)
            _select(headers, later, shard, *at, 0, runs.shape[1], (frames, rows, scratch, ends, stack))
            for i in range(headers[shard, RUN_END]):
                runs[shard, i] = rows[i, 3]
            left -= 1

"""The index of dynamic tables on a CPU: groups of 12 digests and slots; the ids stand in the records of the slots.

A shard has G groups, each a cache line: 12 digests, a word of overflow (8 counters of 4 bits), and 12 slots (uint32). A
digest of zero is an empty place; others have their highest bit set, so no id is reserved. An id has a sequence of
groups: some that its hash chooses (neighbours would fill up in clusters, as ids come and go), then one after the other.
It stands in the first that had a place; each full group that it passed counts it in one of its counters, which three
bits of the hash choose. A search ends at a group where that counter is zero, and an erased id leaves no trace: there
are no tombstones, and a table may be full and change for ever. A counter that reached 15 stays there until the shard
grows, which makes searches longer and never wrong.

So a known id costs two lines, its group's and its record's. A place is numbered 16 · group + k.

A slot's record is a row of int64: the id first. The slot is the row's frame and never changes while the id is known;
what moves when a shard grows is digests and slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rowmesh.ops.simd import inlined, kernel, load_i64, load_u32, prefetch, store_i64, store_u32

ADDRESS, GROUPS, USED, NUM_LATER, LIMIT, EPOCH = 0, 1, 2, 3, 4, 7  # of a shard's header; LIMIT has three
RUN_START, RUN_END, RUN_SEEN, NUM_SORTED, COLUMNS = 8, 9, 10, 11, 12
ID, SEEN, COUNT, SCORE = 0, 1, 2, 3  # of a record; SEEN is the last step + 1, and 0 where nothing is
GROUP, GROUP_BYTES = 12, 64
_OVERFLOW, _SLOTS = GROUP, GROUP + 4  # bytes of a group
_ONES, _HIGHS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_LOWER_HIGHS = np.uint64(0x80808080)  # of the second word of digests, which the overflow shares
_AHEAD = 16
_LOOK_FURTHER, _ABSENT = np.int64(-2), np.int64(-3)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_JUMPS = 16  # groups that the hash chooses, after the first
_intrinsic: Any = intrinsic


@_intrinsic
def _first_bit(typing: Any, word: Any) -> Any:
    """The number of the lowest set bit of a uint64 that is not zero, int64."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@inlined
def mix(value):
    """The finalizer of splitmix64, of a uint64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@inlined
def _group_of(hashed, groups):
    return np.int64(((hashed >> np.uint64(32)) * np.uint64(groups)) >> np.uint64(32))


@inlined
def _next_group(group, groups, hashed, passed):
    """The group of a hash after so many that it passed, the last of which is given."""
    if passed <= _JUMPS:
        following = _group_of(hashed * (np.uint64(2 * passed + 1) * _GOLDEN), groups)
    else:
        following = group + 1 if group + 1 < groups else 0
    return following


@inlined
def _digest_of(hashed):
    return ((hashed >> np.uint64(25)) & np.uint64(0x7F)) | np.uint64(0x80)


@inlined
def _matches(word, digest):
    """The high bits of the bytes that equal a digest; above a true one there may be false ones."""
    word = word ^ (digest * _ONES)
    return (word - _ONES) & ~word & _HIGHS


@inlined
def _counter_of(hashed):
    """By how many bits the counter of overflow is shifted; shards, groups and digests use other bits of the hash."""
    return ((hashed >> np.uint64(20)) & np.uint64(7)) << np.uint64(2)


@inlined
def _passed(line, hashed):
    """How many ids of a hash's counter passed a group."""
    return (np.uint64(load_u32(line + _OVERFLOW)) >> _counter_of(hashed)) & np.uint64(15)


@inlined
def _count_passing(line, hashed, change):
    count = _passed(line, hashed)
    if count != np.uint64(15):
        word = np.uint64(load_u32(line + _OVERFLOW)) & ~(np.uint64(15) << _counter_of(hashed))
        store_u32(line + _OVERFLOW, np.int64(word | (np.uint64(np.int64(count) + change) << _counter_of(hashed))))


@inlined
def slot_at(address, place):
    """The slot in a place."""
    return load_u32(address + GROUP_BYTES * (place >> 4) + _SLOTS + 4 * (place & 15))


@inlined
def holds(address, place):
    """Whether there is an id in a place."""
    word = np.uint64(load_i64(address + GROUP_BYTES * (place >> 4) + (place & 8)))
    return (word >> np.uint64(8 * (place & 7))) & np.uint64(0x80) != np.uint64(0)


@inlined
def ask_for(address, groups, hashed):
    """Prefetches the group that a hash belongs to."""
    prefetch(address + GROUP_BYTES * _group_of(hashed, groups), 8)


@inlined
def ask_for_record(address, num_columns, slot):
    """Prefetches a record, which may stand on two lines."""
    at = address + 8 * num_columns * slot
    prefetch(at, 8)
    prefetch(at + 8 * (num_columns - 1), 8)


@inlined
def _is_full(line):
    low, high = np.uint64(load_i64(line)), np.uint64(load_i64(line + 8))
    return low & _HIGHS == _HIGHS and high & _LOWER_HIGHS == _LOWER_HIGHS


@inlined
def ask_for_room(headers, hashes, shards, i):
    """Prefetches what `put` will need for the ids after one: their groups, and the next ones where these are full."""
    num_ids = len(hashes)
    if i + 3 * _AHEAD < num_ids:
        shard, hashed = shards[i + 3 * _AHEAD], hashes[i + 3 * _AHEAD]
        ask_for(headers[shard, ADDRESS], headers[shard, GROUPS], hashed)
    for passed in range(1, 3):
        following = i + (3 - passed) * _AHEAD
        if following >= 0 and following < num_ids:
            hashed, shard, is_full = hashes[following], shards[following], True
            address, groups = headers[shard, ADDRESS], headers[shard, GROUPS]
            for before in range(passed):
                group = _group_of(hashed, groups) if before == 0 else _next_group(0, groups, hashed, before)
                is_full = is_full and _is_full(address + GROUP_BYTES * group)
            if is_full:
                prefetch(address + GROUP_BYTES * _next_group(0, groups, hashed, passed), 8)


@inlined
def _fitting(line, digest):
    """The places of a group whose digests fit: bit 8k is place k, bit 8k + 1 place 8 + k."""
    low = _matches(np.uint64(load_i64(line)), digest)
    high = _matches(np.uint64(load_i64(line + 8)), digest) & _LOWER_HIGHS
    return (low >> np.uint64(7)) | (high >> np.uint64(6))


@inlined
def place_of(address, groups, hashed, id, records):
    """The place of an id in its shard, or −1."""
    group, digest = _group_of(hashed, groups), _digest_of(hashed)
    found, searched = -1, 0
    while found < 0 and searched <= groups + _JUMPS:
        line = address + GROUP_BYTES * group
        for half in range(2):
            match = _matches(np.uint64(load_i64(line + 8 * half)), digest)
            if half == 1:
                match &= _LOWER_HIGHS
            while match != np.uint64(0) and found < 0:
                place = 16 * group + 8 * half + (_first_bit(match) >> 3)
                if records[slot_at(address, place), 0] == id:
                    found = place
                match &= match - np.uint64(1)
        if found < 0 and _passed(line, hashed) == np.uint64(0):
            break
        searched += 1
        group = _next_group(group, groups, hashed, searched)
    return found


@inlined
def place_with(address, groups, hashed, slot):
    """The place of a slot that is there; no record is read."""
    group, digest = _group_of(hashed, groups), _digest_of(hashed)
    found, searched = -1, 0
    while found < 0:
        for half in range(2):
            match = _matches(np.uint64(load_i64(address + GROUP_BYTES * group + 8 * half)), digest)
            if half == 1:
                match &= _LOWER_HIGHS
            while match != np.uint64(0) and found < 0:
                place = 16 * group + 8 * half + (_first_bit(match) >> 3)
                if slot_at(address, place) == slot:
                    found = place
                match &= match - np.uint64(1)
        searched += 1
        group = _next_group(group, groups, hashed, searched)
    return found


@inlined
def put(address, groups, hashed, slot):
    """Stores a slot in the first group with an empty place; there must be one."""
    group, passed = _group_of(hashed, groups), 0
    done = False
    while not done:
        line = address + GROUP_BYTES * group
        for half in range(2):
            word = np.uint64(load_i64(line + 8 * half))
            empty = ~word & (_HIGHS if half == 0 else _LOWER_HIGHS)
            if not done and empty != np.uint64(0):
                byte = _first_bit(empty) >> 3
                store_i64(line + 8 * half, np.int64(word | (_digest_of(hashed) << np.uint64(8 * byte))))
                store_u32(line + _SLOTS + 4 * (8 * half + byte), slot)
                done = True
        if not done:
            _count_passing(line, hashed, 1)
            passed += 1
            group = _next_group(group, groups, hashed, passed)


@inlined
def ask_for_next(address, groups, hashed, slot):
    """Prefetches the second group of a hash, unless the slot is in its first."""
    line = address + GROUP_BYTES * _group_of(hashed, groups)
    fitting, is_there = _fitting(line, _digest_of(hashed)), False
    while fitting != np.uint64(0):
        bit = _first_bit(fitting)
        is_there |= np.int64(load_u32(line + _SLOTS + 4 * ((bit >> 3) + 8 * (bit & 1)))) == slot
        fitting &= fitting - np.uint64(1)
    if not is_there:
        prefetch(address + GROUP_BYTES * _next_group(0, groups, hashed, 1), 8)


@inlined
def take_out(address, groups, hashed, place):
    """Empties a place, and the overflow that its id caused."""
    line = address + GROUP_BYTES * (place >> 4) + (place & 8)
    word = np.uint64(load_i64(line))
    store_i64(line, np.int64(word & ~(np.uint64(0xFF) << np.uint64(8 * (place & 7)))))
    group, passed = _group_of(hashed, groups), 0
    while group != place >> 4:
        _count_passing(address + GROUP_BYTES * group, hashed, -1)
        passed += 1
        group = _next_group(group, groups, hashed, passed)


@kernel
def locate(ids, seed, num_shards, first_shard, num_here, hashes, shards):
    """Hash and local shard of each id; returns the position of one whose shard is not here, or −1."""
    mask = num_shards - np.uint64(1)
    power_of_two = (num_shards & mask) == np.uint64(0)
    strange = -1
    for i in range(len(ids)):
        hashed = mix(np.uint64(ids[i]) ^ seed)
        shard = np.int64(hashed & mask if power_of_two else hashed % num_shards) - first_shard
        hashes[i], shards[i] = hashed, shard
        if shard < 0 or shard >= num_here:
            strange = i
    return strange


@inlined
def _ask_for_records(line, hashed, records_address, record_bytes):
    """Prefetches the records of a group that fit; returns the slot of the first, or −1."""
    fitting, slot = _fitting(line, _digest_of(hashed)), np.int64(-1)
    while fitting != np.uint64(0):
        bit = _first_bit(fitting)
        fits = np.int64(load_u32(line + _SLOTS + 4 * ((bit >> 3) + 8 * (bit & 1))))
        prefetch(records_address + record_bytes * fits, 8)
        slot = fits if slot < 0 else slot
        fitting &= fitting - np.uint64(1)
    return slot


@kernel
def find(headers, records, records_address, ids, hashes, shards, slots):
    """The slot of each id, or −1.

    Ahead of an id, in turns, its shard's header is asked for; its group; the records of the slots that fit, or the next
    group where the first was passed; and the records of that one.
    """
    num_ids, record_bytes = np.int64(len(ids)), 8 * records.shape[1]
    lines = np.empty(4 * _AHEAD, np.int64)  # of the ids ahead
    at, header_bytes = headers.ctypes.data, 8 * headers.shape[1]
    for i in range(-4 * _AHEAD, num_ids):
        if i + 4 * _AHEAD < num_ids:
            prefetch(np.int64(at) + header_bytes * shards[i + 4 * _AHEAD], 8)
        first, second, third = i + 3 * _AHEAD, i + 2 * _AHEAD, i + _AHEAD
        if first >= 0 and first < num_ids:
            shard = shards[first]
            line = headers[shard, ADDRESS] + GROUP_BYTES * _group_of(hashes[first], headers[shard, GROUPS])
            prefetch(line, 8)
            lines[first & (4 * _AHEAD - 1)] = line
        if second >= 0 and second < num_ids:
            line, hashed = lines[second & (4 * _AHEAD - 1)], hashes[second]
            slot = _ask_for_records(line, hashed, records_address, record_bytes)
            if slot < 0:
                slot = _ABSENT
                if _passed(line, hashed) != np.uint64(0):
                    shard, slot = shards[second], _LOOK_FURTHER
                    line = headers[shard, ADDRESS]
                    line += GROUP_BYTES * _next_group(0, headers[shard, GROUPS], hashed, 1)
                    prefetch(line, 8)
                    lines[second & (4 * _AHEAD - 1)] = line
            slots[second] = slot
        if third >= 0 and third < num_ids and slots[third] == _LOOK_FURTHER:
            line, hashed = lines[third & (4 * _AHEAD - 1)], hashes[third]
            slot = _ask_for_records(line, hashed, records_address, record_bytes)
            slots[third] = _ABSENT if slot < 0 and _passed(line, hashed) == np.uint64(0) else slot
        if i >= 0:
            slot = slots[i]
            if slot == _ABSENT:
                slots[i] = -1
            elif slot < 0 or load_i64(records_address + record_bytes * slot) != ids[i]:
                address = headers[shards[i], ADDRESS]
                place = place_of(address, headers[shards[i], GROUPS], hashes[i], ids[i], records)
                slots[i] = np.int64(slot_at(address, place)) if place >= 0 else -1


@kernel
def insert(headers, records, records_address, ids, hashes, shards, slots):
    """Adds ids that are not there, and writes them into their records. There must be room."""
    for i in range(-3 * _AHEAD, len(ids)):
        ask_for_room(headers, hashes, shards, i)
        if i + _AHEAD >= 0 and i + _AHEAD < len(ids):
            ask_for_record(records_address, records.shape[1], slots[i + _AHEAD])
        if i >= 0:
            shard = shards[i]
            put(headers[shard, ADDRESS], headers[shard, GROUPS], hashes[i], slots[i])
            headers[shard, USED] += 1
            records[slots[i], ID] = ids[i]


@kernel
def erase(headers, records, ids, hashes, shards, slots):
    """Removes ids that are there; writes what their slots were."""
    for i in range(len(ids)):
        shard = shards[i]
        address, groups = headers[shard, ADDRESS], headers[shard, GROUPS]
        place = place_of(address, groups, hashes[i], ids[i], records)
        slots[i] = np.int64(slot_at(address, place))
        take_out(address, groups, hashes[i], place)
        headers[shard, USED] -= 1
        records[slots[i], SEEN] = 0


@inlined
def _rehash(old, old_groups, new, new_groups, records, records_address, seed):
    """Moves all digests and slots into other groups, which are empty; slots and records stay."""
    for group in range(old_groups):
        line = old + GROUP_BYTES * min(group + 2, old_groups - 1)
        for k in range(GROUP):
            prefetch(records_address + 8 * records.shape[1] * np.int64(load_u32(line + _SLOTS + 4 * k)), 8)
        for place in range(16 * group, 16 * group + GROUP):
            if holds(old, place):
                slot = np.int64(slot_at(old, place))
                put(new, new_groups, mix(np.uint64(records[slot, ID]) ^ seed), slot)


@kernel
def grow(headers, growing, groups, addresses, records, records_address, seed, scratch):
    """Gives shards more groups, at addresses where each has room for them.

    Where a shard stays at its address, its groups go through `scratch`, which has room for those of any shard; else the
    memory there is zero.
    """
    for i in range(len(growing)):
        shard, to = growing[i], addresses[i]
        old, old_groups = headers[shard, ADDRESS], headers[shard, GROUPS]
        if old == to:
            for byte in range(0, GROUP_BYTES * old_groups, 8):
                store_i64(scratch + byte, load_i64(old + byte))
                store_i64(old + byte, 0)
            old = scratch
        _rehash(old, old_groups, to, groups[i], records, records_address, seed)
        headers[shard, ADDRESS], headers[shard, GROUPS] = to, groups[i]


@kernel
def slots_in(address, groups, out):
    """All slots of a shard; returns how many."""
    count = 0
    for group in range(groups):
        for place in range(16 * group, 16 * group + GROUP):
            if holds(address, place):
                out[count] = np.int64(slot_at(address, place))
                count += 1
    return count


@kernel
def exchange(states, frames, old, new):
    """Sets the state of frames that have another, each once; where one has not, changes nothing and returns false."""
    for i in range(len(frames)):
        frame = frames[i]
        if frame < 0 or frame >= len(states) or states[frame] != old:
            for k in range(i):
                states[frames[k]] = old
            return False
        states[frame] = new
    return True

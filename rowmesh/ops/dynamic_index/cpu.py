"""The index of dynamic tables on a CPU: groups of 16 digests and slots; the ids stand in the records of the slots.

A shard's buffer holds, for G groups, 16 G slots (uint32, a cache line a group), 16 G digests, and G words of overflow
(uint32: 8 counters of 4 bits). A digest of zero is an empty place; others have their highest bit set, so no id is
reserved. An id stands in the first group with a place from its own group on; each full group that it passed counts
it in one of its counters, which three bits of the hash choose. A search ends at a group where that counter is zero, and
an erased id leaves no trace: there are no tombstones, and a table may be full and change for ever. A counter that
reached 15 stays there until the shard grows, which makes searches longer and never wrong.

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

ADDRESS, GROUPS, USED, HEAP_SIZE, LIMIT, EPOCH = 0, 1, 2, 3, 4, 7  # of a shard's header; LIMIT has three
RUN_START, RUN_END, RUN_SEEN, COLUMNS = 8, 9, 10, 12
ID, SEEN, COUNT, SCORE = 0, 1, 2, 3  # of a record; SEEN is the last step + 1, and 0 where nothing is
GROUP = 16
GROUP_BYTES = GROUP + 4 + 4 * GROUP
_ONES, _HIGHS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_AHEAD = 16
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
    return (np.uint64(load_u32(line)) >> _counter_of(hashed)) & np.uint64(15)


@inlined
def _count_passing(line, hashed, change):
    count = _passed(line, hashed)
    if count != np.uint64(15):
        word = np.uint64(load_u32(line)) & ~(np.uint64(15) << _counter_of(hashed))
        store_u32(line, np.int64(word | (np.uint64(np.int64(count) + change) << _counter_of(hashed))))


@inlined
def ask_for(address, groups, hashed):
    """Prefetches the digests and slots of the group that a hash belongs to."""
    group = _group_of(hashed, groups)
    prefetch(address + 64 * groups + 16 * group, 8)
    prefetch(address + 64 * group, 8)


@inlined
def place_of(address, groups, hashed, id, records):
    """The place of an id in its shard, or −1."""
    group, digest = _group_of(hashed, groups), _digest_of(hashed)
    digests, overflow = address + 64 * groups, address + 80 * groups
    found, searched = -1, 0
    while found < 0 and searched < groups:
        for half in range(2):
            match = _matches(np.uint64(load_i64(digests + 16 * group + 8 * half)), digest)
            while match != np.uint64(0) and found < 0:
                place = 16 * group + 8 * half + (_first_bit(match) >> 3)
                if records[load_u32(address + 4 * place), 0] == id:
                    found = place
                match &= match - np.uint64(1)
        if found < 0 and _passed(overflow + 4 * group, hashed) == np.uint64(0):
            break
        searched += 1
        group = group + 1 if group + 1 < groups else 0
    return found


@inlined
def place_with(address, groups, hashed, slot):
    """The place of a slot that is there; no record is read."""
    group, digest = _group_of(hashed, groups), _digest_of(hashed)
    found = -1
    while found < 0:
        for half in range(2):
            match = _matches(np.uint64(load_i64(address + 64 * groups + 16 * group + 8 * half)), digest)
            while match != np.uint64(0) and found < 0:
                place = 16 * group + 8 * half + (_first_bit(match) >> 3)
                if load_u32(address + 4 * place) == slot:
                    found = place
                match &= match - np.uint64(1)
        group = group + 1 if group + 1 < groups else 0
    return found


@inlined
def put(address, groups, hashed, slot):
    """Stores a slot in the first group with an empty place; there must be one."""
    group = _group_of(hashed, groups)
    overflow = address + 80 * groups
    done = False
    while not done:
        for half in range(2):
            line = address + 64 * groups + 16 * group + 8 * half
            word = np.uint64(load_i64(line))
            empty = ~word & _HIGHS
            if not done and empty != np.uint64(0):
                byte = _first_bit(empty) >> 3
                store_i64(line, np.int64(word | (_digest_of(hashed) << np.uint64(8 * byte))))
                store_u32(address + 4 * (16 * group + 8 * half + byte), slot)
                done = True
        if not done:
            _count_passing(overflow + 4 * group, hashed, 1)
            group = group + 1 if group + 1 < groups else 0


@inlined
def take_out(address, groups, hashed, place):
    """Empties a place, and the overflow that its id caused."""
    line = address + 64 * groups + (place >> 3) * 8
    word = np.uint64(load_i64(line))
    store_i64(line, np.int64(word & ~(np.uint64(0xFF) << np.uint64(8 * (place & 7)))))
    overflow, group = address + 80 * groups, _group_of(hashed, groups)
    while group != place >> 4:
        _count_passing(overflow + 4 * group, hashed, -1)
        group = group + 1 if group + 1 < groups else 0


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


@kernel
def find(headers, records, records_address, ids, hashes, shards, slots):
    """The slot of each id, or −1. Far ahead the group is asked for, less far the record of the first slot that fits."""
    num_ids = len(ids)
    for i in range(-2 * _AHEAD, num_ids):
        first, second = i + 2 * _AHEAD, i + _AHEAD
        if first < num_ids:
            ask_for(headers[shards[first], ADDRESS], headers[shards[first], GROUPS], hashes[first])
        if second >= 0 and second < num_ids:
            address, groups = headers[shards[second], ADDRESS], headers[shards[second], GROUPS]
            group, digest = _group_of(hashes[second], groups), _digest_of(hashes[second])
            line = address + 64 * groups + 16 * group
            low = _matches(np.uint64(load_i64(line)), digest)
            high = _matches(np.uint64(load_i64(line + 8)), digest)
            slot = np.int64(-1)
            if low != np.uint64(0):
                slot = np.int64(load_u32(address + 64 * group + 4 * (_first_bit(low) >> 3)))
            elif high != np.uint64(0):
                slot = np.int64(load_u32(address + 64 * group + 32 + 4 * (_first_bit(high) >> 3)))
            slots[second] = slot
            if slot >= 0:
                prefetch(records_address + 8 * records.shape[1] * slot, 8)
            prefetch(address + 80 * groups + 4 * group, 8)
        if i >= 0 and (slots[i] < 0 or records[slots[i], ID] != ids[i]):
            address = headers[shards[i], ADDRESS]
            place = place_of(address, headers[shards[i], GROUPS], hashes[i], ids[i], records)
            slots[i] = np.int64(load_u32(address + 4 * place)) if place >= 0 else -1


@kernel
def insert(headers, records, records_address, ids, hashes, shards, slots):
    """Adds ids that are not there, and writes them into their records. There must be room."""
    for i in range(len(ids)):
        ahead = min(i + _AHEAD, len(ids) - 1)
        ask_for(headers[shards[ahead], ADDRESS], headers[shards[ahead], GROUPS], hashes[ahead])
        prefetch(records_address + 8 * records.shape[1] * slots[ahead], 32)
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
        slots[i] = np.int64(load_u32(address + 4 * place))
        take_out(address, groups, hashes[i], place)
        headers[shard, USED] -= 1
        records[slots[i], SEEN] = 0


@kernel
def rehash(old, old_groups, new, new_groups, records, records_address, seed):
    """Moves all digests and slots into another buffer; slots and records stay."""
    for place in range(16 * old_groups):
        ahead = np.int64(load_u32(old + 4 * min(place + _AHEAD, 16 * old_groups - 1)))
        prefetch(records_address + 8 * records.shape[1] * ahead, 8)
        word = np.uint64(load_i64(old + 64 * old_groups + (place >> 3) * 8))
        if (word >> np.uint64(8 * (place & 7))) & np.uint64(0x80) != np.uint64(0):
            slot = np.int64(load_u32(old + 4 * place))
            put(new, new_groups, mix(np.uint64(records[slot, 0]) ^ seed), slot)


@kernel
def slots_in(address, groups, out):
    """All slots of a shard, in the order of their places; returns how many."""
    count = 0
    for place in range(16 * groups):
        word = np.uint64(load_i64(address + 64 * groups + (place >> 3) * 8))
        if (word >> np.uint64(8 * (place & 7))) & np.uint64(0x80) != np.uint64(0):
            out[count] = np.int64(load_u32(address + 4 * place))
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

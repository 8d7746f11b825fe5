"""Distinct ids on a CPU: a hash table of positions, then a counting sort by part."""

import numpy as np

from rowmesh.ops.dynamic_index.cpu import mix
from rowmesh.ops.simd import kernel

FOUND, COUNTS, INVERSE, PLACES, PARTS = 0, 1, 2, 3, 4  # rows of `memory`


@kernel
def distinct(ids, weights, seed, part_of, heads, mask, memory, bounds):
    """Returns how many; `heads` is −1 everywhere before and after; one weight is that of every id."""
    num_parts, num_shards, steps = len(bounds) - 1, np.uint64(len(part_of)), 1 if len(weights) == len(ids) else 0
    count = np.int64(0)  # a plain 0 is a type of its own, which `_sort` would be compiled for once more
    for i in range(len(ids)):
        hashed = mix(np.uint64(ids[i]) ^ seed)
        place = np.int64(hashed >> np.uint64(33)) & mask
        while heads[place] >= 0 and memory[FOUND, heads[place]] != ids[i]:
            place = (place + 1) & mask
        found = np.int64(heads[place])
        if found < 0:
            found = count
            heads[place] = found
            memory[FOUND, found], memory[COUNTS, found], memory[PLACES, found] = ids[i], 0, place
            part = part_of[np.int64(hashed % num_shards)] if num_parts > 1 else 0
            memory[PARTS, found] = part
            bounds[part + 1] += 1
            count += 1
        memory[COUNTS, found] += weights[i * steps]
        memory[INVERSE, i] = found
    for i in range(count):
        heads[memory[PLACES, i]] = -1
    for part in range(num_parts):
        bounds[part + 1] += bounds[part]
    if num_parts > 1:
        _sort(memory, bounds, count, len(ids))
    return count


@kernel
def _sort(memory, bounds, count, number):
    """Brings what was found in the order of parts."""
    next_place = bounds.copy()
    old_ids, old_counts = memory[FOUND, :count].copy(), memory[COUNTS, :count].copy()
    for i in range(count):
        part = memory[PARTS, i]
        place = next_place[part]
        next_place[part] += 1
        memory[FOUND, place], memory[COUNTS, place], memory[PLACES, i] = old_ids[i], old_counts[i], place
    for i in range(number):
        memory[INVERSE, i] = memory[PLACES, memory[INVERSE, i]]

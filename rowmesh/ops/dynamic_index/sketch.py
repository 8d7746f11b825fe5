"""A count-min sketch by shard, with saturating adds: they commute, so the order of ids does not matter."""

from __future__ import annotations

import numpy as np

from rowmesh.ops.simd import kernel

_MAX = np.int64(2**63 - 1)


@kernel
def add(sketch, shards, columns, counts, before, totals):
    """Adds all counts, then takes each id's smallest counter; `before` gets what `restore` needs."""
    for i in range(len(shards)):
        for row in range(sketch.shape[1]):
            old = sketch[shards[i], row, columns[i, row]]
            before[i, row] = old
            sketch[shards[i], row, columns[i, row]] = _MAX if old > _MAX - counts[i] else old + counts[i]
    for i in range(len(shards)):
        least = _MAX
        for row in range(sketch.shape[1]):
            least = min(least, sketch[shards[i], row, columns[i, row]])
        totals[i] = least


@kernel
def restore(sketch, shards, columns, before):
    """Takes an `add` back."""
    for i in range(len(shards) - 1, -1, -1):
        for row in range(sketch.shape[1]):
            sketch[shards[i], row, columns[i, row]] = before[i, row]

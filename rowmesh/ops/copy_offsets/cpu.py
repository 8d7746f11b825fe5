"""Copy of offsets on a CPU, checked as it is made: one pass, and what is checked is what is kept."""

from __future__ import annotations

from rowmesh.ops.simd import kernel, load_i64, store_i64


@kernel
def copy_offsets(source, count, num_ids, out):
    """Copies int64 `[count]`, unless `out` is 0; 0 where they run from 0 to `num_ids` and never decrease, else 1."""
    first = before = load_i64(source)
    wrong = 0
    for i in range(count):
        value = load_i64(source + 8 * i)
        if out:
            store_i64(out + 8 * i, value)
        wrong |= value < before
        before = value
    if out:
        first = load_i64(out)  # what is kept, should somebody write the source meanwhile
    return int(wrong or first != 0 or before != num_ids)

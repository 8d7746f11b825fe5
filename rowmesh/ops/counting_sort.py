"""Counting sort: what the sorts by destination (`rowmesh.ops.route`) and by node (`rowmesh.ops.relay`) share.

Both count their keys by (part, segment), turn the sizes into offsets, move those on as cursors while they place the
keys, and put them back. A part's replies follow each other without the segments that get none.
"""

from __future__ import annotations

import numpy as np

from rowmesh.ops.simd import inlined, load_i64, store_i64


@inlined
def quotient(value, per_divisor):
    """`value // n` from `per_divisor`, which is 1 / n in float64; for 0 ≤ value < 2⁵¹ and any n up to there.

    (value + ½) / n is at least ½ / n away from a whole number. It comes out wrong by less than that: value + ½ is
    exact, 1 / n and the product are off by 2⁻⁵³ of themselves each, which is (value + ½) / n · 2⁻⁵² together.
    """
    return np.int64((np.float64(value) + 0.5) * per_divisor)


@inlined
def to_offsets(offsets, reply_offsets, num_parts, num_segments, num_replying, own):
    """From sizes to offsets, in place.

    Args:
        offsets: address of int64 `[parts, S + 1]`: the size of each segment, then where it begins, over all parts.
        reply_offsets: address of int64 `[parts + 1]` out: for now what to add to a position to get its reply; the last
            is the number of replies.
        num_replying: the first so many segments get replies.
        own: the part that gets none; −1 where all do.
    """
    total, replies = 0, 0
    for part in range(num_parts):
        store_i64(reply_offsets + 8 * part, replies - total)
        for s in range(num_segments + 1):
            cell = offsets + 8 * (part * (num_segments + 1) + s)
            size = load_i64(cell)
            store_i64(cell, total)
            total += size
            if s < num_replying and part != own:
                replies += size
    store_i64(reply_offsets + 8 * num_parts, replies)


@inlined
def restore(offsets, reply_offsets, num_parts, num_segments):
    """Puts offsets back that served as cursors, and makes reply offsets say where the replies of each part begin."""
    for part in range(num_parts):
        for s in range(num_segments, 0, -1):  # each stands at its end: the beginning of the next
            cell = offsets + 8 * (part * (num_segments + 1) + s)
            store_i64(cell, load_i64(cell - 8))
        cell = offsets + 8 * part * (num_segments + 1)
        store_i64(cell, 0 if part == 0 else load_i64(cell - 8))
        reply = reply_offsets + 8 * part
        store_i64(reply, load_i64(reply) + load_i64(cell))

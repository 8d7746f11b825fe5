"""Clusters of samples on a CPU: one pass over the samples, one 64-bit mask a row.

Bit m of a row's mask says that micro-batch m has the row. How many rows a sample shares with each of 64 micro-batches
is counted in all of them at once: bit k of all counters stands in one word, and a mask is added to the words as a
ripple of ands and exclusive ors. The time does not depend on the number of micro-batches, and little on the data.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cpython.unsafe import numbers

from rowmesh.ops.simd import inlined, kernel

_BLOCK = 64  # samples that are laid out together: what a feature has of them is read in a row
_lowest: Any = numbers.trailing_zeros  # type checkers think that it takes one argument more
_ONE, _NOTHING = np.uint64(1), np.uint64(0)


@kernel
def by_sample(keys, offsets, bag_size, num_features, starts, out):
    """From bags in order of features to the keys of each sample back to back.

    Args:
        keys: uint32 `[N]`.
        offsets: int64 `[F·B + 1]`; empty where all bags hold `bag_size` ids.
        bag_size: −1 where there are offsets.
        num_features: F.
        starts: int64 `[B + 1]` out: sample s has `out[starts[s]:starts[s + 1]]`.
        out: uint32 `[N]` out.
    """
    batch_size = len(starts) - 1
    cursors = np.empty(_BLOCK, np.int64)
    starts[0] = 0
    for first in range(0, batch_size, _BLOCK):
        count = min(_BLOCK, batch_size - first)
        for i in range(count):
            sample, length = first + i, num_features * bag_size
            if bag_size < 0:
                length = 0
                for bag in range(sample, num_features * batch_size, batch_size):
                    length += offsets[bag + 1] - offsets[bag]
            cursors[i] = starts[sample]
            starts[sample + 1] = starts[sample] + length
        for bag in range(first, num_features * batch_size, batch_size):
            for i in range(count):
                begin, end = (bag + i) * bag_size, (bag + i + 1) * bag_size
                if bag_size < 0:
                    begin, end = offsets[bag + i], offsets[bag + i + 1]
                for place in range(begin, end):
                    out[cursors[i]] = keys[place]
                    cursors[i] += 1


@kernel
def weigh(starts, keys, shares, weights):
    """The sum of the shares (int64 `[U]`) of each sample's keys."""
    for sample in range(len(weights)):
        total = 0
        for place in range(starts[sample], starts[sample + 1]):
            total += shares[keys[place]]
        weights[sample] = total


@inlined
def _add(counts, mask):
    """Counts every micro-batch in the mask up by one; counters stop at 255."""
    a, b, c, d, e, f, g, h = counts
    to_b = a & mask
    to_c = b & to_b
    to_d = c & to_c
    to_e = d & to_d
    to_f = e & to_e
    to_g = f & to_f
    to_h = g & to_g
    full = h & to_h
    return (
        (a ^ mask) | full,
        (b ^ to_b) | full,
        (c ^ to_c) | full,
        (d ^ to_d) | full,
        (e ^ to_e) | full,
        (f ^ to_f) | full,
        (g ^ to_g) | full,
        (h ^ to_h) | full,
    )


@inlined
def _most(counts, among):
    """The micro-batches in `among` whose counters are highest."""
    a, b, c, d, e, f, g, h = counts
    among = _keep(_keep(_keep(_keep(among, h), g), f), e)
    return _keep(_keep(_keep(_keep(among, d), c), b), a)


@inlined
def _keep(among, word):
    """The micro-batches that are in the word, where any is."""
    found = among & word
    return found if found != _NOTHING else among


@inlined
def _emptiest(among, loads, sizes):
    """The micro-batch in `among` that has the smallest part of its size; the first of equal ones."""
    best = np.int64(_lowest(among))
    among &= among - _ONE
    while among != _NOTHING:
        other = np.int64(_lowest(among))
        among &= among - _ONE
        if loads[other] * sizes[best] < loads[best] * sizes[other]:
            best = other
    return best


@inlined
def _open(loads, paces, remainders, sizes, num_samples, slack):
    """The micro-batches that may take one more, as a mask; moves on how many each should have by now."""
    may = _NOTHING
    for m in range(len(sizes)):
        may |= np.uint64(loads[m] < min(sizes[m], paces[m] + slack)) << np.uint64(m)
        remainders[m] += sizes[m]  # paces[m] = ⌊samples so far · sizes[m] / num_samples⌋, without dividing
        if remainders[m] >= num_samples:
            remainders[m] -= num_samples
            paces[m] += 1
    return may


@kernel
def assign(starts, keys, sizes, slack, masks, parts):
    """Greedy: each sample joins the micro-batch that has most of its rows.

    Args:
        starts, keys: what `by_sample` wrote.
        sizes: int64 `[number of micro-batches]`, at most 64; they add up to the samples to assign.
        slack: how far a micro-batch may be ahead of its share of the samples so far, 1 or more.
        masks: uint64 `[U]`, zeros.
        parts: uint8 `[B]`, in and out: the micro-batch of each sample; 255 where it is to be assigned.
    """
    num_samples = sizes.sum()
    loads, paces, remainders = np.zeros_like(sizes), np.zeros_like(sizes), np.zeros_like(sizes)
    for sample in range(len(parts)):
        if parts[sample] != 255:
            continue
        zero = _NOTHING
        counts = (zero, zero, zero, zero, zero, zero, zero, zero)
        for place in range(starts[sample], starts[sample + 1]):
            counts = _add(counts, masks[keys[place]])
        may = _open(loads, paces, remainders, sizes, num_samples, slack)
        part = _emptiest(_most(counts, may), loads, sizes)
        parts[sample] = part
        loads[part] += 1
        bit = _ONE << np.uint64(part)
        for place in range(starts[sample], starts[sample + 1]):
            masks[keys[place]] |= bit

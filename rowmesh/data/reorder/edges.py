"""Edges: which ids occur together, as pairs, found with bounded memory.

All pairs of each group are edges, as in the paper, where these are at most `max_edges`: ten batches of a thousand ids
have as many. Otherwise pairs are drawn, by how alike the groups are that two ids are in, A and B. Each of 32 *bands*
finds a pair with chance (|A ∩ B| / |A ∪ B|)², so hardly ever one that met by chance. A band is two signatures of an
id, each the least hash of its groups; ids of equal signatures are chained. In bags, which are small, ids do not meet by
chance: there a band is one signature, and the chance is not squared.

Source: EL-Rec (SC'22) §IV-C, Algorithm 2; Broder, "On the resemblance and containment of documents", 1997. Differs:
hot ids have no vertex, where the paper maps them all to the first of the others; bags are groups; signatures.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rowmesh.data.progress import Progress, silent
from rowmesh.data.reorder.groups import Column
from rowmesh.ops.compiled import compiled

NUM_BANDS = 32
_UNSEEN = np.uint32(2**32 - 1)
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

Edges = NDArray[np.int32]


def draw_edges(column: Column, span: range, max_edges: int, seed: int = 0, progress: Progress = silent) -> Edges:
    """Pairs of ids of a span that occur together, `[E, 2]`, counted from its start; pairs repeat as they recur.

    Args:
        column: the ids, by frequency.
        span: ids outside of it make no pairs.
        max_edges: more pairs are not looked at.
        seed: of the hashes.
        progress: receives every block of the data.
    """
    edges = all_pairs(column, span, max_edges)
    if edges is not None:
        return edges
    signatures = sign(column, span, seed, progress)
    return alike_pairs(signatures, 1 if column.table.multi_hot else 2, max_edges, seed)


def all_pairs(column: Column, span: range, max_edges: int) -> Edges | None:
    """All pairs of all groups; None where there are more than `max_edges`."""
    edges, written = np.empty((max_edges, 2), np.int32), 0
    for _, ids, starts, ends in column.groups():
        written = _pair(ids, starts, ends, span.start, span.stop, edges, written)
        if written < 0:
            return None
    return edges[:written].copy()


def sign(column: Column, span: range, seed: int, progress: Progress = silent) -> NDArray[np.uint32]:
    """The least hashes of the groups of each id of a span, `[n, 2 · NUM_BANDS]`; half as many where groups are bags."""
    num_hashes = NUM_BANDS if column.table.multi_hot else 2 * NUM_BANDS
    signatures = np.full((len(span), num_hashes), _UNSEEN)
    done = 0
    for number, ids, starts, ends in column.groups():
        _sign(ids, starts, ends, done, np.uint64(seed), span.start, span.stop, signatures)
        done += len(starts)
        progress(f"groups of {column.table.name}", number / column.num_batches)
    return signatures


def alike_pairs(signatures: NDArray[np.uint32], rows: int, max_edges: int, seed: int) -> Edges:
    """Chains the ids whose `rows` signatures of a band are equal, band by band."""
    seen = np.flatnonzero(signatures[:, 0] != _UNSEEN).astype(np.int32)
    rng, found, written = np.random.default_rng(seed), [], 0
    for band in range(signatures.shape[1] // rows):
        ids = rng.permutation(seen)  # so that chains of equal signatures are in no order
        key = np.zeros(len(ids), np.uint64)
        for column in range(band * rows, (band + 1) * rows):
            key = key << np.uint64(32) | signatures[ids, column]
        order = np.argsort(key)
        ids, key = ids[order], key[order]
        links = np.flatnonzero(key[1:] == key[:-1])[: max_edges - written]
        found.append(np.stack([ids[links], ids[links + 1]], axis=1))
        written += len(links)
    return np.concatenate(found)


@compiled(nogil=True)
def _pair(ids, starts, ends, first, stop, edges, written):  # pragma: no cover - compiled
    """Writes the pairs of some groups; returns the number of edges, −1 where they do not fit."""
    for group in range(len(starts)):
        members = ids[starts[group] : ends[group]]
        members = np.unique(members[(members >= first) & (members < stop)]) - first
        if written + len(members) * (len(members) - 1) // 2 > len(edges):
            return -1
        for i in range(len(members)):
            for j in range(i + 1, len(members)):
                edges[written, 0], edges[written, 1] = members[i], members[j]
                written += 1
    return written


@compiled(nogil=True)
def _sign(ids, starts, ends, number, seed, first, stop, signatures):  # pragma: no cover - compiled
    """Lowers the signatures of the ids of some groups to the hashes of these; `number` is that of the first group."""
    num_hashes = signatures.shape[1]
    hashes = np.empty(num_hashes, np.uint32)
    for group in range(len(starts)):
        for k in range(num_hashes):
            hashes[k] = _hash(seed, np.uint64(number + group) * np.uint64(num_hashes) + np.uint64(k))
        for i in range(starts[group], ends[group]):
            if first <= ids[i] < stop:
                signature = signatures[ids[i] - first]
                for k in range(num_hashes):
                    signature[k] = min(signature[k], hashes[k])


@compiled(nogil=True)
def _hash(seed, number):  # pragma: no cover - compiled
    """SplitMix64 (Steele et al., OOPSLA 2014), its upper half."""
    value = (number + (seed << np.uint64(32))) * _MIX[0]
    value = (value ^ (value >> np.uint64(30))) * _MIX[1]
    value = (value ^ (value >> np.uint64(27))) * _MIX[2]
    return np.uint32((value ^ (value >> np.uint64(31))) >> np.uint64(32))

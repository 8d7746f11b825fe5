"""Requests for the rows of dynamic tables on a CPU; `rowmesh.ops.dynamic_requests` says what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from rowmesh.ops.dynamic_index.cpu import COLUMNS, find, locate, mix
from rowmesh.ops.dynamic_index.victims import touch
from rowmesh.ops.simd import inlined, kernel, load_i64, store_i64

# What `open_known` must know of a table, int64 each.
SEED, NUM_SHARDS, FIRST_SHARD, NUM_HERE, HEADERS, RECORDS, NUM_SLOTS, RECORD_COLUMNS = range(8)
LATER, MOST_LATER, KIND, DECAY_STEPS, FIRST_ROW, OWNER_COLUMNS = 8, 9, 10, 11, 12, 13
UNKNOWN, HITS, OUTCOME_COLUMNS = 0, 1, 2
BEFORE_COLUMNS = 4  # slot, last step + 1, count, score where records have one
_RANK_BITS = 32
_intrinsic: Any = intrinsic


@_intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.inttoptr(args[0], ctx.get_value_type(sig.return_type))

    return types.CPointer(types.int64)(types.int64), codegen


@inlined
def _view(address, count):
    return carray(_pointer(address), (count,))


@inlined
def _view2(address, count, columns):
    return carray(_pointer(address), (count, columns))


@kernel
def count(unique, offsets, first_table, seeds, num_shards, starts, member_of_shard, members, sizes):
    """Which member of a replica group owns each id, and how many ids of each table it gets.

    Args:
        unique: int64 `[U]`, by table.
        offsets: int64 `[t + 1]`: where the ids of each of t tables begin.
        first_table: the number of the first of these among all T.
        seeds, num_shards: uint64 `[T]`.
        starts: int64 `[T]`: where in `member_of_shard`, uint16, the shards of each table begin.
        members: uint16 `[U]` out.
        sizes: int64 `[T, members]`: is added to.
    """
    for t in range(len(offsets) - 1):
        table = first_table + t
        seed, modulus, start = seeds[table], num_shards[table], starts[table]
        mask = modulus - np.uint64(1)
        power_of_two = (modulus & mask) == np.uint64(0)
        for u in range(offsets[t], offsets[t + 1]):
            hashed = mix(np.uint64(unique[u]) ^ seed)
            shard = np.int64(hashed & mask if power_of_two else hashed % modulus)
            member = np.int64(member_of_shard[start + shard])
            members[u] = member
            sizes[table, member] += 1


@kernel
def fill(
    unique, offsets, counts, first_table, members, ranks, own, scores, cursors, ids_at, counts_at, scores_at, places
):
    """Writes ids, counts and, where there are any, scores where they are sent from.

    Args:
        unique, offsets, first_table, members: as for `count`.
        counts: uint32 `[U]`.
        ranks: int64 `[T, replicas, members]`: who they are; −1 beyond the replicas of a table.
        own: int64 `[T]`: the replica group of this rank.
        scores: int64 `[U]`, or none.
        cursors: int64 `[W, T]`: where in the request for each rank the ids of each table go; moved on.
        ids_at, counts_at, scores_at: int64 `[W]`: addresses of each rank's request.
        places: int64 `[U]` out: which rank answers for each id, and where.
    """
    for t in range(len(offsets) - 1):
        table = first_table + t
        for replica in range(ranks.shape[1]):
            if ranks[table, replica, 0] < 0:
                break
            is_own = replica == own[table]
            for u in range(offsets[t], offsets[t + 1]):
                rank = ranks[table, replica, members[u]]
                place = cursors[rank, table]
                cursors[rank, table] = place + 1
                store_i64(ids_at[rank] + 8 * place, unique[u])
                store_i64(counts_at[rank] + 8 * place, np.int64(counts[u]))
                if len(scores):
                    store_i64(scores_at[rank] + 8 * place, scores[u])
                if is_own:
                    places[u] = rank << _RANK_BITS | place


@kernel
def take_rows(places, rows_at, rows):
    """Writes the row of each id, int64 `[U]`, that its owner answered at `rows_at`, int64 `[W]` addresses."""
    for u in range(len(places)):
        place = places[u]
        rows[u] = load_i64(rows_at[place >> _RANK_BITS] + 8 * (place & 0xFFFFFFFF))


@kernel
def open_known(owners, sizes, begins, ids_at, counts_at, rows_at, step, slots, hashes, shards, before, outcome):
    """Opens a step of those tables that know all ids which are asked of them; the others are left as they are.

    An id that several ranks ask for is counted once for each: that adds up to the same as all at once.

    Args:
        owners: int64 `[T, OWNER_COLUMNS]`; tables whose NUM_HERE is 0 are passed over.
        sizes, begins: int64 `[W, T]`: how many ids of each table each rank asks for, and where in its request.
        ids_at, counts_at, rows_at: int64 `[W]`: addresses of the requests, and of where their rows go, which may be
            where the ids are.
        step: the one to open.
        slots, hashes, shards: scratch for the ids of the largest table.
        before: int64 `[n, BEFORE_COLUMNS]` out: of all requests of the tables that were opened, one table after the
            other, what was known of the id; none where that is not wanted.
        outcome: int64 `[T, OUTCOME_COLUMNS]` out: how many requests a table does not know, and how many distinct ids
            were counted.
    """
    num_ranks, num_before = len(ids_at), 0
    for t in range(len(owners)):
        owner = owners[t]
        outcome[t, UNKNOWN], outcome[t, HITS] = 0, 0
        if owner[NUM_HERE] == 0:
            continue
        headers = _view2(owner[HEADERS], owner[NUM_HERE], COLUMNS)
        records = _view2(owner[RECORDS], owner[NUM_SLOTS], owner[RECORD_COLUMNS])
        later = carray(_pointer(owner[LATER]), (owner[NUM_HERE], owner[MOST_LATER], 4))
        modulus, seed = np.uint64(owner[NUM_SHARDS]), np.uint64(owner[SEED])
        unknown, at = 0, 0
        for rank in range(num_ranks):
            number = sizes[rank, t]
            if number == 0:
                continue
            end = at + number
            ids = _view(ids_at[rank] + 8 * begins[rank, t], number)
            if locate(ids, seed, modulus, owner[FIRST_SHARD], owner[NUM_HERE], hashes[at:end], shards[at:end]) >= 0:
                unknown += 1  # of shards that are elsewhere; who looks closer says so
                continue
            find(headers, records, owner[RECORDS], ids, hashes[at:end], shards[at:end], slots[at:end])
            for i in range(at, end):
                unknown += slots[i] < 0
            at = end
        outcome[t, UNKNOWN] = unknown
        if unknown > 0:
            continue
        if len(before) > 0:
            for i in range(at):
                for column in range(1, owner[RECORD_COLUMNS]):
                    before[num_before + i, column] = records[slots[i], column]
                before[num_before + i, 0] = slots[i]
            num_before += at
        at = 0
        for rank in range(num_ranks):
            number = sizes[rank, t]
            if number == 0:
                continue
            end = at + number
            counts = _view(counts_at[rank] + 8 * begins[rank, t], number)
            outcome[t, HITS] += touch(
                headers,
                records,
                owner[RECORDS],
                later,
                owner[KIND],
                owner[DECAY_STEPS],
                step,
                slots[at:end],
                shards[at:end],
                counts,
                counts,
            )
            rows = rows_at[rank] + 8 * begins[rank, t]
            for i in range(number):
                store_i64(rows + 8 * i, slots[at + i] + owner[FIRST_ROW])
            at = end

"""The index of dynamic tables on a GPU: the ids of each shard in ascending order, beside them their frames.

All tables of a rank are in the same tensors: `ids` and `slots`, in which every shard has two places, each with room for
its capacity, and uses one of them; `spans` says which and how many ids are there. Facts stand in `records`, by frame. A
row of `described` says of a table where its shards and records begin, and what its rules are.

- *find*: an id finds its shard by its hash and its place by bisection.
- *touch*: counts and scores of known ids. A batch has each id once, so no two programs have one record.
- *choose*: the ids of the smallest scores of each shard, one program a shard, one pass over the shard for each.
- *merge*: writes a shard to its other place, without ids that leave and with those that enter. Where each id goes
  follows from how many of either are before it, by bisection in these short lists; nobody waits for another one.

So nothing is decided by compare-and-swap, there are no tombstones, and the order in which ids came shows nowhere. See
[Note: GPU kernels] in `rowmesh.ops.gpu`.
"""

# Triton's language is not typed in a way that a checker could follow.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.dynamic_index.cpu import COUNT, SCORE, SEEN
from rowmesh.ops.dynamic_index.victims import BOTH, FREQUENCY, RECENCY
from rowmesh.ops.gpu import Signature, ceil_div, check, launch

# Columns of a row of `described`, int64 each.
SEED, NUM_SHARDS, FIRST_SHARD, NUM_HERE, FIRST_SPAN, FIRST_RECORD, KIND, DECAY_STEPS, TABLE_COLUMNS = range(9)
RECORD_COLUMNS = 4
_BLOCK = 256
_SHARD_BLOCK = 1024

_SEED, _NUM_SHARDS, _FIRST_SHARD, _NUM_HERE = (
    tl.constexpr(column) for column in (SEED, NUM_SHARDS, FIRST_SHARD, NUM_HERE)
)
_FIRST_SPAN, _FIRST_RECORD, _KIND, _DECAY_STEPS = (
    tl.constexpr(column) for column in (FIRST_SPAN, FIRST_RECORD, KIND, DECAY_STEPS)
)
_TABLE, _RECORD = tl.constexpr(TABLE_COLUMNS), tl.constexpr(RECORD_COLUMNS)
_SEEN, _COUNT, _SCORE = (tl.constexpr(column) for column in (SEEN, COUNT, SCORE))
_RECENCY, _BOTH = tl.constexpr(RECENCY), tl.constexpr(BOTH)
_MAX = tl.constexpr(2**63 - 1)


@triton.jit
def _mix(z):
    """The finalizer of splitmix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _table_of(offsets, position, num_tables, num_steps):
    """The last table that begins at or before a position."""
    low = tl.zeros_like(position)
    high = low + num_tables - 1
    for _ in range(num_steps):
        middle = (low + high + 1) // 2
        is_later = tl.load(offsets + middle) <= position
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle - 1)
    return low


@triton.jit
def _lower_bound(values, low, high, wanted, num_steps, mask):
    """The first place from `low` on, below `high`, whose value is not less than what is wanted; else `high`."""
    for _ in range(num_steps):
        is_open = mask & (low < high)
        middle = low + (high - low) // 2
        is_less = tl.load(values + middle, mask=is_open, other=0) < wanted
        low = tl.where(is_open & is_less, middle + 1, low)
        high = tl.where(is_open & (is_less == 0), middle, high)
    return low


@triton.jit(do_not_specialize=("num_ids", "num_tables", "table_steps", "num_steps"))
def _find(
    wanted,
    offsets,
    described,
    spans,
    ids,
    slots,
    found,
    shards,
    unknown,
    num_ids,
    num_tables,
    table_steps,
    num_steps,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = (position < num_ids) & (position < tl.load(offsets + num_tables))
    id = tl.load(wanted + position, mask=is_id, other=0)
    table = _table_of(offsets, position, num_tables, table_steps)
    about = described + table * _TABLE
    hashed = _mix(id.to(tl.uint64) ^ tl.load(about + _SEED).to(tl.uint64))
    shard = (hashed % tl.load(about + _NUM_SHARDS).to(tl.uint64)).to(tl.int64) - tl.load(about + _FIRST_SHARD)
    is_here = is_id & (shard >= 0) & (shard < tl.load(about + _NUM_HERE))
    span = spans + 2 * (tl.load(about + _FIRST_SPAN) + shard)
    begin = tl.load(span, mask=is_here, other=0)
    end = begin + tl.load(span + 1, mask=is_here, other=0)
    place = _lower_bound(ids, begin, end, id, num_steps, is_here)
    is_found = is_here & (place < end)
    is_found = is_found & (tl.load(ids + place, mask=is_found, other=0) == id)
    tl.store(found + position, tl.load(slots + place, mask=is_found, other=-1), mask=is_id)
    tl.store(shards + position, shard.to(tl.int32), mask=is_id)
    is_new = is_id & (is_found == 0)
    tl.atomic_add(unknown + table, tl.full([BLOCK], 1, tl.int64), mask=is_new, sem="relaxed")  # seldom


@triton.jit
def _halvings(seen, step, decay_steps):
    """How often a frequency has halved since its id was seen."""
    every = tl.maximum(decay_steps, 1)
    times = tl.where(decay_steps > 0, step // every - (seen - 1) // every, 0)
    return tl.minimum(times, 63)


@triton.jit(do_not_specialize=("num_ids", "num_tables", "table_steps", "step"))
def _touch(
    found,
    counts,
    offsets,
    described,
    unknown,
    most_unknown,
    records,
    num_ids,
    num_tables,
    table_steps,
    step,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    step = tl.cast(step, tl.int64)
    is_id = (position < num_ids) & (position < tl.load(offsets + num_tables))
    table = _table_of(offsets, position, num_tables, table_steps)
    about = described + table * _TABLE
    slot = tl.load(found + position, mask=is_id, other=-1).to(tl.int64)
    is_known = (slot >= 0) & (tl.load(unknown + table) <= tl.load(most_unknown + table))
    more = tl.load(counts + position, mask=is_known, other=0).to(tl.int64)
    record = records + _RECORD * (tl.load(about + _FIRST_RECORD) + slot)
    seen = tl.load(record + _SEEN, mask=is_known, other=1)
    count = tl.load(record + _COUNT, mask=is_known, other=0)
    score = tl.load(record + _SCORE, mask=is_known, other=0)
    score = score >> _halvings(seen, step, tl.load(about + _DECAY_STEPS))
    worth = tl.where(more > (_MAX >> 16), _MAX, more << 16)
    tl.debug_barrier()  # another warp may write what one has yet to read
    tl.store(record + _SEEN, tl.zeros_like(position) + step + 1, mask=is_known)
    tl.store(record + _COUNT, tl.where(count > _MAX - more, _MAX, count + more), mask=is_known)
    is_scored = is_known & (tl.load(about + _KIND) != _RECENCY)
    tl.store(record + _SCORE, tl.where(score > _MAX - worth, _MAX, score + worth), mask=is_scored)


@triton.jit
def _is_less(a0, a1, a2, b0, b1, b2):
    return (a0 < b0) | ((a0 == b0) & ((a1 < b1) | ((a1 == b1) & (a2 < b2))))


@triton.jit(do_not_specialize=("first_span", "first_record", "decay_steps", "step"))
def _choose(
    full,
    ends,
    spans,
    ids,
    slots,
    records,
    chosen,
    first_span,
    first_record,
    decay_steps,
    step,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    step = tl.cast(step, tl.int64)
    first = tl.load(ends + program)
    span = spans + 2 * (first_span + tl.load(full + program))
    begin, used = tl.load(span), tl.load(span + 1)
    # The key that was chosen last: what follows it is next. Below all keys at first.
    last0, last1, last2 = tl.full((), -1, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for out in range(first, tl.load(ends + program + 1)):
        best0 = tl.zeros([BLOCK], tl.int64)
        best1 = tl.zeros([BLOCK], tl.int64)
        best2 = tl.zeros([BLOCK], tl.int64)
        best = tl.zeros([BLOCK], tl.int64) - 1
        for block in range(0, used, BLOCK):
            place = block + tl.arange(0, BLOCK).to(tl.int64)
            is_id = place < used
            id = tl.load(ids + begin + place, mask=is_id, other=0)
            slot = tl.load(slots + begin + place, mask=is_id, other=0).to(tl.int64)
            record = records + _RECORD * (first_record + slot)
            seen = tl.load(record + _SEEN, mask=is_id, other=1)
            if KIND == _RECENCY:
                key0 = seen
            else:
                score = tl.load(record + _SCORE, mask=is_id, other=0)
                key0 = score >> _halvings(seen, step, decay_steps)
            key1 = tl.zeros_like(seen)
            if KIND == _BOTH:
                key1 = seen
            is_next = _is_less(last0, last1, last2, key0, key1, id) & is_id & (seen != step + 1)
            is_better = is_next & ((best < 0) | _is_less(key0, key1, id, best0, best1, best2))
            best0 = tl.where(is_better, key0, best0)
            best1 = tl.where(is_better, key1, best1)
            best2 = tl.where(is_better, id, best2)
            best = tl.where(is_better, place, best)
        # The smallest of what the lanes found; one at least has found something.
        is_left = best >= 0
        last0 = tl.min(tl.where(is_left, best0, _MAX))
        is_left = is_left & (best0 == last0)
        last1 = tl.min(tl.where(is_left, best1, _MAX))
        is_left = is_left & (best1 == last1)
        last2 = tl.min(tl.where(is_left, best2, _MAX))
        is_left = is_left & (best2 == last2)
        tl.store(chosen + out, tl.max(tl.where(is_left, best, -1)))


@triton.jit(do_not_specialize=("first_span", "num_steps"))
def _merge(
    changed,
    targets,
    leaving,
    leaving_ends,
    entering,
    entering_slots,
    entering_ends,
    spans,
    ids,
    slots,
    new_ids,
    new_slots,
    first_span,
    num_steps,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    span = spans + 2 * (first_span + tl.load(changed + program))
    begin, used, target = tl.load(span), tl.load(span + 1), tl.load(targets + program)
    first_leaving, last_leaving = tl.load(leaving_ends + program), tl.load(leaving_ends + program + 1)
    first_entering, last_entering = tl.load(entering_ends + program), tl.load(entering_ends + program + 1)
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    zeros = tl.zeros_like(place)
    # Ids that are there, without ids that leave.
    is_old = place < used
    id = tl.load(ids + begin + place, mask=is_old, other=0)
    slot = tl.load(slots + begin + place, mask=is_old, other=0)
    gone = _lower_bound(leaving, zeros + first_leaving, zeros + last_leaving, place, num_steps, is_old)
    leaves = is_old & (gone < last_leaving)
    leaves = leaves & (tl.load(leaving + gone, mask=leaves, other=-1) == place)
    before = _lower_bound(entering, zeros + first_entering, zeros + last_entering, id, num_steps, is_old)
    to = target + place - (gone - first_leaving) + (before - first_entering)
    stays = is_old & (leaves == 0)
    tl.store(new_ids + to, id, mask=stays)
    tl.store(new_slots + to, slot, mask=stays)
    # Ids that enter.
    is_new = place < last_entering - first_entering
    id = tl.load(entering + first_entering + place, mask=is_new, other=0)
    slot = tl.load(entering_slots + first_entering + place, mask=is_new, other=0)
    old = _lower_bound(ids, zeros + begin, zeros + begin + used, id, num_steps, is_new) - begin
    gone = _lower_bound(leaving, zeros + first_leaving, zeros + last_leaving, old, num_steps, is_new)
    to = target + place + old - (gone - first_leaving)
    tl.store(new_ids + to, id, mask=is_new)
    tl.store(new_slots + to, slot, mask=is_new)


def find(
    wanted: Tensor,
    offsets: Tensor,
    described: Tensor,
    spans: Tensor,
    ids: Tensor,
    slots: Tensor,
    num_steps: int,
    found: Tensor,
    shards: Tensor,
    unknown: Tensor,
) -> None:
    """Finds the slots of distinct ids of tables.

    Args:
        wanted: int64 `[N]`, by table.
        offsets: int64 `[T + 1]`: where those of each table begin, and where the last one's end; not checked.
        described: int64 `[T, TABLE_COLUMNS]`.
        spans: int64 `[S, 2]`: where each shard begins in `ids`, and how many it has.
        ids: int64 `[K]`, ascending in each shard.
        slots: int32 `[K]`.
        num_steps: of a bisection: more than log₂ of what any shard has.
        found: int32 `[N]` out, −1 where an id is unknown.
        shards: int32 `[N]` out, counted from the table's first one here.
        unknown: int64 `[T]`: how many ids of each table are unknown is added.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, layout or device does not fit.
    """
    num_ids, num_tables = wanted.numel(), offsets.numel() - 1
    _check_index(described, spans, ids, slots)
    for name, tensor, dtype, size in (
        ("wanted", wanted, torch.int64, num_ids),
        ("offsets", offsets, torch.int64, len(described) + 1),
        ("found", found, torch.int32, num_ids),
        ("shards", shards, torch.int32, num_ids),
        ("unknown", unknown, torch.int64, num_tables),
    ):
        _check(name, tensor, dtype, size, ids.device)
    launch(
        _find,
        ceil_div(num_ids, _BLOCK),
        wanted,
        offsets,
        described,
        spans,
        ids,
        slots,
        found,
        shards,
        unknown,
        num_ids,
        num_tables,
        (num_tables - 1).bit_length(),
        num_steps,
        BLOCK=_BLOCK,
    )


def touch(
    found: Tensor,
    counts: Tensor,
    offsets: Tensor,
    described: Tensor,
    unknown: Tensor,
    most_unknown: Tensor,
    records: Tensor,
    step: int,
) -> None:
    """Counts the known ids of tables in a step.

    Args:
        found: int32 `[N]`, as `find` left it; each slot of a table once at most.
        counts: int32 or int64 `[N]`.
        offsets, described, unknown: as for `find`.
        most_unknown: int64 `[T]`: a table of which more ids are unknown is left as it is.
        records: int64 `[F, RECORD_COLUMNS]`.
        step: not below any that was counted.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, layout or device does not fit.
    """
    num_ids, num_tables = found.numel(), offsets.numel() - 1
    check("counts", counts, (torch.int32, torch.int64), 1, found.device)
    check("records", records, (torch.int64,), 2, found.device)
    check("described", described, (torch.int64,), 2, found.device)
    for name, tensor, dtype, size in (
        ("found", found, torch.int32, counts.numel()),
        ("offsets", offsets, torch.int64, len(described) + 1),
        ("unknown", unknown, torch.int64, num_tables),
        ("most_unknown", most_unknown, torch.int64, num_tables),
    ):
        _check(name, tensor, dtype, size, found.device)
    launch(
        _touch,
        ceil_div(num_ids, _BLOCK),
        found,
        counts,
        offsets,
        described,
        unknown,
        most_unknown,
        records,
        num_ids,
        num_tables,
        (num_tables - 1).bit_length(),
        step,
        BLOCK=_BLOCK,
    )


def choose(
    full: Tensor,
    ends: Tensor,
    spans: Tensor,
    ids: Tensor,
    slots: Tensor,
    records: Tensor,
    count: int,
    *,
    first_span: int,
    first_record: int,
    kind: int,
    decay_steps: int,
    step: int,
) -> Tensor:
    """Chooses the ids of the smallest (score, id) of some shards of a table, but for those that a step has counted.

    Args:
        full: int64 `[A]`, distinct shards, counted from the table's first one.
        ends: int64 `[A + 1]`, from 0: how many ids leave the shards up to each; of none more than there are.
        spans, ids, slots, records: as for `find` and `touch`.
        count: the last of `ends`.
        first_span, first_record: where the table's begin.
        kind, decay_steps: its rules.
        step: the last one.

    Returns:
        int64 `[count]`: where they stand in their shards.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, layout or device does not fit.
    """
    check("records", records, (torch.int64,), 2, ids.device)
    check("full", full, (torch.int64,), 1, ids.device)
    _check("ends", ends, torch.int64, full.numel() + 1, ids.device)
    chosen = torch.empty(count, dtype=torch.int64, device=ids.device)
    launch(
        _choose,
        full.numel(),
        full,
        ends,
        spans,
        ids,
        slots,
        records,
        chosen,
        first_span,
        first_record,
        decay_steps,
        step,
        KIND=kind,
        BLOCK=_SHARD_BLOCK,
    )
    return chosen


def merge(
    changed: Tensor,
    targets: Tensor,
    leaving: Tensor,
    leaving_ends: Tensor,
    entering: Tensor,
    entering_slots: Tensor,
    entering_ends: Tensor,
    spans: Tensor,
    ids: Tensor,
    slots: Tensor,
    *,
    first_span: int,
    num_steps: int,
    most: int,
) -> None:
    """Writes some shards of a table anew, elsewhere.

    Args:
        changed: int64 `[A]`, distinct shards, counted from the table's first one.
        targets: int64 `[A]`: where each goes in `ids`; nobody is there.
        leaving: int64 `[L]`, places in their shards, shard by shard, ascending.
        leaving_ends, entering_ends: int64 `[A + 1]`, from 0: how many there are in the shards up to each.
        entering: int64 `[E]`, ids that are not there, shard by shard, ascending.
        entering_slots: int32 `[E]`.
        spans, ids, slots: as for `find`; spans stay as they are.
        first_span: where the table's begin.
        num_steps: as for `find`.
        most: at least as many as any of the shards has, and as enter any.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, layout or device does not fit.
    """
    num_changed, device = changed.numel(), ids.device
    for name, tensor, dtype, size in (
        ("changed", changed, torch.int64, num_changed),
        ("targets", targets, torch.int64, num_changed),
        ("leaving", leaving, torch.int64, leaving.numel()),
        ("leaving_ends", leaving_ends, torch.int64, num_changed + 1),
        ("entering", entering, torch.int64, entering.numel()),
        ("entering_slots", entering_slots, torch.int32, entering.numel()),
        ("entering_ends", entering_ends, torch.int64, num_changed + 1),
    ):
        _check(name, tensor, dtype, size, device)
    launch(
        _merge,
        (num_changed, ceil_div(most, _SHARD_BLOCK)),
        changed,
        targets,
        leaving,
        leaving_ends,
        entering,
        entering_slots,
        entering_ends,
        spans,
        ids,
        slots,
        ids,  # what is written is where no shard is that is read
        slots,
        first_span,
        num_steps,
        BLOCK=_SHARD_BLOCK,
    )


def _check_index(described: Tensor, spans: Tensor, ids: Tensor, slots: Tensor) -> None:
    check("described", described, (torch.int64,), 2, ids.device)
    check("spans", spans, (torch.int64,), 2, ids.device)
    check("ids", ids, (torch.int64,), 1, ids.device)
    _check("slots", slots, torch.int32, ids.numel(), ids.device)
    if described.shape[1] != TABLE_COLUMNS:
        raise ValueError(f"described must have {TABLE_COLUMNS} columns, got {described.shape[1]}")


def _check(name: str, tensor: Tensor, dtype: torch.dtype, size: int, device: torch.device) -> None:
    check(name, tensor, (dtype,), 1, device)
    if tensor.numel() != size:
        raise ValueError(f"{name} must have {size} elements, got {tensor.numel()}")


SIGNATURES = (
    Signature(_find, "*i64 *i64 *i64 *i64 *i64 *i32 *i32 *i32 *i64 i32 i32 i32 i32", {"BLOCK": _BLOCK}),
    Signature(_touch, "*i32 *i32 *i64 *i64 *i64 *i64 *i64 i32 i32 i32 i32", {"BLOCK": _BLOCK}),
    Signature(_touch, "*i32 *i64 *i64 *i64 *i64 *i64 *i64 i32 i32 i32 i64", {"BLOCK": _BLOCK}),
    *(
        Signature(
            _choose,
            "*i64 *i64 *i64 *i64 *i32 *i64 *i64 i32 i32 i32 i32",
            {"KIND": kind, "BLOCK": _SHARD_BLOCK},
        )
        for kind in (RECENCY, FREQUENCY, BOTH)
    ),
    Signature(
        _merge,
        "*i64 *i64 *i64 *i64 *i64 *i32 *i64 *i64 *i64 *i32 *i64 *i32 i32 i32",
        {"BLOCK": _SHARD_BLOCK},
    ),
)

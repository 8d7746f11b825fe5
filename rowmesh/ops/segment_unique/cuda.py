"""Segment unique on a GPU: one hash table in which every segment has a part, and one prefix sum.

1. *insert*: a cell holds the position of an id, so that any 64-bit id may be stored and a cell takes 4 bytes. An id
   looks for its cell from where its hash points to; empty cells are claimed by compare-and-swap, and among equal ids
   the smallest position stays, by atomic minimum. Which cell an id finds depends on chance, what the cell holds in the
   end does not.
2. *flag*: an id is the first of its kind where its cell holds its own position; counted for each program.
3. *number*: the prefix sum over these flags gives unique ids their numbers, in order of first appearance.
4. *invert*: each id takes the number of the first of its kind.

A segment of n ids owns 2·n cells, so at most half of its part is ever full, the parts need no sizes from the host, and
programs that run at the same time keep to few parts, which stay in the L2 cache: 26 segments of 65,536 ids take 14 MB.
Six launches in all, however many segments there are; about 60 bytes move for each id, most of them in that cache.

Results equal those of the CPU to the bit. See [Note: GPU kernels] in `rowmesh.ops.gpu`.

Source: FusedRec §3 "Segment unique", Fig. 5. Differs: order of first appearance; there it is that of atomic counters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import Signature, ceil_div, check, launch

MOST_IDS = 2**30 - 1  # so that twice as many cells have 32-bit numbers
MOST_PROGRAMS = 1024  # of the prefix sum: each adds up the counts of all before it in one load
# One warp: it goes on when its own 128 ids have found their cells, and needs no barrier to know.
_PROBES = 128
_BLOCK = 2048

_EMPTY = tl.constexpr(0x7FFFFFFF)  # more than any position
_NEVER = tl.constexpr(-1)  # what no cell holds


@dataclass(frozen=True, eq=False)
class Unique:
    """The unique ids of each segment, in order of first appearance; everything on the device.

    Attributes:
        unique: int64 `[N]`, of which the first U are valid.
        inverse: int32 `[N]`, with `unique[inverse] == ids`.
        offsets: int64 `[S + 1]`: where the segments begin in `unique`; the last is U.
        counts: int32 `[N]`: how often each occurs; the first U are valid.
    """

    unique: Tensor
    inverse: Tensor
    offsets: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, num_ids: int, num_segments: int, device: torch.device) -> Unique:
        """Room for results of up to `num_ids` ids."""
        return cls(
            torch.empty(num_ids, dtype=torch.int64, device=device),
            torch.empty(num_ids, dtype=torch.int32, device=device),
            torch.empty(num_segments + 1, dtype=torch.int64, device=device),
            torch.empty(num_ids, dtype=torch.int32, device=device),
        )

    @property
    def num_unique(self) -> Tensor:
        """U, int64 `[1]`."""
        return self.offsets[-1:]


class Scratch:
    """Memory to work in, 16 bytes an id. Calls that may run at the same time, on two streams, need one each.

    Args:
        num_ids: of the largest batch.
        device: of the ids.

    Raises:
        ValueError: there are too many ids.
    """

    def __init__(self, num_ids: int, device: torch.device) -> None:
        if num_ids > MOST_IDS:
            raise ValueError(f"segment unique takes up to {MOST_IDS:,} ids at once, got {num_ids:,}; split the batch")
        self.num_ids = num_ids
        self._memory = torch.empty(sum(_sizes(num_ids)), dtype=torch.int32, device=device)

    def split(self, num_ids: int) -> tuple[Tensor, ...]:
        """Cells `[2·N]`, places `[N]`, ranks `[N + 1]` and tallies of programs, or a little more of each.

        Raises:
            ValueError: there is too little room.
        """
        if num_ids > self.num_ids:
            raise ValueError(f"scratch for {self.num_ids:,} ids was given {num_ids:,}; make a larger Scratch")
        sizes = _sizes(num_ids)
        return self._memory[: sum(sizes)].split(sizes)

    def fill(self, num_ids: int, value: int) -> None:
        """Sets cells and places, which stand together."""
        self._memory[: sum(_sizes(num_ids)[:2])].fill_(value)


def _sizes(num_ids: int) -> list[int]:
    """Sizes of the parts of a scratch, multiples of 16 bytes: Triton compiles a kernel for each alignment of them."""
    return [ceil_div(size, 4) * 4 for size in (2 * num_ids, num_ids, num_ids + 1, MOST_PROGRAMS)]


@triton.jit
def _hash(key):
    """The upper 32 bits of an id of which every bit was mixed with every other (MurmurHash3's finalizer)."""
    h = key.to(tl.uint64)
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53
    return (h ^ (h >> 33)) >> 32


@triton.jit
def _segment_of(offsets, position, num_segments, STEPS: tl.constexpr):
    """The last segment that begins at or before a position, by binary search in 2^STEPS segments."""
    low = position * 0
    high = low + num_segments - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        is_later = tl.load(offsets + middle) <= position
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle - 1)
    return low


@triton.jit(do_not_specialize=("num_ids",))
def _insert(ids, offsets, cells, places, num_ids, num_segments, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """`places[i]` = the cell of id i, which holds the first position of that id in its segment."""
    # Said to be less contiguous than it is: without wide loads a thread holds ids a warp apart, as atomics want them,
    # and nothing is passed between threads in the loop. Threads of a warp still read neighbours.
    position = tl.max_contiguous(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), 1)
    # A program past the last segment has no cells: it would look for a free one for ever.
    is_id = (position < num_ids) & (position < tl.load(offsets + num_segments))
    key = tl.load(ids + position, mask=is_id, other=0)
    segment = _segment_of(offsets, position, num_segments, STEPS)
    begin = tl.load(offsets + segment)
    size = 2 * (tl.load(offsets + segment + 1) - begin)
    first = (2 * begin).to(tl.int32)
    last = first + size.to(tl.int32) - 1
    home = ((_hash(key) * size.to(tl.uint64)) >> 32).to(tl.int32)
    cell = first + home
    spare = places + tl.minimum(position, num_ids - 1)
    pending = is_id
    while tl.max(pending.to(tl.int32)) > 0:
        # Most ids of a skewed batch are there already: a plain load finds them, and only empty cells see atomics, which
        # would queue up at the cell of a frequent id. A load may be outdated: then the swap fails, and says what is
        # there; or it holds a later position of the same id, and the minimum puts that right.
        holder = tl.load(cells + cell, mask=pending, other=0, cache_modifier=".cg")
        is_vacant = pending & (holder == _EMPTY)
        if tl.max(is_vacant.to(tl.int32)) > 0:
            # There is no mask: the others expect in vain, and where nobody else does, not at the cell of a frequent id.
            # Relaxed, as a swap tells of nothing but itself: ids do not change meanwhile.
            target = tl.where(is_vacant, cells + cell, spare)
            seen = tl.atomic_cas(target, tl.where(is_vacant, _EMPTY, _NEVER), position, sem="relaxed")
            holder = tl.where(is_vacant, tl.where(seen == _EMPTY, position, seen), holder)
        is_found = pending & (tl.load(ids + holder, mask=pending, other=0) == key)
        tl.atomic_min(cells + cell, position, mask=is_found & (position < holder), sem="relaxed")
        pending = pending & (is_found == 0)
        cell = tl.where(pending, tl.where(cell == last, first, cell + 1), cell)
    tl.store(places + position, cell, mask=is_id)


@triton.jit(do_not_specialize=("num_ids", "num_blocks"))
def _flag(cells, places, tallies, num_ids, num_blocks, BLOCK: tl.constexpr):
    """`places[i]` becomes the first position of id i; `tallies[p]` = how many of program p's ids are first."""
    begin = tl.program_id(0) * num_blocks * BLOCK
    count = 0
    for block in range(num_blocks):
        position = begin + block * BLOCK + tl.arange(0, BLOCK)
        is_id = position < num_ids
        place = tl.load(places + position, mask=is_id, other=_EMPTY)  # as it was filled, past the last segment
        first = tl.load(cells + place, mask=place != _EMPTY, other=_EMPTY)
        tl.debug_barrier()  # where a block has fewer ids than the program threads, several warps read a place
        tl.store(places + position, first, mask=is_id)
        count += tl.sum((first == position).to(tl.int32))
    tl.store(tallies + tl.program_id(0), count)


@triton.jit(do_not_specialize=("num_ids", "num_blocks"))
def _number(
    ids, firsts, tallies, ranks, unique, counts, num_ids, num_blocks, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr
):
    """`ranks[i]` = how many unique ids come before position i, `ranks[N]` = U; counts of unique ids are set to 0."""
    program = tl.program_id(0)
    others = tl.arange(0, PROGRAMS)
    found = tl.sum(tl.load(tallies + others, mask=others < program, other=0))
    begin = program * num_blocks * BLOCK
    for block in range(num_blocks):
        position = begin + block * BLOCK + tl.arange(0, BLOCK)
        is_id = position < num_ids
        is_first = tl.load(firsts + position, mask=is_id, other=_EMPTY) == position
        flags = is_first.to(tl.int32)
        rank = found + tl.cumsum(flags) - flags
        tl.store(ranks + position, rank, mask=is_id)
        tl.store(unique + rank, tl.load(ids + position, mask=is_first, other=0), mask=is_first)
        tl.store(counts + rank, 0, mask=is_first)
        found += tl.sum(flags)
    if program == tl.num_programs(0) - 1:
        tl.store(ranks + num_ids, found)


@triton.jit(do_not_specialize=("num_ids",))
def _invert(firsts, ranks, offsets, inverse, counts, unique_offsets, num_ids, num_segments, BLOCK: tl.constexpr):
    """The inverse, the counts (integers, so atomics add them up to the same), and where segments begin."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(firsts + position, mask=position < num_ids, other=_EMPTY)
    is_id = first != _EMPTY
    rank = tl.load(ranks + first, mask=is_id, other=0)
    tl.store(inverse + position, rank, mask=is_id)
    tl.atomic_add(counts + rank, 1, mask=is_id, sem="relaxed")
    is_bound = position <= num_segments
    bound = tl.load(offsets + position, mask=is_bound, other=0)
    tl.store(unique_offsets + position, tl.load(ranks + bound, mask=is_bound, other=0).to(tl.int64), mask=is_bound)


def segment_unique(
    ids: Tensor, offsets: Tensor, *, scratch: Scratch | None = None, out: Unique | None = None
) -> Unique:
    """Removes duplicates within each segment, in order of first appearance.

    Args:
        ids: int64 `[N]`, any values.
        offsets: int64 `[S + 1]`, from 0 and not decreasing: not checked; segment s holds
            `ids[offsets[s]:offsets[s + 1]]`. Ids from the last offset on are left out, and their inverse as it is.
        scratch: memory to work in; made where it is None.
        out: where results go; made where it is None.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, layout or device does not fit, or there are more than 2³⁰ − 1 ids.

    Example:
        >>> ids, offsets = torch.tensor([5, 3, 5, 5], device=device), torch.tensor([0, 3, 4], device=device)
        >>> result = segment_unique(ids, offsets)
        >>> found = int(result.num_unique)
        >>> result.unique[:found].tolist(), result.inverse.tolist(), result.offsets.tolist()
        ([5, 3, 5], [0, 1, 0, 2], [0, 2, 3])
    """
    check("ids", ids, (torch.int64,), 1, ids.device)
    check("offsets", offsets, (torch.int64,), 1, ids.device)
    num_ids, num_segments = ids.numel(), offsets.numel() - 1
    if num_segments < 1:
        raise ValueError(f"offsets must bound one segment at least, got {offsets.numel()} of them")
    scratch = Scratch(num_ids, ids.device) if scratch is None else scratch
    out = Unique.empty(num_ids, num_segments, ids.device) if out is None else out
    _check_out(out, num_ids, num_segments, ids.device)
    cells, places, ranks, tallies = scratch.split(num_ids)
    scratch.fill(num_ids, _EMPTY.value)
    steps = (num_segments - 1).bit_length()
    launch(
        _insert,
        ceil_div(num_ids, _PROBES),
        ids,
        offsets,
        cells,
        places,
        num_ids,
        num_segments,
        num_warps=1,
        STEPS=steps,
        BLOCK=_PROBES,
    )
    # One program at least, which says where the segments of no ids begin.
    num_blocks = max(ceil_div(num_ids, _BLOCK * MOST_PROGRAMS), 1)
    programs = max(ceil_div(num_ids, _BLOCK * num_blocks), 1)
    launch(_flag, programs, cells, places, tallies, num_ids, num_blocks, num_warps=8, BLOCK=_BLOCK)
    launch(
        _number,
        programs,
        ids,
        places,
        tallies,
        ranks,
        out.unique,
        out.counts,
        num_ids,
        num_blocks,
        num_warps=8,
        BLOCK=_BLOCK,
        PROGRAMS=MOST_PROGRAMS,
    )
    launch(
        _invert,
        ceil_div(max(num_ids, num_segments + 1), _BLOCK),
        places,
        ranks,
        offsets,
        out.inverse,
        out.counts,
        out.offsets,
        num_ids,
        num_segments,
        num_warps=8,
        BLOCK=_BLOCK,
    )
    return out


def _check_out(out: Unique, num_ids: int, num_segments: int, device: torch.device) -> None:
    for name, dtype, size in (
        ("unique", torch.int64, num_ids),
        ("inverse", torch.int32, num_ids),
        ("offsets", torch.int64, num_segments + 1),
        ("counts", torch.int32, num_ids),
    ):
        tensor = getattr(out, name)
        check(f"out.{name}", tensor, (dtype,), 1, device)
        if tensor.numel() != size:
            raise ValueError(f"out.{name} must have {size} elements, got {tensor.numel()}")


SIGNATURES = (
    Signature(_insert, "*i64 *i64 *i32 *i32 i32 i32", {"STEPS": 5, "BLOCK": _PROBES}, num_warps=1),
    Signature(_flag, "*i32 *i32 *i32 i32 i32", {"BLOCK": _BLOCK}, num_warps=8),
    Signature(
        _number, "*i64 *i32 *i32 *i32 *i64 *i32 i32 i32", {"BLOCK": _BLOCK, "PROGRAMS": MOST_PROGRAMS}, num_warps=8
    ),
    Signature(_invert, "*i32 *i32 *i64 *i32 *i32 *i64 i32 i32", {"BLOCK": _BLOCK}, num_warps=8),
)

"""Route on a GPU: finds the range of every unique id, then sorts the ids by (destination, segment); the sort is stable.

Ranges are found by bisection. They are few and stay in the first-level cache; buckets, which save a CPU half of the
steps, would be one more table to read. Divisions are whole-numbered and exact; even at a hundred instructions each they
take less time than reading the ids.

The sort has W · S′ different keys, so that 16 bits mostly do: two passes instead of the eight of 64 bits. A rank alone
has the slots of all its ids found (`place`), and sorts those. See [Note: GPU kernels] in `rowmesh.ops.gpu`.
"""

# Triton's language is not typed in a way that a checker could follow.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.ops.gpu import Signature, ceil_div, check, launch
from rowmesh.ops.route.cpu import RELAY

BLOCK = 512
_RELAY = tl.constexpr(RELAY)
_NO_SLOT = tl.constexpr(0x7FFFFFFF)  # what merging leaves out
_FIELDS = 9  # of a range; the reciprocals that follow are for the CPU


@dataclass(frozen=True)
class DeviceMap:
    """An address map on a device; what `AddressMap` says of its arrays holds.

    Attributes:
        ranges: int64 `[9, R]`, a field after the other: start, shift, modulus, rank, divisor, base, kind, flags,
            origin.
        index: int64 `[2, S]`: the first range of each table, and how many it has.
        most_ranges: of one table.
        num_kinds: kinds that occur.
        world_size, rank, ranks_per_node, key_stride: W, the rank that asks, ranks of a node, V.
    """

    ranges: Tensor
    index: Tensor
    most_ranges: int
    num_kinds: int
    world_size: int
    rank: int
    ranks_per_node: int
    key_stride: int

    @classmethod
    def make(
        cls,
        device: torch.device,
        ranges: NDArray[np.int64],
        index: NDArray[np.int64],
        *,
        num_kinds: int,
        world_size: int,
        rank: int,
        ranks_per_node: int,
        key_stride: int,
    ) -> DeviceMap:
        """Copies the arrays of an `AddressMap` to a device."""
        fields = torch.from_numpy(np.ascontiguousarray(ranges[:, :_FIELDS].T)).to(device)
        places = torch.from_numpy(np.ascontiguousarray(index[:, :2].T)).to(device)
        most = int(index[:, 1].max())
        return cls(fields, places, most, num_kinds, world_size, rank, ranks_per_node, key_stride)

    @property
    def num_tables(self) -> int:
        """S."""
        return self.index.shape[1]

    @property
    def num_segments(self) -> int:
        """S′: tables times kinds."""
        return self.num_tables * self.num_kinds

    @property
    def is_alone(self) -> bool:
        """Whether all rows are this rank's, and of one kind."""
        return self.world_size == 1 and self.num_kinds == 1


@dataclass(frozen=True)
class Routed:
    """The destination and key of every unique id, sorted; everything on the device.

    Attributes:
        sizes: int64 `[2, W, S′]`: how many keys there are by destination and segment, and how many ids.
        keys: int32 `[U]`, the bits of uint32, sorted by (destination, segment).
        uniques: int32 `[U]`: `keys[p]` asks for unique id `uniques[p]`.

    Entries past the number of unique ids are not valid.
    """

    sizes: Tensor
    keys: Tensor
    uniques: Tensor

    @property
    def counts(self) -> Tensor:
        """int64 `[W, S′]`: keys by destination and segment."""
        return self.sizes[0]

    @property
    def accesses(self) -> Tensor:
        """int64 `[W, S′]`: ids, not only distinct ones, by destination and segment."""
        return self.sizes[1]


@triton.jit
def _last_not_above(values, first, last, x, num_steps):
    """The last of the ascending `values[first … last]` that is not above x; the first one is not."""
    for _ in range(num_steps):
        middle = (first + last + 1) // 2
        is_after = tl.load(values + middle) <= x
        first = tl.where(is_after, middle, first)
        last = tl.where(is_after, last, tl.maximum(middle - 1, first))
    return first


@triton.jit
def _find(ranges, index, num_tables, table, row, num_steps):
    """The number of the range that each row is in."""
    first = tl.load(index + table)
    return _last_not_above(ranges, first, first + tl.load(index + num_tables + table) - 1, row, num_steps)


@triton.jit
def _owner(ranges, num_ranges, part, row):
    """Owner and slot of each row, given its range."""
    x = row - tl.load(ranges + 8 * num_ranges + part)
    y = x + tl.load(ranges + num_ranges + part)
    owner = y % tl.load(ranges + 2 * num_ranges + part) + tl.load(ranges + 3 * num_ranges + part)
    return owner, tl.load(ranges + 5 * num_ranges + part) + x // tl.load(ranges + 4 * num_ranges + part)


@triton.jit(do_not_specialize=("table", "num_ids", "num_ranges", "num_tables", "num_steps"))
def _locate(ids, owners, slots, ranges, index, table, num_ids, num_ranges, num_tables, num_steps, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + i, mask=i < num_ids, other=0)
    part = _find(ranges, index, num_tables, table + tl.zeros_like(row), row, num_steps)
    owner, slot = _owner(ranges, num_ranges, part, row)
    tl.store(owners + i, owner.to(tl.int32), mask=i < num_ids)
    tl.store(slots + i, slot, mask=i < num_ids)


@triton.jit
def _range_of(unique, offsets, u, ranges, index, num_tables, table_steps, range_steps):
    """Whether ids are valid, their rows and tables, and the numbers of the ranges that these rows are in."""
    is_id = u < tl.load(offsets + num_tables)
    row = tl.load(unique + u, mask=is_id, other=0)
    table = _last_not_above(offsets, tl.zeros_like(u), tl.zeros_like(u) + num_tables - 1, u, table_steps)
    return is_id, row, table, _find(ranges, index, num_tables, table, row, range_steps)


@triton.jit(
    do_not_specialize=(
        "num_unique",
        "num_ranges",
        "num_tables",
        "num_segments",
        "world_size",
        "rank",
        "ranks_per_node",
        "key_stride",
        "table_steps",
        "range_steps",
    )
)
def _place_all(
    unique,
    offsets,
    cells,
    keys,
    ranges,
    index,
    num_unique,
    num_ranges,
    num_tables,
    num_segments,
    world_size,
    rank,
    ranks_per_node,
    key_stride,
    table_steps,
    range_steps,
    BLOCK: tl.constexpr,
):
    """Cell, destination · S′ + segment, and key of every unique id; the last cell for what is no id."""
    u = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id, row, table, part = _range_of(unique, offsets, u, ranges, index, num_tables, table_steps, range_steps)
    destination, key = _owner(ranges, num_ranges, part, row)
    segment = tl.load(ranges + 6 * num_ranges + part) * num_tables + table
    is_relayed = (tl.load(ranges + 7 * num_ranges + part) & _RELAY) != 0
    node = tl.where(is_relayed, destination // ranks_per_node, 0)
    key += node * key_stride
    destination = tl.where(
        is_relayed, destination % ranks_per_node + rank // ranks_per_node * ranks_per_node, destination
    )
    cell = tl.where(is_id, destination * num_segments + segment, world_size * num_segments)
    tl.store(cells + u, cell.to(cells.dtype.element_ty), mask=u < num_unique)
    tl.store(keys + u, key.to(tl.int32), mask=u < num_unique)


@triton.jit(do_not_specialize=("num_ids", "num_ranges", "num_tables", "table_steps", "range_steps"))
def _place(
    ids, offsets, slots, ranges, index, num_ids, num_ranges, num_tables, table_steps, range_steps, BLOCK: tl.constexpr
):
    """The slot of every id of a rank alone."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id, row, _, part = _range_of(ids, offsets, i, ranges, index, num_tables, table_steps, range_steps)
    _, slot = _owner(ranges, num_ranges, part, row)
    tl.store(slots + i, tl.where(is_id, slot, _NO_SLOT).to(tl.int32), mask=i < num_ids)


@triton.jit(do_not_specialize=("num_unique", "num_cells"))
def _place_sorted(
    order, cells, keys, counts, sorted_keys, uniques, accesses, num_unique, num_cells, BLOCK: tl.constexpr
):
    """Keys and ids in sorted order, and how often each occurs."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    u = tl.load(order + p, mask=p < num_unique, other=0)
    is_row = (p < num_unique) & (tl.load(cells + p, mask=p < num_unique, other=0) < num_cells)
    tl.store(sorted_keys + p, tl.load(keys + u, mask=is_row, other=0), mask=is_row)
    tl.store(uniques + p, u.to(tl.int32), mask=is_row)
    tl.store(accesses + p, tl.load(counts + u, mask=is_row, other=0).to(tl.int64), mask=p < num_unique)


def locate(device_map: DeviceMap, table: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Owner and slot of rows of one table.

    Args:
        device_map: where rows are.
        table: its number in the map.
        ids: int64 `[N]`, all of them rows of the table: not checked.

    Returns:
        Owners, int32 `[N]`, and slots, int64 `[N]`.

    Source: OPER §5.1.
    """
    check("ids", ids, (torch.int64,), 1, device_map.ranges.device)
    owners, slots = torch.empty_like(ids, dtype=torch.int32), torch.empty_like(ids)
    launch(
        _locate,
        ceil_div(ids.numel(), BLOCK),
        ids,
        owners,
        slots,
        device_map.ranges,
        device_map.index,
        table,
        ids.numel(),
        device_map.ranges.shape[1],
        device_map.num_tables,
        _steps(device_map.most_ranges),
        BLOCK=BLOCK,
    )
    return owners, slots


def place(device_map: DeviceMap, ids: Tensor, offsets: Tensor) -> Tensor:
    """The slot of every id, on a rank alone: int32 `[N]`.

    Args:
        device_map: where rows are, all of one kind.
        ids: int64 `[N]`, a table's after the other's. All are rows of theirs: not checked.
        offsets: int64 `[S + 1]`: where each table's begin. Ids from the last one on get 2³¹ − 1.
    """
    m, num_ids = device_map, ids.numel()
    check("ids", ids, (torch.int64,), 1, m.ranges.device)
    check("offsets", offsets, (torch.int64,), 1, ids.device)
    slots = torch.empty(num_ids, dtype=torch.int32, device=ids.device)
    launch(
        _place,
        ceil_div(num_ids, BLOCK),
        ids,
        offsets,
        slots,
        m.ranges,
        m.index,
        num_ids,
        m.ranges.shape[1],
        m.num_tables,
        _steps(m.num_tables),
        _steps(m.most_ranges),
        BLOCK=BLOCK,
    )
    return slots


def route(device_map: DeviceMap, unique: Tensor, offsets: Tensor, counts: Tensor) -> Routed:
    """The destination and key of every unique id, sorted by (destination, segment).

    Args:
        device_map: where rows are.
        unique: int64 `[N]`; the first U are valid, a table's after the other's. All are rows of theirs: not checked.
        offsets: int64 `[S + 1]`: where each table's begin; the last is U.
        counts: int32 `[N]`: how often each occurs.

    Source: FusedRec §3 "Embedding Route" (rank-wise sort) and "Lossless Lookup".
    """
    m, device, num_unique = device_map, unique.device, unique.numel()
    check("unique", unique, (torch.int64,), 1, m.ranges.device)
    check("offsets", offsets, (torch.int64,), 1, device)
    check("counts", counts, (torch.int32, torch.int64), 1, device)
    num_cells = m.world_size * m.num_segments
    narrow = torch.int16 if num_cells < 2**15 else torch.int32
    cells = torch.empty(num_unique, dtype=narrow, device=device)
    keys, sorted_keys, uniques = (torch.empty(num_unique, dtype=torch.int32, device=device) for _ in range(3))
    launch(
        _place_all,
        ceil_div(num_unique, BLOCK),
        unique,
        offsets,
        cells,
        keys,
        m.ranges,
        m.index,
        num_unique,
        m.ranges.shape[1],
        m.num_tables,
        m.num_segments,
        m.world_size,
        m.rank,
        m.ranks_per_node,
        m.key_stride,
        _steps(m.num_tables),
        _steps(m.most_ranges),
        BLOCK=BLOCK,
    )
    cells, order = torch.sort(cells, stable=True)
    bounds = torch.searchsorted(cells, torch.arange(num_cells + 1, dtype=narrow, device=device))
    accesses = torch.zeros(num_unique + 1, dtype=torch.int64, device=device)
    launch(
        _place_sorted,
        ceil_div(num_unique, BLOCK),
        order,
        cells,
        keys,
        counts,
        sorted_keys,
        uniques,
        accesses[1:],
        num_unique,
        num_cells,
        BLOCK=BLOCK,
    )
    # Sums over a cell are differences of running sums: no atomics, however uneven the cells.
    sizes = torch.stack([bounds, accesses.cumsum(0)[bounds]]).diff()
    return Routed(sizes.view(2, m.world_size, m.num_segments), sorted_keys, uniques)


def _steps(count: int) -> int:
    """Steps of a bisection among so many."""
    return (count - 1).bit_length()


SIGNATURES = (
    Signature(_locate, "*i64 *i32 *i64 *i64 *i64 i32 i32 i32 i32 i32", {"BLOCK": BLOCK}),
    Signature(_place_all, "*i64 *i64 *i16 *i32 *i64 *i64 i32 i32 i32 i32 i32 i32 i32 i64 i32 i32", {"BLOCK": BLOCK}),
    Signature(_place, "*i64 *i64 *i32 *i64 *i64 i32 i32 i32 i32 i32", {"BLOCK": BLOCK}),
    Signature(_place_sorted, "*i64 *i16 *i32 *i32 *i32 *i32 *i64 i32 i32", {"BLOCK": BLOCK}),
)

"""More inputs of `benchmarks.gpu_ops`: what is done with ids, slots and marks, and means over replicas."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu_cases import COPY_SHARE, Sizes, draw_ids
from benchmarks.gpu_timing import COPY, Case
from benchmarks.workload import NUM_TABLES, Workload
from rowmesh.ops.average import cuda as average_ops
from rowmesh.ops.bound_ids.cuda import bound_ids
from rowmesh.ops.merge import cuda as merge_ops
from rowmesh.ops.route import cuda as route_ops
from rowmesh.ops.segment_unique import cuda as unique_ops
from rowmesh.ops.window.cuda import intersect
from rowmesh.placement import AddressMap, Plan, TableShape

_ID_BYTES, _KEY_BYTES, _ELEMENT_BYTES = 8, 4, 4
_RANKS = 8
_OUTSIDE = 100  # one of so many ids is outside its table


def bound_ids_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Beside the same in torch: the table of each id, a comparison, a choice and a count."""
    ids, offsets = draw_ids(sizes, 1, device)
    limits = torch.tensor(Workload(max_rows=sizes.max_rows).table_rows, device=device)
    substitutes, num_ids = torch.zeros_like(limits), ids.numel()
    ids[::_OUTSIDE] = 2**40
    out, outside = torch.empty_like(ids), torch.zeros_like(limits)

    def ours() -> Tensor:
        return bound_ids(ids, offsets, limits, substitutes, out, outside)

    def peer() -> tuple[Tensor, Tensor]:
        table = torch.repeat_interleave(torch.arange(NUM_TABLES, device=device), offsets.diff(), output_size=num_ids)
        is_outside = (ids < 0) | (ids >= limits[table])
        counts = torch.zeros_like(limits).index_add_(0, table, is_outside.to(torch.int64))
        return torch.where(is_outside, substitutes[table], ids), counts

    def check() -> None:
        outside.zero_()
        expected, counts = peer()
        assert torch.equal(ours(), expected), "bound_ids differs from torch's"
        assert torch.equal(outside, counts), "bound_ids counts other ids than torch"

    moved = 2 * num_ids * _ID_BYTES
    yield Case(f"bound_ids {NUM_TABLES}x{num_ids // NUM_TABLES}", ours, {"where": peer}, moved, check, {})


def route_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """The unique ids of a batch, cyclic over eight ranks; the peer knows how many there are, as the host does not."""
    ids, id_offsets = draw_ids(sizes, 1, device)
    found = unique_ops.segment_unique(ids, id_offsets)
    rows = Workload(max_rows=sizes.max_rows).table_rows
    shapes = [TableShape(f"t{number}", count, 4, 4) for number, count in enumerate(rows)]
    address_map = AddressMap(Plan.cyclic(shapes, _RANKS), [shape.name for shape in shapes], 0)
    device_map = route_ops.DeviceMap.make(
        device,
        address_map.ranges,
        address_map.index,
        num_kinds=1,
        world_size=_RANKS,
        rank=0,
        ranks_per_node=_RANKS,
        key_stride=address_map.key_stride,
    )
    num_unique = int(found.num_unique)
    start, shift, modulus, first, divisor, base = device_map.ranges[:6]  # one range a table
    unique, counts = found.unique[:num_unique], found.counts[:num_unique].to(torch.int64)

    def ours() -> route_ops.Routed:
        return route_ops.route(device_map, found.unique, found.offsets, found.counts)

    def peer() -> tuple[Tensor, ...]:
        tables = torch.arange(NUM_TABLES, device=device)
        table = torch.repeat_interleave(tables, found.offsets.diff(), output_size=num_unique)
        x = unique - start[table]
        stop = (x + shift[table]) % modulus[table] + first[table]
        cells = stop * NUM_TABLES + table
        order = torch.argsort(cells, stable=True)
        keys = (base[table] + x // divisor[table])[order].to(torch.int32)
        numbers = torch.zeros(2, _RANKS * NUM_TABLES, dtype=torch.int64, device=device)
        numbers[0].index_add_(0, cells, torch.ones_like(cells))
        numbers[1].index_add_(0, cells, counts)
        return keys, order.to(torch.int32), numbers

    def check() -> None:
        routed, (keys, order, numbers) = ours(), peer()
        assert torch.equal(routed.keys[:num_unique], keys), "route: keys differ from torch's"
        assert torch.equal(routed.uniques[:num_unique], order), "route: the order differs from torch's"
        assert torch.equal(routed.counts.flatten(), numbers[0]), "route: counts differ from torch's"
        assert torch.equal(routed.accesses.flatten(), numbers[1]), "route: accesses differ from torch's"

    moved = num_unique * (_ID_BYTES + 3 * _KEY_BYTES)  # read: ids and counts; written: keys, which id each is
    yield Case(f"route {num_unique} ids, {_RANKS} ranks", ours, {"argsort, index_add": peer}, moved, check, {})


def average_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Two replicas; of the rows that one touched the other touched half too."""
    count = sizes.distinct // 2
    for dim in sizes.dims:
        known = torch.randperm(sizes.table_rows, device=device)[: 3 * (count // 2)].sort().values
        own, other = known[: 2 * (count // 2)], known[count // 2 :]
        yield _mark_case(dim, own, sizes.table_rows)
        yield _average_case(dim, own, other, sizes.table_rows)


def _mark_case(dim: int, slots: Tensor, table_rows: int) -> Case:
    """Lists what is touched for the first time and keeps what it was; marks go again, for the next round."""
    device, num_slots = slots.device, len(slots)
    table = torch.randn(table_rows, dim, device=device)
    marks = torch.zeros(table_rows, dtype=torch.uint8, device=device)
    listed, kept = torch.empty_like(slots), torch.empty(num_slots, dim, device=device)
    used, count = (torch.tensor([number], device=device) for number in (0, num_slots))

    def ours() -> tuple[Tensor, Tensor]:
        bounds = average_ops.mark(slots, count, marks, used, listed)
        average_ops.pack(table, listed, bounds, kept, num_slots)
        average_ops.clear(listed, bounds, marks, num_slots)
        return listed, kept

    def peer() -> tuple[Tensor, Tensor]:
        new = slots[marks[slots] == 0]  # the host waits here
        marks[new] = 1
        rows = table[new]
        marks[new] = 0
        return new, rows

    def check() -> None:
        for mine, theirs in zip(ours(), peer(), strict=True):
            assert torch.equal(mine, theirs), "mark and pack differ from torch's"
        assert not marks.any(), "clear leaves marks"

    moved = num_slots * (2 * dim * _ELEMENT_BYTES + 2 * _ID_BYTES + 1)
    return Case(f"mark, pack, clear dim {dim}", ours, {"index": peer}, moved, check, {})


def _average_case(dim: int, own: Tensor, other: Tensor, table_rows: int) -> Case:
    device, slots = own.device, torch.cat([own, other])
    table = torch.randn(table_rows, dim, device=device)
    peer_table, old = table.clone(), torch.randn(len(own), dim, device=device)
    sent = torch.randn(len(slots), dim, device=device)
    ends = torch.tensor([0, len(own), len(slots)], device=device)
    merged = merge_ops.merge(slots, most=2)
    union, places = torch.unique(slots, return_inverse=True)
    own_places, other_places = places.split([len(own), len(other)])

    def ours() -> None:
        average_ops.average(table, merged, sent, ends, 0, old)

    def with_merge() -> None:
        average_ops.average(table, merge_ops.merge(slots, most=2), sent, ends, 0, old)

    def peer() -> None:
        before = peer_table[union]
        before[own_places] = old
        mine, theirs = before.clone(), before
        mine[own_places], theirs[other_places] = sent[: len(own)], sent[len(own) :]
        peer_table[union] = mine + (theirs - mine) * 0.5

    def check() -> None:
        table.copy_(peer_table)
        ours()
        peer()
        torch.testing.assert_close(table, peer_table, rtol=0, atol=0, msg="average: rows differ from torch's")

    # Read: the rows that were sent, and the old values of rows that only one replica sent; written: the means.
    rows = len(slots) + (2 * len(union) - len(slots)) + len(union)
    moved = rows * dim * _ELEMENT_BYTES + len(slots) * _ID_BYTES
    peers = {"with the merge": with_merge, "index": peer}
    return Case(f"average dim {dim}", ours, peers, moved, check, {COPY: COPY_SHARE})


def window_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """The slots of two batches, sorted."""
    keys, others = (torch.randperm(sizes.table_rows, device=device)[: sizes.entries].sort().values for _ in range(2))
    out = torch.empty(len(keys), dtype=torch.int32, device=device)

    def ours() -> Tensor:
        return intersect(keys, others, out=out)

    def peer() -> Tensor:
        places = torch.searchsorted(others, keys).clamp_(max=len(others) - 1)
        return torch.where(others[places] == keys, places, -1).to(torch.int32)

    def check() -> None:
        assert torch.equal(ours(), peer()), "intersect differs from torch's"

    moved = (len(keys) + len(others)) * _ID_BYTES + len(keys) * _KEY_BYTES
    yield Case(f"intersect {len(keys)} keys", ours, {"searchsorted": peer}, moved, check, {})


CASES = {
    "bound_ids": bound_ids_cases,
    "route": route_cases,
    "average": average_cases,
    "window": window_cases,
}

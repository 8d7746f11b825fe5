"""Route in Triton against its reference and the plan: destinations, keys and the stable sort."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh.ops.route import reference
from rowmesh.placement import AddressMap, Plan, RowRange, TablePlan, TableShape
from tests.support.plans import joined
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda = kernels_of("route")


def on_device(address_map, device):
    plan = address_map.plan
    return cuda.DeviceMap.make(
        device,
        address_map.ranges,
        address_map.index,
        num_kinds=len(address_map.kinds),
        world_size=plan.world_size,
        rank=address_map.rank,
        ranks_per_node=plan.ranks_per_node,
        key_stride=address_map.key_stride,
    )


@st.composite
def plans(draw):
    ranks_per_node = draw(st.integers(1, 3))
    world_size = ranks_per_node * draw(st.integers(1, 3))
    tables = []
    for index, num_rows in enumerate(draw(st.lists(st.sampled_from([1, 3, 100, 8 * 10**8]), min_size=1, max_size=4))):
        cuts = sorted(draw(st.sets(st.integers(1, min(num_rows - 1, 8000)), max_size=9))) if num_rows > 1 else []
        ranges = []
        for start, stop in zip([0, *cuts], [*cuts, num_rows], strict=True):
            rules = ["cyclic", "fixed"] if stop - start > 10**5 else ["cyclic", "node", "replicated", "fixed"]
            shift, rank = draw(st.integers(0, world_size - 1)), draw(st.integers(0, world_size - 1))
            ranges.append(RowRange(start, stop, draw(st.sampled_from(rules)), shift, rank, draw(st.booleans())))
        tables.append(TablePlan(TableShape(f"t{index}", num_rows, 20, 20), tuple(ranges)))
    return joined(Plan(tuple(tables), world_size, ranks_per_node), lambda: draw(st.booleans()))


@st.composite
def requests(draw):
    plan = draw(plans())
    parts = []
    for table in plan.tables:
        rows = st.integers(0, table.shape.num_rows - 1) | st.sampled_from([part.start for part in table.ranges])
        parts.append(draw(st.lists(rows, unique=True, max_size=15)))
    unique = [row for part in parts for row in part]
    offsets = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    counts = torch.tensor([draw(st.integers(1, 9)) for _ in unique], dtype=torch.int32)
    rank = draw(st.integers(0, plan.world_size - 1))
    return AddressMap(plan, [table.name for table in plan.tables], rank), unique, offsets, counts


@settings(max_examples=40)
@given(requests=requests(), spare=st.integers(0, 3))
def test_equals_the_reference(device, requests, spare):
    """`spare` ids past the unique ones, which are not asked for."""
    address_map, unique, offsets, counts = requests
    world_size = address_map.plan.world_size
    routed = cuda.route(
        on_device(address_map, device),
        torch.tensor(unique + [-5] * spare, dtype=torch.int64, device=device),
        offsets.to(device),
        torch.cat([counts, counts.new_full((spare,), 99)]).to(device),
    )
    places = []
    for table in range(address_map.num_tables):
        for row in unique[offsets[table] : offsets[table + 1]]:
            destination, key, kind = address_map.locate(table, row)
            places.append((destination, key, address_map.kinds.index(kind) * address_map.num_tables + table))
    destinations, wanted, segments = (torch.tensor([p[i] for p in places], dtype=torch.int64) for i in range(3))
    keys, order, bounds, accesses = reference.route(
        destinations, wanted, segments, counts.long(), world_size, address_map.num_segments
    )
    assert (routed.keys[: len(unique)].cpu().long() % 2**32).tolist() == keys.tolist()
    assert routed.uniques[: len(unique)].tolist() == order.tolist()
    assert routed.counts.tolist() == bounds.diff().tolist()
    assert routed.accesses.tolist() == accesses.tolist()


@settings(max_examples=15)
@given(requests=requests())
def test_owners_and_slots_are_those_of_the_plan(device, requests):
    address_map, unique, offsets, _ = requests
    plan = address_map.plan
    device_map = on_device(address_map, device)
    for table, entry in enumerate(plan.tables):
        rows = unique[offsets[table] : offsets[table + 1]]
        owners, slots = cuda.locate(device_map, table, torch.tensor(rows, dtype=torch.int64, device=device))
        for row, owner, slot in zip(rows, owners.tolist(), slots.tolist(), strict=True):
            assert owner == entry.range_of(row).owner(row, plan.world_size)
            pieces = AddressMap(plan, [t.name for t in plan.tables], owner).owned(table)
            assert [piece.slots[piece.rows.index(row)] for piece in pieces if row in piece.rows] == [slot]


def test_many_cells_need_wider_keys(device):
    """More than 2¹⁵ of them."""
    shapes = [TableShape(f"t{index}", 5000, 4, 4) for index in range(9)]
    address_map = AddressMap(Plan.cyclic(shapes, 4000), [shape.name for shape in shapes], 7)
    unique = torch.arange(9 * 10, device=device) % 10 * 499
    offsets, counts = torch.arange(10, device=device) * 10, torch.ones(90, dtype=torch.int32, device=device)
    routed = cuda.route(on_device(address_map, device), unique, offsets, counts)
    places = [address_map.locate(u // 10, u % 10 * 499) for u in range(90)]
    order = sorted(range(90), key=lambda u: (places[u][0], u // 10))
    assert routed.uniques.tolist() == order
    assert int(routed.counts.sum()) == 90


@settings(max_examples=15)
@given(requests=requests(), spare=st.integers(0, 3))
def test_places_of_a_rank_alone(device, requests, spare):
    """Ids may occur more than once; those past the last table's have no place."""
    address_map, rows, offsets, _ = requests
    plan = replace(address_map.plan, world_size=1, ranks_per_node=1)
    plan = replace(
        plan, tables=tuple(replace(t, ranges=(RowRange(0, t.shape.num_rows, "fixed"),)) for t in plan.tables)
    )
    alone = AddressMap(plan, [table.name for table in plan.tables], 0)
    device_map = on_device(alone, device)
    assert device_map.is_alone
    ids = torch.tensor(rows + [-5] * spare, dtype=torch.int64)
    slots = cuda.place(device_map, ids.to(device), offsets.to(device)).tolist()
    tables = torch.arange(alone.num_tables).repeat_interleave(offsets.diff()).tolist()
    expected = [alone.locate(table, row)[1] for table, row in zip(tables, rows, strict=True)]
    assert slots == expected + [2**31 - 1] * spare

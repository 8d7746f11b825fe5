"""Route against its reference: destinations, keys, the stable sort, and where every row is read."""

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given

from rowmesh.ops.route import HEADER, first_rows, locate, reference, route
from rowmesh.ops.route.buckets import bucket_of
from rowmesh.placement import AddressMap, Plan, RowRange, TablePlan, TableShape
from rowmesh.placement.address_map import REPLIES
from tests.support.memory import Poisoned
from tests.support.plans import joined

ROW_BYTES = 20
HERE = 10**12


def run(unique, unique_offsets, counts, address_map, arenas, received):
    world_size, num_segments = address_map.plan.world_size, address_map.num_segments
    header = address_map.header(arenas.ctypes.data, ROW_BYTES)
    assert len(header) == HEADER
    scratch = [torch.empty(len(unique), dtype=torch.int32) for _ in range(2)]
    keys, uniques = Poisoned(torch.int32, len(unique)), Poisoned(torch.int32, len(unique))
    offsets = Poisoned(torch.int64, world_size, num_segments + 1)
    accesses = Poisoned(torch.int64, world_size, num_segments)
    replies, addresses = Poisoned(torch.int64, world_size + 1), Poisoned(torch.int64, len(unique))
    refused = route(
        header.ctypes.data,
        unique.data_ptr(),
        unique_offsets.data_ptr(),
        counts.data_ptr(),
        *(part.data_ptr() for part in scratch),
        received,
        keys.address,
        uniques.address,
        offsets.address,
        accesses.address,
        replies.address,
        addresses.address,
    )
    return refused, [part.result() for part in (keys, uniques, offsets, accesses, replies, addresses)]


@st.composite
def plans(draw):
    ranks_per_node = draw(st.integers(1, 4))
    world_size = ranks_per_node * draw(st.integers(1, 3))
    tables = []
    for index, num_rows in enumerate(draw(st.lists(st.sampled_from([1, 2, 3, 100, 9000, 8 * 10**8]), min_size=1))):
        cuts = sorted(draw(st.sets(st.integers(1, min(num_rows - 1, 8000)), max_size=12))) if num_rows > 1 else []
        ranges = []
        for start, stop in zip([0, *cuts], [*cuts, num_rows], strict=True):
            rules = ["cyclic", "fixed"] if stop - start > 10**5 else ["cyclic", "node", "replicated", "fixed"]
            shift, rank = draw(st.integers(0, world_size - 1)), draw(st.integers(0, world_size - 1))
            ranges.append(RowRange(start, stop, draw(st.sampled_from(rules)), shift, rank, draw(st.booleans())))
        tables.append(TablePlan(TableShape(f"t{index}", num_rows, ROW_BYTES, ROW_BYTES), tuple(ranges)))
    return joined(Plan(tuple(tables[:5]), world_size, ranks_per_node), lambda: draw(st.booleans()))


@st.composite
def requests(draw):
    plan = draw(plans())
    starts = [[part.start for part in table.ranges] for table in plan.tables]
    parts = []
    for table, begins in zip(plan.tables, starts, strict=True):
        rows = st.integers(0, table.shape.num_rows - 1) | st.sampled_from(begins)
        parts.append(draw(st.lists(rows, unique=True, max_size=20)))
    unique = torch.tensor([row for part in parts for row in part], dtype=torch.int64)
    offsets = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    counts = torch.tensor([draw(st.integers(1, 9)) for _ in unique], dtype=torch.int32)
    rank = draw(st.integers(0, plan.world_size - 1))
    return AddressMap(plan, [table.name for table in plan.tables], rank), unique, offsets, counts


def located(address_map, unique, offsets):
    """Stop, key, segment and kind of every unique id, one by one."""
    places = []
    for table in range(address_map.num_tables):
        for row in unique[offsets[table] : offsets[table + 1]].tolist():
            destination, key, kind = address_map.locate(table, row)
            places.append((destination, key, address_map.kinds.index(kind) * address_map.num_tables + table, kind))
    return places


@given(requests=requests(), readable=st.booleans())
def test_equals_the_reference(requests, readable):
    address_map, unique, offsets, counts = requests
    world_size, rank = address_map.plan.world_size, address_map.rank
    arenas = np.array([HERE * (1 + r) if readable or r == rank else 0 for r in range(world_size)], np.int64)
    refused, (keys, uniques, segment_offsets, accesses, replies, addresses) = run(
        unique, offsets, counts, address_map, arenas, received=77
    )
    assert refused == -1
    places = located(address_map, unique, offsets)
    destinations, wanted, segments = (torch.tensor([p[i] for p in places], dtype=torch.int64) for i in range(3))
    expected = reference.route(destinations, wanted, segments, counts.long(), world_size, address_map.num_segments)
    for mine, theirs in zip((keys.long() % 2**32, uniques, segment_offsets, accesses), expected, strict=True):
        assert mine.tolist() == theirs.tolist()
    reply = 0
    for u in uniques.tolist():  # in the order in which rows are asked for
        destination, key, _, kind = places[u]
        if kind in ("replicated", "forwarded"):
            expected_address = arenas[rank] + key % address_map.key_stride * ROW_BYTES
        elif kind in ("relayed", "node"):
            expected_address = 0 if destination == rank else 77 + reply * ROW_BYTES
        else:
            expected_address = arenas[destination] + key * ROW_BYTES if arenas[destination] else 77 + reply * ROW_BYTES
        assert int(addresses[u]) == expected_address
        reply += kind in REPLIES
    by_destination = [sum(1 for p in places if p[0] == r and p[3] in REPLIES) for r in range(world_size)]
    assert replies.diff().tolist() == by_destination
    assert replies[[0, -1]].tolist() == [0, reply]


@given(requests=requests())
def test_owners_and_slots_are_those_of_the_plan(requests):
    address_map, unique, offsets, _ = requests
    plan = address_map.plan
    arenas = np.zeros(plan.world_size, np.int64)
    header = address_map.header(arenas.ctypes.data, ROW_BYTES)
    for table, entry in enumerate(plan.tables):
        rows = unique[offsets[table] : offsets[table + 1]].contiguous()
        owners, slots = (torch.empty(len(rows), dtype=torch.int32) for _ in range(2))
        locate(header.ctypes.data, table, rows.data_ptr(), len(rows), owners.data_ptr(), slots.data_ptr())
        for row, owner, slot in zip(rows.tolist(), owners.tolist(), slots.tolist(), strict=True):
            assert owner == entry.range_of(row).owner(row, plan.world_size)
            pieces = AddressMap(plan, [t.name for t in plan.tables], owner).owned(table)
            found = [piece.slots[piece.rows.index(row)] for piece in pieces if row in piece.rows]
            assert found == [slot % 2**32]  # read as int32


@given(row=st.sampled_from([-1, 3, 4, 2**40, -(2**63), 2**63 - 1]), world_size=st.integers(1, 5))
def test_refuses_the_first_id_that_is_no_row(row, world_size):
    unique = torch.tensor([0, 1, 2, row, -1])
    shapes = [TableShape("a", 1, 4, 4), TableShape("b", 3, 4, 4)]
    refused, _ = run(
        unique,
        torch.tensor([0, 1, 5]),
        torch.ones(5, dtype=torch.int32),
        AddressMap(Plan.cyclic(shapes, world_size), ["a", "b"], 0),
        np.zeros(world_size, np.int64),
        0,
    )
    assert refused == 3


@given(row=st.integers(0, 2000) | st.integers(0, 2**51) | st.integers(9, 51).map(lambda bits: 2**bits - 257))
def test_a_bucket_begins_with_its_first_row(row):
    """In the kernel and in the index; the rows up to 255 have one each."""
    first = first_rows(row + 1)
    assert bucket_of(row) == len(first) - 1
    assert first[-1] <= row
    assert bucket_of(int(first[-1])) == len(first) - 1
    assert all(np.diff(first) >= 1)
    assert all(np.diff(first) <= 1 + first[:-1] / 256)

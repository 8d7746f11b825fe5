"""Route against its reference: owners, slots, the stable sort, and where every row is read."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from rowmesh.ops.route import reference, route
from rowmesh.placement import DealtPlacement
from tests.support.memory import Poisoned

ROW_BYTES = 20


def run(unique, unique_offsets, counts, placement, arenas, received):
    world_size, num_segments = placement.world_size, len(placement.num_rows)
    tables = [torch.tensor(values) for values in (placement.bases, placement.shifts, placement.num_rows)]
    scratch = [torch.empty(len(unique), dtype=torch.int32) for _ in range(2)]
    slots, uniques = Poisoned(torch.int32, len(unique)), Poisoned(torch.int32, len(unique))
    offsets = Poisoned(torch.int64, world_size, num_segments + 1)
    accesses = Poisoned(torch.int64, world_size, num_segments)
    addresses = Poisoned(torch.int64, len(unique))
    refused = route(
        unique.data_ptr(), unique_offsets.data_ptr(), counts.data_ptr(), num_segments,
        *(table.data_ptr() for table in tables), world_size, *(part.data_ptr() for part in scratch),
        arenas.data_ptr(), received, ROW_BYTES, slots.address, uniques.address, offsets.address,
        accesses.address, addresses.address,
    )  # fmt: skip
    return refused, [part.result() for part in (slots, uniques, offsets, accesses, addresses)]


@st.composite
def requests(draw):
    num_rows = draw(st.lists(st.sampled_from([1, 2, 3, 100, 8 * 10**8]), min_size=1, max_size=5))
    parts = [draw(st.lists(st.integers(0, n - 1), unique=True, max_size=20)) for n in num_rows]
    unique = torch.tensor([row for part in parts for row in part], dtype=torch.int64)
    offsets = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    counts = torch.tensor([draw(st.integers(1, 9)) for _ in unique], dtype=torch.int32)
    return DealtPlacement(tuple(num_rows), draw(st.integers(1, 9))), unique, offsets, counts


@given(requests=requests(), num_readable=st.integers(0, 9))
def test_equals_the_reference(requests, num_readable):
    placement, unique, offsets, counts = requests
    arenas = torch.tensor([10**12 * (rank + 1) if rank < num_readable else 0 for rank in range(placement.world_size)])
    refused, (slots, uniques, segment_offsets, accesses, addresses) = run(
        unique, offsets, counts, placement, arenas, received=77
    )
    assert refused == -1
    tables = [torch.tensor(values) for values in (placement.bases, placement.shifts, placement.num_rows)]
    expected = reference.route(unique, offsets, counts, *tables, placement.world_size)
    unsigned = slots.long() % 2**32
    for mine, theirs in zip((unsigned, uniques, segment_offsets, accesses), expected, strict=True):
        assert mine.tolist() == theirs.tolist()
    check_addresses(placement, unique, offsets, arenas.tolist(), uniques, addresses)


def check_addresses(placement, unique, offsets, arenas, uniques, addresses):
    positions = torch.argsort(uniques)
    for table in range(len(placement.num_rows)):
        for u in range(int(offsets[table]), int(offsets[table + 1])):
            owner, slot = placement.locate(table, int(unique[u]))
            readable = arenas[owner] + slot * ROW_BYTES
            expected = readable if arenas[owner] else 77 + int(positions[u]) * ROW_BYTES
            assert int(addresses[u]) == expected


@given(row=st.sampled_from([-1, 3, 4, 2**40, -(2**63), 2**63 - 1]), world_size=st.integers(1, 5))
def test_refuses_the_first_id_that_is_no_row(row, world_size):
    unique = torch.tensor([0, 1, 2, row, -1])
    refused, _ = run(
        unique, torch.tensor([0, 1, 5]), torch.ones(5, dtype=torch.int32), DealtPlacement((1, 3), world_size),
        torch.zeros(world_size, dtype=torch.int64), 0,
    )  # fmt: skip
    assert refused == 3

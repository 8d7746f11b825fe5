"""Dealt placement: every row has one owner and one slot, and owners hold equal shares."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rowmesh.errors import ConfigurationError
from rowmesh.placement import DealtPlacement


@given(num_rows=st.lists(st.integers(1, 40), min_size=1, max_size=6), world_size=st.integers(1, 7))
def test_rows_and_slots_are_paired_one_to_one(num_rows, world_size):
    placement = DealtPlacement(tuple(num_rows), world_size)
    places = {}
    for table, count in enumerate(num_rows):
        for rank in range(world_size):
            owned = placement.rows_of(table, rank)
            for index, row in enumerate(owned):
                assert placement.locate(table, row) == (rank, placement.bases[table] + index)
                places[table, row] = rank, placement.bases[table] + index
            assert abs(len(owned) - count / world_size) < 1
    assert len(places) == sum(num_rows) == len(set(places.values()))
    assert all(0 <= slot < placement.num_slots for _, slot in places.values())
    assert placement.num_slots * world_size < sum(num_rows) + len(num_rows) * world_size


def test_the_first_rows_of_tables_go_to_different_ranks():
    placement = DealtPlacement((9,) * 4, 4)
    assert sorted(placement.locate(table, 0)[0] for table in range(4)) == [0, 1, 2, 3]


def test_slots_have_32_bits():
    DealtPlacement((2**32 - 1,), 1)
    with pytest.raises(ConfigurationError, match="4,294,967,296 rows of one group"):
        DealtPlacement((2**32,), 1)
    DealtPlacement((2**32,), 2)

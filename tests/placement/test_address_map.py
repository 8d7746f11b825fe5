"""The address map: every row has a slot of its own wherever it is held, and pieces say which."""

import pytest
from hypothesis import given, settings

from rowmesh.errors import ConfigurationError
from rowmesh.placement import AddressMap, Plan, TableShape
from tests.placement.test_plan import plans


def maps_of(plan):
    names = [table.name for table in plan.tables]
    return [AddressMap(plan, names, rank) for rank in range(plan.world_size)]


@given(plans())
@settings(max_examples=60)
def test_held_rows_are_those_of_the_plan_and_no_slot_is_used_twice(plan):
    for rank, address_map in enumerate(maps_of(plan)):
        used = []
        for number, table in enumerate(plan.tables):
            rows = {}
            for piece in address_map.held(number):
                assert len(piece.rows) == len(piece.slots)
                rows |= dict(zip(piece.rows, piece.slots, strict=True))
            expected = [
                row
                for row in range(table.shape.num_rows)
                if rank in table.range_of(row).holders(row, plan.world_size, plan.ranks_per_node)
            ]
            assert sorted(rows) == expected
            used += rows.values()
            owned = {
                row: slot
                for piece in address_map.owned(number)
                for row, slot in zip(piece.rows, piece.slots, strict=True)
            }
            assert owned.items() <= rows.items()
            assert sorted(owned) == [r for r in rows if table.range_of(r).owner(r, plan.world_size) == rank]
        assert len(set(used)) == len(used)
        assert all(0 <= slot < address_map.num_slots[rank] for slot in used)


@given(plans())
@settings(max_examples=60)
def test_a_row_is_asked_for_where_it_can_be_found(plan):
    maps = maps_of(plan)
    slots = [
        [
            {row: slot for piece in m.held(t) for row, slot in zip(piece.rows, piece.slots, strict=True)}
            for t in range(m.num_tables)
        ]
        for m in maps
    ]
    for rank, address_map in enumerate(maps):
        for number, table in enumerate(plan.tables):
            for row in range(table.shape.num_rows):
                stop, key, kind = address_map.locate(number, row)
                owner = table.range_of(row).owner(row, plan.world_size)
                if kind in ("direct", "replicated"):
                    assert (stop, key) == (owner, slots[owner][number][row])
                    continue
                assert stop // plan.ranks_per_node == rank // plan.ranks_per_node
                assert stop % plan.ranks_per_node == owner % plan.ranks_per_node
                node, slot = divmod(key, address_map.key_stride)
                assert node == owner // plan.ranks_per_node
                assert slot == slots[owner][number][row]
                if kind in ("node", "forwarded"):
                    assert slot == slots[stop][number][row]


def test_the_map_of_a_large_plan_is_small():
    shape = TableShape("large", 10**12, 4, 4)
    assert AddressMap(Plan.cyclic([shape], 1000), ["large"], 3).num_bytes < 1000


def test_keys_that_do_not_fit_are_refused():
    plan = Plan.cyclic([TableShape("large", 2**33, 4, 4)], world_size=2)
    with pytest.raises(
        ConfigurationError, match=r"tables 'large' \(8,589,934,592 rows\): the fullest rank would hold 4,294,967,296"
    ):
        AddressMap(plan, ["large"], 0)


def test_nodes_do_not_count_where_nothing_is_relayed():
    plan = Plan.cyclic([TableShape("large", 5 * 10**9, 4, 4)], world_size=128, ranks_per_node=1)
    assert AddressMap(plan, ["large"], 0).key_stride == 39_062_500

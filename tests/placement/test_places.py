"""Places of many rows, and who sends what, against the rules of one row at a time."""

import numpy as np
from hypothesis import given

from rowmesh.placement import AddressMap
from rowmesh.placement.places import Movements, Places
from tests.support.plans import pairs_of_plans


@given(plans=pairs_of_plans())
def test_places_are_those_of_the_rules(plans):
    plan = plans[0]
    maps = [AddressMap(plan, ["a", "b"], rank) for rank in range(plan.world_size)]
    for number, table in enumerate(plan.tables):
        rows = np.arange(table.shape.num_rows)
        located = Places(maps[0], number)(rows)
        for row in rows.tolist():
            part = table.range_of(row)
            assert located.owner[row] == part.owner(row, plan.world_size)
            holders = part.holders(row, plan.world_size, plan.ranks_per_node)
            assert tuple(rank for rank in range(plan.world_size) if located.held_by(rank)[row]) == holders
        for address_map in maps:
            for piece in address_map.held(number):
                assert located.slot[list(piece.rows)].tolist() == list(piece.slots)


@given(plans=pairs_of_plans())
def test_every_holder_gets_every_row_once(plans):
    old, new = plans
    ranks = range(old.world_size)
    for number, table in enumerate(old.tables):
        rows = np.arange(table.shape.num_rows)
        before = [Places(AddressMap(old, ["a", "b"], rank), number)(rows) for rank in ranks]
        after = [Places(AddressMap(new, ["a", "b"], rank), number)(rows) for rank in ranks]
        moves = [Movements(before[rank], after[rank], rank, old.world_size) for rank in ranks]
        for rank in ranks:
            assert [moves[peer].sent_counts[rank] for peer in ranks] == moves[rank].received_counts
            assert moves[rank].sent_counts[rank] == 0
            came = []
            for peer in ranks:
                begin = sum(moves[peer].sent_counts[:rank])
                row_of = dict(
                    zip(
                        before[peer].slot[before[peer].held_by(peer)].tolist(),
                        rows[before[peer].held_by(peer)].tolist(),
                        strict=True,
                    )
                )
                came += [row_of[s] for s in moves[peer].sent[begin : begin + moves[peer].sent_counts[rank]].tolist()]
            slot_of = after[rank].slot
            assert slot_of[came].tolist() == moves[rank].received.tolist()
            filled = sorted(moves[rank].received.tolist() + moves[rank].kept_to.tolist())
            assert filled == sorted(slot_of[after[rank].held_by(rank)].tolist())

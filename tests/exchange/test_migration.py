"""Which rank sends what: by arithmetic on many rows, against the rules of one row at a time."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from rowmesh.exchange.migration import windows
from rowmesh.placement import AddressMap
from rowmesh.tables import TableSpec
from tests.support.plans import RULES, random_plans


@st.composite
def pairs_of_plans(draw):
    per_node, nodes = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (4, 1)]))
    tables = [TableSpec(name=name, num_rows=draw(st.integers(1, 60)), dim=4) for name in "ab"]
    return [draw(random_plans(tables, per_node * nodes, per_node)) for _ in range(2)]


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


@given(plans=pairs_of_plans(), chunk_bytes=st.integers(1, 20_000), row_bytes=st.integers(1, 500))
def test_windows_cover_all_rows_and_are_bounded(plans, chunk_bytes, row_bytes):
    def share(first, second):
        return row_bytes * (1 + len(RULES[: RULES.index(first.rule)]) + RULES.index(second.rule))

    maps = [AddressMap(plan, ["a", "b"], 0) for plan in plans]
    before, after = (Places(each, 0) for each in maps)
    num_rows = plans[0].tables[0].shape.num_rows
    found = list(windows(before, after, num_rows, share, chunk_bytes))
    assert np.concatenate(found).tolist() == list(range(num_rows))
    for rows in found:
        needed = sum(share(plans[0].tables[0].range_of(row), plans[1].tables[0].range_of(row)) for row in rows.tolist())
        assert len(rows) == 1 or needed <= 2 * chunk_bytes + 2 * row_bytes * 7

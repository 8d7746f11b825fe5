import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.placement.profile import TableProfile
from rowmesh.placement.summary import LEVEL_OF, accesses_before, levels_of, plan_levels, stretches

RULES = ("cyclic", "node", "replicated", "fixed")


@st.composite
def planned_tables(draw):
    cuts = sorted(draw(st.sets(st.integers(1, 29), max_size=12)))
    ranges = tuple(
        RowRange(start, stop, draw(st.sampled_from(RULES)), two_hop=draw(st.booleans()))
        for start, stop in zip([0, *cuts], [*cuts, 30], strict=True)
    )
    counts = draw(st.lists(st.integers(0, 9), min_size=30, max_size=30))
    shape = TableShape("item", 30, 64, 64)
    return TablePlan(shape, ranges), TableProfile.of_counts(shape, counts), np.array(counts)


@given(planned_tables())
def test_levels_are_what_the_rows_say_one_by_one(case):
    table, profile, counts = case
    level_of_row = np.array([LEVEL_OF[table.range_of(row).rule] for row in range(30)])
    for name, level in levels_of(table, profile).items():
        assert level.rows == (level_of_row == name).sum() == plan_levels(Plan((table,), 4, 2))[name]
        assert level.share == pytest.approx(counts[level_of_row == name].sum() / max(counts.sum(), 1))


@given(planned_tables())
def test_accesses_before_are_prefix_sums(case):
    _, profile, counts = case
    expected = np.concatenate([[0], np.cumsum(counts)])
    np.testing.assert_allclose(accesses_before(profile, np.arange(31)), expected)


@given(planned_tables())
def test_stretches_hold_every_range_once_in_order(case):
    table, _, _ = case
    found = stretches(table)
    assert tuple(part for stretch in found for part in stretch.parts) == table.ranges
    for stretch in found:
        assert {(part.rule, part.two_hop) for part in stretch.parts} == {(stretch.rule, stretch.two_hop)}


def test_owners_are_named():
    ranges = (
        RowRange(0, 1, "fixed", rank=3),
        RowRange(1, 2, "fixed", rank=1),
        RowRange(2, 10, "cyclic", shift=2),
        RowRange(10, 30, "fixed", rank=0),
    )
    found = stretches(TablePlan(TableShape("item", 30, 64, 64), ranges))
    assert [(s.start, s.stop) for s in found] == [(0, 2), (2, 10), (10, 30)]
    assert [s.owners_text() for s in found] == ["row by row: ranks 3, 1", "cyclic from rank 2", "rank 0"]

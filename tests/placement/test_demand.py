"""Demand lays tables end to end, and can be made to fall."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.placement import TableShape
from rowmesh.placement.demand import Demand
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request


def demand_of(*counts, deduplicated=True, num_samples=100):
    shapes = [TableShape(f"t{index}", len(values), 8, 8, 4) for index, values in enumerate(counts)]
    profile = Profile.from_counts({f"t{i}": values for i, values in enumerate(counts)}, shapes, num_samples)
    return Demand.of(profile, 4, 2, Request(batch_size=5, deduplicated=deduplicated))


def test_tables_lie_end_to_end():
    demand = demand_of([9, 4, 4], [50, 0])
    assert demand.first_row.tolist() == [0, 3, 5]
    assert demand.starts.tolist() == [0, 1, 3, 4, 5]
    assert demand.table.tolist() == [0, 0, 1, 1]
    assert demand.lengths.tolist() == [1, 2, 1, 1]
    assert (demand.num_nodes, demand.row_bytes.tolist()) == (2, [12, 12])


def test_chances_with_deduplication_and_rates_without():
    f = np.array([0.09, 0.04, 0.5, 0.0])
    chances, rates = (demand_of([9, 4, 4], [50, 0], deduplicated=dedup) for dedup in (True, False))
    for found, samples in ((chances.rank, 5), (chances.node, 10), (chances.world, 20), (rates.world, 20)):
        np.testing.assert_allclose(found, 1 - (1 - f) ** samples)
    np.testing.assert_allclose(rates.rank, 5 * f)
    np.testing.assert_allclose(rates.node, 10 * f)


def hull_slopes(values):
    """What pooling neighbours that rise must come to: slopes of the upper hull of the running sum."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    slopes, at = [], 0
    while at < len(values):
        steps = (total[at + 1 :] - total[at]) / np.arange(1, len(values) - at + 1)
        reach = int(np.flatnonzero(steps >= steps.max() * (1 - 1e-12))[-1]) + 1
        slopes += [steps[reach - 1]] * reach
        at += reach
    return slopes


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=25), min_size=1, max_size=3))
def test_pooled_demand_falls_and_is_the_nearest_that_does(counts):
    demand = demand_of(*counts, deduplicated=False)
    pooled = demand.falling()
    rows = np.repeat(pooled.rank, pooled.lengths)
    for index, values in enumerate(counts):
        of_table = rows[demand.first_row[index] : demand.first_row[index + 1]]
        np.testing.assert_allclose(of_table, 5 * np.array(hull_slopes(values)) / 100, atol=1e-12)
    for name in ("rank", "node", "world"):
        assert getattr(pooled, name) @ pooled.lengths == pytest.approx(getattr(demand, name) @ demand.lengths)


def test_demand_that_falls_stays_as_it_is():
    demand = demand_of([9, 4, 4], [50, 0])
    assert demand.falling() is demand


def test_rows_after_the_last_rise_are_a_table_of_their_own():
    demand = demand_of([9, 2, 4, 1, 1, 7], [50, 0], [3, 8, 8])
    apart = demand.with_tails()
    assert [(shape.name, shape.num_rows) for shape in apart.shapes] == [
        ("t0", 5),
        ("t0", 1),
        ("t1", 2),
        ("t2", 1),
        ("t2", 2),
    ]
    assert apart.first_row.tolist() == [0, 5, 6, 8, 9, 11]
    assert apart.table.tolist() == [0, 0, 0, 0, 1, 2, 2, 3, 4]
    assert np.array_equal(apart.starts, demand.starts)
    falls = demand_of([9, 4, 4], [50, 0])
    assert falls.with_tails() is falls

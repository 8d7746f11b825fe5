"""Rows migrate in pieces that a bound on memory allows; what moves is tested in tests/test_migrations.py."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from rowmesh.exchange.migration import pieces_of
from rowmesh.placement import AddressMap
from rowmesh.placement.places import Places
from tests.support.plans import RULES, pairs_of_plans


@given(plans=pairs_of_plans(), chunk_bytes=st.integers(1, 20_000), row_bytes=st.integers(1, 500))
def test_pieces_cover_all_rows_and_are_bounded(plans, chunk_bytes, row_bytes):
    def share(first, second):
        return row_bytes * (1 + len(RULES[: RULES.index(first.rule)]) + RULES.index(second.rule))

    maps = [AddressMap(plan, ["a", "b"], 0) for plan in plans]
    before, after = (Places(each, 0) for each in maps)
    num_rows = plans[0].tables[0].shape.num_rows
    found = list(pieces_of(before, after, num_rows, share, chunk_bytes))
    assert np.concatenate(found).tolist() == list(range(num_rows))
    for rows in found:
        needed = sum(share(plans[0].tables[0].range_of(row), plans[1].tables[0].range_of(row)) for row in rows.tolist())
        assert len(rows) == 1 or needed <= 2 * chunk_bytes + 2 * row_bytes * 7

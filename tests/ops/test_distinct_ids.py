"""Distinct ids against dictionaries."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from rowmesh.ops.distinct_ids import DistinctIds, reference
from rowmesh.tables.dynamic.hashing import seed_of, shard_of

IDS = st.one_of(st.integers(-5, 5), st.sampled_from([-(2**63), 2**63 - 1, 2**32]))
LISTS = st.lists(st.lists(st.tuples(IDS, st.integers(1, 2**40)), max_size=60), min_size=1, max_size=3)


@given(lists=LISTS, owners=st.sampled_from([[0], [0, 1], [0, 0, 1, 2, 2]]), weighs=st.booleans())
def test_the_kernel_finds_what_dictionaries_find(lists, owners, weighs):
    """From one list to the next nothing is left over."""
    num_parts = owners[-1] + 1
    find = DistinctIds(seed_of("user"), np.array(owners), num_parts)
    for entries in lists:
        both = np.array(entries, np.int64).reshape(-1, 2)
        ids, weights = both[:, 0], both[:, 1] if weighs else None
        parts = np.array(owners)[shard_of("user", ids, len(owners))].tolist()
        ones = both[:, 1].tolist() if weighs else [1] * len(ids)
        mine = find(ids, weights)
        assert tuple(each.tolist() for each in mine) == reference.distinct(ids.tolist(), ones, parts, num_parts)

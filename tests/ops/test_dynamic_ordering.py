"""The smallest keys in ascending order, against `np.lexsort`."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rowmesh.ops.dynamic_index.ordering import NUM_ENDS, order

INT64 = np.iinfo(np.int64)


def ordered(rows, wanted):
    """What `order` makes of copies of rows, and that it leaves what follows them alone."""
    count = len(rows)
    room = np.concatenate([rows, np.full((3, 4), 7)])
    scratch, ends = np.empty_like(room), np.empty(NUM_ENDS, np.int64)
    order(room, count, wanted, scratch, ends, np.empty((1 + count // 32, 2), np.int64))
    assert (room[count:] == 7).all()
    return room[:wanted].tolist()


def expected(rows, wanted):
    return rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))[:wanted]].tolist()


@settings(max_examples=60)
@given(data=st.data(), count=st.sampled_from([1, 2, 32, 33, 300, 3000]), seed=st.integers(0, 99))
def test_orders_as_lexsort_does(data, count, seed):
    rng = np.random.default_rng(seed)
    scores = data.draw(st.sampled_from([1, 2, 50, 2**40]))
    lasts = data.draw(st.sampled_from([1, 3, 2**62]))
    ids = rng.permutation(count) if data.draw(st.booleans()) else rng.integers(INT64.min, INT64.max, count)
    rows = np.stack([rng.integers(0, scores, count), rng.integers(0, lasts, count), ids, np.arange(count)], axis=1)
    wanted = data.draw(st.integers(1, count))
    assert ordered(rows, wanted) == expected(rows, wanted)


@pytest.mark.parametrize("wanted", [1, 40, 64, 65])
def test_orders_keys_of_all_int64_and_those_that_double(wanted):
    ids = [INT64.min, INT64.max, 0, -1, *(1 << np.arange(1, 62))]
    rows = np.array([(0, 0, id, slot) for slot, id in enumerate(ids)], np.int64)
    assert ordered(rows, wanted) == expected(rows, wanted)

"""BatchCounter: (row, batch) pairs by run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.errors import IdRangeError
from rowmesh.placement.batches import BatchCounter


@given(st.lists(st.lists(st.integers(0, 49), max_size=40), max_size=10), st.sets(st.integers(1, 49)))
def test_counts_every_row_once_a_batch(batches, cuts):
    starts = np.array([0, *sorted(cuts), 50])
    counter = BatchCounter("item", starts)
    pairs = np.zeros(50, np.int64)
    for batch in batches:
        counter.add(np.array(batch, np.int64))
        pairs[np.unique(batch).astype(int)] += 1
    assert counter.pairs.tolist() == np.add.reduceat(pairs, starts[:-1]).tolist()


def test_refuses_ids_that_are_no_rows():
    with pytest.raises(IdRangeError, match=r"'item' has rows 0 to 9, but ids from -1 to 3 came"):
        BatchCounter("item", np.array([0, 10])).add(np.array([3, -1]))

"""Raw ids of items."""

import numpy as np
import pyarrow as pa
import pytest

from rowmesh.data.events.raw_ids import RawIds
from rowmesh.data.raw.ids import ids_of
from rowmesh.errors import DataError


def test_text_has_the_ids_of_raw_data():
    names = pa.array(["b", "a", "c"])
    raw = RawIds.of(names)
    assert raw.ids.tolist() == ids_of(names).tolist()
    assert raw.numbers(ids_of(pa.array(["c", "x", "b", "a"]))).tolist() == [2, -1, 0, 1]
    assert RawIds.of(pa.array([], pa.string())).numbers(np.array([3])).tolist() == [-1]


def test_items_that_would_share_a_row_are_refused():
    with pytest.raises(DataError, match="items 7 and 7 have one id, and would share a row"):
        RawIds.of(pa.array([7, 2**64 - 1, 7], pa.uint64()))

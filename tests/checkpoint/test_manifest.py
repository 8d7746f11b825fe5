import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rowmesh.checkpoint.manifest import CheckpointError, Manifest, RowRange, file_name, ranges_of


def expand(ranges):
    return [bounds.start + bounds.stride * i for bounds in ranges for i in range(bounds.count)]


@given(npst.arrays(np.int64, st.integers(0, 40), elements=st.integers(0, 30)))
def test_ranges_hold_any_rows_in_order(rows):
    assert expand(ranges_of(rows)) == rows.tolist()


@given(st.lists(st.builds(RowRange, st.integers(0, 5), st.integers(1, 5), st.integers(1, 9)), max_size=4))
def test_rows_dealt_by_rule_make_few_ranges(dealt):
    ranges = ranges_of(expand(dealt))
    assert expand(ranges) == expand(dealt)
    assert len(ranges) <= 2 * len(dealt)


@given(st.builds(RowRange, st.integers(0, 50), st.integers(1, 7), st.integers(0, 20)), st.integers(-5, 200))
def test_positions_invert_the_range(bounds, row):
    members = expand([bounds])
    expected = members.index(row) if row in members else -1
    assert bounds.positions(np.array([row])).tolist() == [expected]


def test_any_table_name_is_a_file_name():
    assert "/" not in file_name("user/country", 3, "values")
    assert file_name("a b", 0, "sum") != file_name("a_b", 0, "sum")


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 1, "tables": 3}'])
def test_what_is_no_manifest(text, tmp_path):
    with pytest.raises(CheckpointError, match="is no checkpoint manifest"):
        Manifest.from_json(text, tmp_path / "manifest.json")


def test_a_manifest_of_the_future(tmp_path):
    with pytest.raises(CheckpointError, match="has format 9; this rowmesh reads 1"):
        Manifest.from_json('{"format": 9}', tmp_path / "manifest.json")

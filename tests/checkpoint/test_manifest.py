import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.checkpoint.manifest import CheckpointError, Manifest, RowRange, file_name


@given(st.builds(range, st.integers(0, 50), st.integers(0, 200), st.integers(1, 7)), st.integers(-5, 250))
def test_positions_invert_the_range(rows, row):
    expected = rows.index(row) if row in rows else -1
    assert RowRange.of(rows).positions(np.array([row])).tolist() == [expected]


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

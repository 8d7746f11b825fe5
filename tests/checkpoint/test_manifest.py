import pytest

from rowmesh.checkpoint.manifest import Manifest, file_name
from rowmesh.errors import CheckpointError


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

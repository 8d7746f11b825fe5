"""Manifests: whose a folder is, and what differs from what is asked for now."""

import pytest

from rowmesh._support.files.checksums import checksums_of
from rowmesh._support.files.manifest import Manifest, contents, differences, why_stale
from rowmesh.errors import DataError

REQUEST = {"files": {"train": ["a.csv, 3 bytes"]}, "min_count": 2}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows").touch()
    Manifest(kind="data", request=REQUEST, files=("rows",)).write(tmp_path)
    return tmp_path


def test_it_comes_back(folder):
    assert Manifest.read(folder) == Manifest(kind="data", request=REQUEST, files=("rows",))
    assert contents(folder) == ["manifest.json", "rows"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"written_by": "someone"}', '{"written_by": "rowmesh"}', "\udcff"])
def test_other_files_of_that_name_are_none(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert Manifest.read(tmp_path) is None
    assert Manifest.read(tmp_path / "gone") is None


def test_why_a_folder_is_stale(folder):
    assert why_stale(folder, "data", REQUEST) == []
    assert why_stale(folder, "data", REQUEST | {"min_count": 3}) == ["min_count was 2, is 3"]
    assert why_stale(folder, "data", REQUEST | {"files": {"train": ["a.csv, 3 bytes", "b.csv, 1 bytes"]}}) == [
        "files.train.2 is new: b.csv, 1 bytes"
    ]
    assert why_stale(folder, "other data", REQUEST) is None
    assert why_stale(folder / "gone", "data", REQUEST) is None
    (folder / "rows").unlink()
    assert why_stale(folder, "data", REQUEST) == ["rows is missing"]


def test_the_order_of_files_counts():
    assert len(differences({"files": ["a", "b"]}, {"files": ["b", "a"]})) == 2


def test_keys_that_json_makes_strings_are_equal(folder):
    request = {"bags": {3: (1, 2)}}
    Manifest(kind="data", request=request).write(folder)
    assert why_stale(folder, "data", request) == []


def test_long_values_are_cut_short():
    (reason,) = differences({"schema": "a" * 9999}, {"schema": "b"})
    assert len(reason) < 300
    assert reason.endswith("…, is b")


def test_checksums_come_back_and_damage_is_named(tmp_path):
    (tmp_path / "rows").write_bytes(b"1234")
    sums = {"rows": checksums_of(tmp_path / "rows")}
    manifest = Manifest(kind="data", request=REQUEST | {3: 1.5}, files=("rows", "other"), checksums=sums)
    manifest.write(tmp_path)
    path = tmp_path / "manifest.json"
    text = path.read_bytes()
    read = Manifest.parse(text, path)
    assert (read.files, read.checksums) == (("rows", "other"), sums)
    with pytest.raises(DataError, match=r"manifest\.json is damaged: xxh3_64 is not that of the other keys"):
        Manifest.parse(text.replace(b"a.csv", b"b.csv"), path)
    with pytest.raises(DataError, match=r"manifest\.json: files\.rows: no checksums"):
        Manifest.parse(text.replace(b'"size_bytes": 4', b'"size_bytes": -4'), path)
    with pytest.raises(DataError, match=r"manifest\.json: request is missing"):
        Manifest.parse(text.replace(b'"request"', b'"requests"'), path)

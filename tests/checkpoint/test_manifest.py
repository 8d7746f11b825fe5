"""Manifests of checkpoints: read as they were written, or refused."""

import contextlib
import json

import pytest

from rowmesh import EmbeddingCollection, TableSpec
from rowmesh.checkpoint import read_manifest, save
from rowmesh.checkpoint.manifest import Manifest, file_name
from rowmesh.errors import CheckpointError, DamagedCheckpointError
from tests.support.prepared import sealed


def test_any_table_name_is_a_file_name():
    assert "/" not in file_name("user/country", 3, "values")
    assert file_name("a b", 0, "sum") != file_name("a_b", 0, "sum")


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 1, "tables": 3}'])
def test_what_is_no_manifest(text, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint manifest"):
        Manifest.from_json(text, tmp_path / "manifest.json")
    if text.startswith("{"):
        with pytest.raises(CheckpointError, match="is no checkpoint manifest"):
            Manifest.from_json(sealed(json.loads(text)), tmp_path / "manifest.json")


def test_a_manifest_of_the_future(tmp_path):
    with pytest.raises(CheckpointError, match="has format 9; this rowmesh reads 1"):
        Manifest.from_json(sealed({"format": 9}), tmp_path / "manifest.json")


def save_alike(mesh, folder):
    """Two tables of one shape, cyclic over all ranks."""
    tables = [TableSpec(name=name, num_rows=40, dim=4) for name in ("C1", "C3")]
    save(folder, EmbeddingCollection(tables, mesh=mesh), {}, peers=mesh.peers)


@pytest.fixture
def alike(ranks, tmp_path):
    ranks.run(save_alike, tmp_path, world_size=2)
    return tmp_path / "manifest.json"


def test_a_flipped_bit_of_a_manifest_is_noticed(alike):
    written, manifest = alike.read_bytes(), read_manifest(alike.parent)
    assert len(manifest.tables["C1"].parts) == 2
    for name in (b"C1.0.values.npy", b"C1.1.values.npy"):
        assert written.count(name) == 2  # of the table, and of its checksums
        alike.write_bytes(written.replace(name, name.replace(b"C1", b"C3"), 1))
        with pytest.raises(CheckpointError, match=r"json is damaged: xxh3_64 is not that of .*restore it from"):
            read_manifest(alike.parent)
    for position in range(len(written)):
        damaged = bytearray(written)
        damaged[position] ^= 1 << position % 7
        with contextlib.suppress(CheckpointError):
            assert Manifest.from_json(damaged.decode(), alike) == manifest


def test_a_file_that_is_named_twice_is_refused(alike):
    values = json.loads(alike.read_text())
    parts = values["tables"]["C1"]["parts"]
    parts[1]["files"]["values"] = parts[0]["files"]["values"]
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged: C1.0.values.npy is named 2 times"):
        Manifest.from_json(sealed(values), alike)


def test_a_manifest_without_a_sum_of_itself_is_damaged(alike):
    values = json.loads(alike.read_text())
    del values["xxh3_64"]
    alike.write_text(json.dumps(values))
    with pytest.raises(DamagedCheckpointError, match=r"json is damaged.*: xxh3_64 is missing, .*; restore it from"):
        read_manifest(alike.parent)

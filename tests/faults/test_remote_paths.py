"""Paths of other machines, which would make a folder named by their scheme here."""

import pytest

from rowmesh import Checkpoints, EmbeddingCollection, TableSpec
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.run.resolve import resolve
from rowmesh.tables import Dynamic

SCHEME = "has the scheme s3://"


@pytest.fixture(autouse=True)
def _nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not [*tmp_path.glob("s3:*")]


def test_checkpoints():
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=5, dim=4)])
    with pytest.raises(ConfigurationError, match=f"folder = 's3://b/r' {SCHEME}"):
        Checkpoints("s3://b/r", {"embeddings": embeddings})


@pytest.mark.parametrize("kind", ["file", "rocksdb"])
def test_stores_of_demoted_records(kind, tmp_path):
    store = f"{kind}:s3://b/r"
    with pytest.raises(ConfigurationError, match=f"the folder of store = {kind}: = 's3://b/r' {SCHEME}"):
        Dynamic(capacity=5, mode="demote", store=store, store_capacity=9)
    (tmp_path / "clicks.toml").write_text('[data]\nfolder = "clicks"\n')
    for key in ("tables", "tables.C1"):
        with pytest.raises(RowmeshError, match=rf"{key}.*store.*{SCHEME}"):
            resolve(tmp_path / "clicks.toml", [f'{key}.dynamic.store="{store}"'])

"""Names of tables and features that no file system takes as they are."""

import pyarrow as pa
import pyarrow.csv
import torch

import rowmesh
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh._support.files.names import MOST_BYTES, file_stem, shortened
from rowmesh.checkpoint.manifest import file_name
from rowmesh.data import Prepared, Schema, prepare
from rowmesh.tables import Dynamic, Uniform

LONG = "ein sehr langer Name, größer als alles andere/" * 40


def test_long_names_are_told_apart():
    names = [LONG, LONG + "a", LONG + "b", "C1", "." + LONG]
    for name in (file_stem, shortened):
        found = [name(each) for each in names]
        assert len(set(found)) == len(names)
        assert all(len(each.encode()) <= MOST_BYTES for each in found)
    assert all(len(file_name(each, 10**6, "demoted_candidate_counts")) <= 250 for each in names)


def test_tables_of_long_names_are_saved(tmp_path):
    tables = [
        TableSpec(name=LONG, num_rows=9, dim=2),
        TableSpec(name=LONG + "b", num_rows=9, dim=2),
        TableSpec(
            name="." + LONG,
            dim=2,
            storage="dynamic",
            initializer=Uniform(bound=0.1),
            dynamic=Dynamic(capacity=4, mode="demote", store=f"file:{tmp_path}/store", store_capacity=9),
        ),
    ]
    batch = SparseBatch.from_bags(
        {table.name: [[1, 2, 3], [4, 5, 6]] for table in tables[:2]} | {tables[2].name: [[7], [8]]}
    )
    embeddings = EmbeddingCollection(tables)
    optimizer = EmbeddingOptimizer(embeddings)
    embeddings(batch).values.sum().backward()
    optimizer.step()
    rowmesh.save(tmp_path / "model", {"embeddings": embeddings})
    with torch.no_grad():
        before = embeddings(batch).values.clone()
    other = EmbeddingCollection(tables, seed=3)
    rowmesh.load(tmp_path / "model", {"embeddings": other})
    with torch.no_grad():
        assert torch.equal(other(batch).values, before)


def test_data_of_long_names_are_prepared(tmp_path):
    columns = {"label": [0, 1, 1], LONG: ["x", "y", "x"], LONG + "b": ["z", "z", "u"]}
    pyarrow.csv.write_csv(pa.table(columns), tmp_path / "clicks.csv")
    schema = Schema(label="label", categorical=(LONG, LONG + "b"))
    prepare({"train": [tmp_path / "clicks.csv"]}, tmp_path / "out", schema, min_count=1)
    data = Prepared.open(tmp_path / "out")
    assert sorted(data.vocabulary(LONG).to_pylist()) == ["x", "y"]
    assert sorted(data.vocabulary(LONG + "b").to_pylist()) == ["u", "z"]

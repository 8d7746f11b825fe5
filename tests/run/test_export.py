"""Exported tables: the rows of the model, by the values of the raw data, in order of frequency."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rowmesh import AdaGrad, EmbeddingCollection, SparseBatch, TableSpec, checkpoint
from rowmesh.cli.__main__ import main
from rowmesh.data import Prepared, ReorderOptions, reorder
from rowmesh.errors import DamagedFileError, RowmeshError
from rowmesh.run import export as export_module
from rowmesh.run.commands import run_training
from rowmesh.run.export import export
from rowmesh.run.fingerprint import fingerprint
from rowmesh.run.resolve import resolve
from rowmesh.tables import TensorTrain
from tests.support.clicks import write_config
from tests.support.cooccurrence import BATCH, draw_batches, prepare_batches


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    prepared = prepare_batches(folder, draw_batches(400))
    return prepared, reorder(prepared, folder / "out", tables=["item"], options=ReorderOptions(batch_size=BATCH))


def make_run(folder, data, embeddings, network=None):
    """A run's folder, as far as an export reads it."""
    folder.mkdir()
    (folder / "config.toml").write_text(f'[data]\nfolder = "{data.folder}"\n[run]\nfolder = "{folder}"\n')
    metadata = {"steps": 1, "data": str(data.folder), "fingerprint": fingerprint(data)}
    checkpoint.save(folder / "model", embeddings, {"network": network or {"weight": torch.ones(2)}}, metadata=metadata)
    return folder


def rows_of(embeddings, name, num_rows, dim):
    """All rows of a table in one tensor."""
    if embeddings.tables[0].storage == "tensor_train":
        return embeddings(SparseBatch.from_bags({name: [[row] for row in range(num_rows)]})).values.detach()
    values = torch.empty(num_rows, dim, dtype=embeddings.tables[0].dtype)
    for part in embeddings.local_rows(name):
        values[part.rows] = part.values
    return values


@pytest.mark.parametrize("is_reordered", [False, True], ids=["by frequency", "reordered"])
@pytest.mark.parametrize(
    ("dtype", "storage"),
    [
        (torch.float32, "dense"),
        (torch.bfloat16, "dense"),
        (torch.float64, "dense"),
        (torch.float32, "tiered"),
        (torch.float32, "tensor_train"),
    ],
    ids=str,
)
def test_vectors_stand_beside_their_values(both, tmp_path, monkeypatch, dtype, storage, is_reordered):
    data, dim = both[is_reordered], 4
    monkeypatch.setattr(export_module, "CHUNK_BYTES", 4 * dim * 250)  # several pieces in and about the span
    num_rows = data.table("item").num_rows
    cores = TensorTrain(rank=4) if storage == "tensor_train" else None
    table = TableSpec(
        name="item", num_rows=num_rows, dim=dim, dtype=dtype, storage=storage, tensor_train=cores, optimizer=AdaGrad()
    )
    embeddings = EmbeddingCollection([table])
    trained = rows_of(embeddings, "item", num_rows, dim)
    run = make_run(tmp_path / "run", data, embeddings)
    (written,) = export(run, tmp_path / "out")
    assert (written.table, written.num_rows, written.dim) == ("item", num_rows, dim)
    file = pq.ParquetFile(tmp_path / "out" / "tables" / "item.parquet")
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    assert max(sizes) * dim * (8 if dtype == torch.float64 else 4) == export_module.CHUNK_BYTES
    found = file.read()
    assert found["id"].to_pylist() == list(range(num_rows))
    counts = found["count"].to_numpy()
    assert (np.diff(counts[:-1]) <= 0).all()
    values, vocabulary = found["value"].to_pylist(), data.vocabulary("item").to_pylist()
    assert values[-1] is None
    assert sorted(values[:-1]) == sorted(vocabulary)
    row_of = {value: row for row, value in enumerate(vocabulary)} | {None: num_rows - 1}
    rows = [row_of[value] for value in values]
    assert (rows != list(range(num_rows))) == is_reordered
    vectors = torch.tensor(found["vector"].to_pylist(), dtype=torch.float64)
    assert torch.equal(vectors, trained[rows].double())
    assert counts.tolist() == np.asarray(data.counts("item"))[rows].tolist()
    assert torch.equal(torch.load(tmp_path / "out" / "network.pt")["weight"], torch.ones(2))


def test_a_run_of_two_ranks_is_exported_by_the_command(config_file, clicks, tmp_path, command, capsys):
    assert command(["train", str(config_file)], ranks=2).status == 0
    run, out = config_file.parent / "run", tmp_path / "out"
    with pytest.raises(SystemExit, match="0"):
        main(["export", str(run), "--out", str(out), "--tables", "C3", "C1"])
    assert "C3" in capsys.readouterr().out
    assert sorted(path.name for path in (out / "tables").iterdir()) == ["C1.parquet", "C3.parquet"]
    table = TableSpec(name="C3", num_rows=clicks.table("C3").num_rows, dim=4)
    vectors = pq.read_table(out / "tables" / "C3.parquet")["vector"].to_pylist()
    manifest = checkpoint.read_manifest(run / "model")
    assert len(manifest.tables["C3"].parts) == 2
    values = np.empty((table.num_rows, 4), np.float32)
    for part in manifest.tables["C3"].parts:
        saved = np.load(run / "model" / manifest.folder / part.files["values"])
        numbers = np.concatenate([r.start + r.stride * np.arange(r.count) for r in part.ranges])
        values[numbers] = saved
    assert np.array_equal(np.array(vectors, np.float32), values)
    assert "weight" in " ".join(torch.load(out / "network.pt"))
    features = [{"name": f"I{number}"} for number in range(1, 14)]
    assert json.loads((out / "dense.json").read_text()) == {"transform": "log1p", "features": features}


def test_mistakes_say_what_fits(config_file, both, tmp_path):
    run_training(resolve(config_file, ["train.epochs=1"]))
    run, out = config_file.parent / "run", tmp_path / "out"
    with pytest.raises(RowmeshError, match=r"is no run: config.toml is missing"):
        export(tmp_path, out)
    with pytest.raises(RowmeshError, match=r"has no table 'C33'; did you mean 'C3'"):
        export(run, out, tables=["C33"])
    with pytest.raises(RowmeshError, match=r"was trained on .* differs from it in .*: rows would stand"):
        export(run, out, data=both[0].folder)
    assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(RowmeshError, match="not empty"):
        export(run, out)
    with pytest.raises(RowmeshError, match="not written by rowmesh"):
        export(run, out, overwrite=True)
    assert (out / "mine").read_text() == "kept"
    export(run, tmp_path / "other")
    export(run, tmp_path / "other", overwrite=True)


def item_table(data):
    """One table for the items of data."""
    return EmbeddingCollection([TableSpec(name="item", num_rows=data.table("item").num_rows, dim=4)])


@pytest.mark.parametrize("given", [False, True])
def test_damaged_data_can_be_read_on_purpose(both, tmp_path, given):
    data = Prepared.open(shutil.copytree(both[0].folder, tmp_path / "data"))
    run, path = make_run(tmp_path / "run", data, item_table(data)), data.folder / "counts" / "item.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    where = data.folder if given else None
    with pytest.raises(DamagedFileError, match=r"item.npy is damaged"):
        export(run, tmp_path / "out", data=where)
    said = []
    export(run, tmp_path / "out", data=where, verify=False, log=said.append)
    assert said == [f"data      {data.folder}: not verified, as asked for"]


def test_data_that_were_moved(both, tmp_path):
    data = Prepared.open(shutil.copytree(both[0].folder, tmp_path / "data"))
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=data.table("item").num_rows, dim=4)])
    run = make_run(tmp_path / "run", data, embeddings)
    moved = data.folder.rename(tmp_path / "moved")
    with pytest.raises(RowmeshError, match=r"holds no prepared data set.*were moved, say where to with --data"):
        export(run, tmp_path / "out")
    assert export(run, tmp_path / "out", data=moved)[0].table == "item"


def test_a_damaged_model_leaves_no_export(config_file, tmp_path):
    run_training(resolve(config_file, ["train.epochs=1"]))
    run, out = config_file.parent / "run", tmp_path / "out"
    manifest = checkpoint.read_manifest(run / "model")
    (run / "model" / manifest.folder / manifest.tables["C2"].parts[0].files["values"]).unlink()
    with pytest.raises(RowmeshError, match=r"table 'C2': .* is missing; the checkpoint is incomplete"):
        export(run, out)
    assert not out.exists()


def make_embeddings(data):
    return EmbeddingCollection([TableSpec(name="item", num_rows=data.table("item").num_rows, dim=4)])


def test_rows_that_are_not_finite_are_refused_and_counted(both, tmp_path):
    data = both[0]
    embeddings = make_embeddings(data)
    (rows,) = embeddings.local_rows("item")
    rows.values[7, 2], rows.values[9] = torch.nan, torch.inf
    run = make_run(tmp_path / "run", data, embeddings)
    with pytest.raises(
        RowmeshError, match=r"table 'item': 2 of .* rows are not finite, the first of them that of id 7"
    ):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_network_that_is_not_finite_is_refused(both, tmp_path):
    run = make_run(tmp_path / "run", both[0], make_embeddings(both[0]), {"weight": torch.tensor([1.0, torch.nan])})
    with pytest.raises(RowmeshError, match=r"the network in .*: 1 numbers of weight are not finite"):
        export(run, tmp_path / "out")


@pytest.mark.parametrize("name", ["item.0.values.npy", "dense.pt"])
def test_a_flipped_bit_is_not_exported(both, tmp_path, name):
    run = make_run(tmp_path / "run", both[0], make_embeddings(both[0]))
    path = next(run.rglob(name))
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)
    with pytest.raises(RowmeshError, match=rf"{name} is damaged: bytes"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if name != "dense.pt":
        assert export(run, tmp_path / "out", verify=False)[0].table == "item"


def test_a_dynamic_table_is_exported_by_what_it_knows(clicks, tmp_path, command):
    path = write_config(tmp_path / "clicks.toml", tmp_path / "run", clicks.folder, "[train]", "steps = 5")
    dynamic = [
        "tables.storage=dynamic",
        "tables.dynamic.capacity=40",
        "tables.C3.dynamic.mode=demote",
        "tables.C3.dynamic.store=memory",
        "tables.initializer.bound=0.1",
        "data.batch_size=16",
    ]
    done = command(["train", str(path), *dynamic], ranks=2)
    assert done.status == 0, done.err
    done = command(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")], ranks=1)
    assert done.status == 0, done.err
    found = pq.read_table(tmp_path / "out" / "tables" / "C1.parquet")
    vocabulary = clicks.vocabulary("C1").to_pylist()
    assert 20 < found.num_rows <= 40
    assert found["count"].to_numpy().min() >= 1
    for i, value in zip(found["id"].to_pylist(), found["value"].to_pylist(), strict=True):
        assert value == (vocabulary[i] if i < len(vocabulary) else None)
    demoting = pq.read_table(tmp_path / "out" / "tables" / "C3.parquet")
    assert demoting.num_rows == len(set(demoting["id"].to_pylist())) > 40
    assert demoting["count"].to_numpy().min() >= 1

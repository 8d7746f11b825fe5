"""Reordering: the same data under other row numbers, of which batches read fewer prefixes."""

import errno
import fcntl
import shutil

import numpy as np
import pyarrow as pa
import pytest

from rowmesh._support.files.manifest import Manifest
from rowmesh.data import Loader, Prepared, ReorderOptions, reorder
from rowmesh.data.reorder import order as order_module
from rowmesh.data.reorder.groups import count_prefixes
from rowmesh.data.writer import SplitWriter
from rowmesh.errors import ConfigurationError, DataError, RowmeshError
from tests.support.cooccurrence import BATCH, draw_batches, prepare_batches

OPTIONS = ReorderOptions(batch_size=BATCH, max_edges=200_000)
ALL_HOT = ReorderOptions(hot_share=1, batch_size=BATCH)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reorder")
    return prepare_batches(folder, draw_batches(600), held_out=draw_batches(40, seed=1))


@pytest.fixture(scope="module")
def reordered(prepared, tmp_path_factory):
    return reorder(prepared, tmp_path_factory.mktemp("out") / "reordered", min_rows=1000, options=OPTIONS)


def columns(data, split):
    with pa.memory_map(str(data.split_path(split))) as file:
        return pa.ipc.open_file(file).read_all()


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_row_numbers_change(prepared, reordered):
    bijection = reordered.bijection("item")
    assert len(bijection.span) > 1000
    for split in ("train", "validation"):
        before, after = columns(prepared, split), columns(reordered, split)
        assert before.schema == after.schema
        assert before.drop_columns(["item"]).equals(after.drop_columns(["item"]))
        ranks, rows = (table["item"].to_numpy() for table in (before, after))
        assert (bijection.rows(ranks) == rows).all()
        assert (bijection.ranks(rows) == ranks).all()
        values = [np.array([*data.vocabulary("item").to_pylist(), "rare"]) for data in (prepared, reordered)]
        assert (values[0][ranks] == values[1][rows]).all()
    every = np.arange(prepared.table("item").num_rows)
    assert (reordered.counts("item")[bijection.rows(every)] == prepared.counts("item")).all()
    assert reordered.splits == prepared.splits
    assert reordered.tables == prepared.tables
    assert (reordered.schema, reordered.sources) == (prepared.schema, prepared.sources)


def test_hot_and_rare_rows_stay(prepared, reordered):
    rows, table = reordered.unordered_rows("item"), reordered.table("item")
    assert rows.start == int(0.01 * table.num_rows)
    assert rows.stop == table.rare_row
    assert (np.diff(reordered.counts("item")[: rows.start]) <= 0).all()
    assert not reordered.unordered_rows("other")
    assert reordered.bijection("other").rows(np.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_batches_that_were_not_seen_read_fewer_prefixes(prepared, reordered):
    facts = reordered.reordering["tables"]["item"]
    ranks, rows = (columns(data, "validation")["item"].to_numpy().reshape(-1, BATCH) for data in (prepared, reordered))
    before, after = (count_prefixes(list(batches), facts["prefix_rows"]).mean() for batches in (ranks, rows))
    assert after < 0.75 * before
    assert facts["prefixes_before"] == pytest.approx(before, rel=0.1)
    assert facts["prefixes_after"] == pytest.approx(after, rel=0.1)
    assert facts["held_out_batches"] == 60


def test_without_co_occurrence_the_order_stays(tmp_path):
    ids = np.random.default_rng(0).zipf(1.3, (300, BATCH)) % 5000
    prepared = prepare_batches(tmp_path, ids)
    reordered = reorder(prepared, tmp_path / "out", tables=["item"], options=OPTIONS)
    facts = reordered.reordering["tables"]["item"]
    assert facts["prefixes_after"] == facts["prefixes_before"] > 0
    assert facts["num_edges"] > 0
    assert columns(prepared, "train").equals(columns(reordered, "train"))


def test_a_gain_that_is_too_small_is_none(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(order_module, "LEAST_GAIN", 0.9)
    facts = reorder(prepared, tmp_path / "out", tables=["item"], options=OPTIONS).reordering["tables"]["item"]
    assert (facts["num_ids"], facts["communities"]) == (0, 0)
    assert facts["num_edges"] > 0


def test_too_few_batches_to_judge(prepared, tmp_path):
    few = prepare_batches(tmp_path / "few", draw_batches(39))
    for data, options, held_out in ((prepared, ReorderOptions(batch_size=4096), 3), (few, OPTIONS, 3)):
        kept = reorder(data, tmp_path / f"kept{options.batch_size}", tables=["item"], options=options)
        assert kept.reordering["tables"]["item"]["held_out_batches"] == held_out
        assert not kept.unordered_rows("item")


def test_bags(tmp_path):
    prepared = prepare_batches(tmp_path, draw_batches(600), bags=True)
    reordered = reorder(prepared, tmp_path / "out", tables=["item", "item"], options=OPTIONS)
    before, after = columns(prepared, "train")["item"], columns(reordered, "train")["item"]
    assert before.type == after.type
    assert pa.compute.list_value_length(after).equals(pa.compute.list_value_length(before))
    bijection = reordered.bijection("item")
    assert len(bijection.span)
    ranks, rows = (np.concatenate([chunk.flatten() for chunk in column.chunks]) for column in (before, after))
    assert (bijection.rows(ranks) == rows).all()


def test_the_same_every_time(prepared, reordered, tmp_path):
    again = reorder(prepared, tmp_path / "again", min_rows=1000, options=OPTIONS)
    assert (again.bijection("item").row_of_rank == reordered.bijection("item").row_of_rank).all()


def test_loader_reads_it(prepared, reordered):
    pairs = zip(Loader(prepared, "train", batch_size=100), Loader(reordered, "train", batch_size=100), strict=True)
    for before, after in pairs:
        first, stop = before.sparse.feature_range(0)
        assert (
            reordered.bijection("item").ranks(after.sparse.ids[first:stop].numpy())
            == before.sparse.ids[first:stop].numpy()
        ).all()


def test_max_ids(prepared, tmp_path):
    options = ReorderOptions(batch_size=BATCH, max_ids=900, hot_share=0.05)
    reordered = reorder(prepared, tmp_path / "out", tables=["item"], options=options)
    rows = reordered.unordered_rows("item")
    assert len(rows) == 900
    assert (np.diff(reordered.counts("item")[rows.stop : -1]) <= 0).all()


def test_in_place(prepared, reordered, tmp_path):
    own = prepare_batches(tmp_path, draw_batches(600), held_out=draw_batches(40, seed=1))
    with pytest.raises(RowmeshError, match="--overwrite"):
        reorder(own, own.folder, tables=["item"], options=OPTIONS)
    result = reorder(own, own.folder, tables=["item"], options=OPTIONS, overwrite=True)
    assert columns(result, "train").equals(columns(reordered, "train"))
    with pytest.raises(DataError, match=r"is reordered already \(tables item\)"):
        reorder(result, tmp_path / "twice")


def test_manifest_says_how(prepared, reordered):
    manifest = Manifest.read(reordered.folder)
    assert manifest.kind == "prepared data"
    assert manifest.request["reordered"]["data"] == Manifest.read(prepared.folder).request
    assert manifest.request["reordered"]["tables"] == ["item"]
    assert manifest.request["reordered"]["options"]["max_edges"] == 200_000
    assert "bijection/item.npy" in manifest.files
    assert Prepared.open(reordered.folder) == reordered


def test_quarantine_is_kept(tmp_path):
    prepared = prepare_batches(tmp_path, draw_batches(9))
    (prepared.folder / "quarantine.jsonl").write_text("{}\n")
    out = reorder(prepared, tmp_path / "out", tables=["item"], options=OPTIONS).folder
    assert (out / "quarantine.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"tables": ["itm"]}, DataError, "no feature 'itm'.*did you mean 'item'"),
        ({}, ConfigurationError, "no table of .* has 10,000 rows, the largest .item. has"),
    ],
)
def test_tables_that_are_not_there(prepared, tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        reorder(prepared, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_data_that_cannot_be_reordered(prepared, tmp_path):
    with pytest.raises(DataError, match="holds no prepared data set"):
        reorder(tmp_path, tmp_path / "out")
    own = prepare_batches(tmp_path, draw_batches(9), held_out=draw_batches(9))
    del own.splits["train"]
    with pytest.raises(DataError, match="has no split 'train', only: validation"):
        reorder(own, tmp_path / "out", tables=["item"])
    other = prepare_batches(tmp_path / "other", draw_batches(9)).folder
    (other / "manifest.json").unlink()
    with pytest.raises(DataError, match="has no manifest"):
        reorder(Prepared.open(other, verify=False), tmp_path / "out", tables=["item"])


def test_a_folder_in_use(prepared, tmp_path):
    with (tmp_path / ".out.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RowmeshError, match="is being written by another process"):
            reorder(prepared, tmp_path / "out", tables=["item"], options=OPTIONS)


def test_a_full_disk_leaves_the_data_as_they_were(tmp_path, monkeypatch):
    own = prepare_batches(tmp_path, draw_batches(100))
    before = snapshot(own.folder)

    def full(self, columns):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(SplitWriter, "write", full)
    with pytest.raises(RowmeshError, match=r"no space left while writing .*nothing was changed"):
        reorder(own, own.folder, tables=["item"], options=OPTIONS, overwrite=True)
    assert snapshot(own.folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prepared", "train.parquet"]


def test_a_bijection_of_another_table_is_noticed(reordered, tmp_path):
    shutil.copytree(reordered.folder, tmp_path / "copy")
    copy = Prepared.open(tmp_path / "copy")
    path = copy.folder / "bijection" / "item.npy"
    np.save(path, np.load(path)[:-1])
    with pytest.raises(DataError, match=r"item\.npy has .* bytes where .* were written"):
        copy.bijection("item")
    with pytest.raises(DataError, match=r"item\.npy: holds int32 of shape"):
        Prepared.open(tmp_path / "copy", verify=False).bijection("item")
    np.save(path, np.load(reordered.folder / "bijection" / "item.npy") * 0)
    with pytest.raises(DataError, match=r"item\.npy: no bijection.*reorder the data again"):
        Prepared.open(tmp_path / "copy", verify=False).bijection("item")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"hot_share": 1.5}, "hot_share must be 0 to 1, got 1.5"),
        ({"batch_size": 1}, "batch_size must be 2 or more"),
        ({"max_ids": 0}, "max_ids and max_edges must be 1 or more, got 0 and 10000000"),
        ({"seed": -1}, "prefix_rows and seed must be 0 or more"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(ConfigurationError, match=message):
        ReorderOptions(**options)


def test_everything_hot(prepared, tmp_path):
    reordered = reorder(prepared, tmp_path / "out", tables=["item"], options=ALL_HOT)
    assert not reordered.unordered_rows("item")
    assert columns(prepared, "train").equals(columns(reordered, "train"))

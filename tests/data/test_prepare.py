"""Preparation: ids become frequency ranks; the output is whole or absent, and always the same."""

import errno
import gzip
import json
from collections import Counter
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmesh.data import Loader, Prepared, Schema, Splitter, prepare
from rowmesh.data.codes import Ranking
from rowmesh.data.schema import AVAZU, CRITEO
from rowmesh.data.writer import SplitWriter
from rowmesh.errors import ConfigurationError, DataError, RowmeshError

SCHEMA = Schema(label="y", dense=("x",), dense_transform="none", categorical=("a", "b"))
TAGS = Schema(label="y", categorical=("a", {"name": "tags", "separator": "|"}))


def write(path, rows, header="y,x,a,b"):
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def read_split(prepared, split):
    """label, dense values and the original ids (None where rare) of every sample."""
    with pa.memory_map(str(prepared.split_path(split))) as file:
        table = pa.ipc.open_file(file).read_all()
    rows = table.to_pydict()
    for entry in prepared.tables:
        values = [*prepared.vocabulary(entry.name).to_pylist(), "<rare>"]
        look_up = (lambda ids, v=values: [v[i] for i in ids]) if entry.multi_hot else values.__getitem__
        rows[entry.name] = [look_up(row) for row in rows[entry.name]]
    return rows


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_ids_become_frequency_ranks(tmp_path):
    rows = ["1,1,p,u", "0,2,q,u", "1,3,q,v", "0,4,r,", "1,5,,w", "0,6,q,"]
    train = write(tmp_path / "train.csv", rows)
    test = write(tmp_path / "test.csv", ["1,7,r,v", "0,8,new,", "1,9,,u"])
    prepared = prepare({"train": [train], "test": [test]}, tmp_path / "out", SCHEMA)
    a, b = prepared.tables
    assert (a.num_rows, b.num_rows) == (2, 3)
    assert prepared.vocabulary("a").to_pylist() == ["q"]
    assert prepared.counts("a").tolist() == [3, 3]
    assert prepared.vocabulary("b").to_pylist() == ["u", None]  # a tie: u came first; missing is a value
    assert prepared.counts("b").tolist() == [2, 2, 2]
    assert read_split(prepared, "train") == {
        "y": [1, 0, 1, 0, 1, 0],
        "x": [1, 2, 3, 4, 5, 6],
        "a": ["<rare>", "q", "q", "<rare>", "<rare>", "q"],
        "b": ["u", "u", "<rare>", None, "<rare>", None],
    }
    assert read_split(prepared, "test")["b"] == ["<rare>", None, "u"]
    assert a.rare_share == {"train": 0.5, "test": 1.0}
    assert prepared.splits["test"].positive_rate == 2 / 3
    assert names(tmp_path / "out") == [
        "counts",
        "manifest.json",
        "metadata.json",
        "test.arrow",
        "train.arrow",
        "vocabulary",
    ]


@hypothesis.given(
    ids=st.lists(st.integers(0, 12), min_size=1, max_size=80),
    held_out=st.lists(st.integers(0, 20), max_size=10),
    min_count=st.integers(1, 4),
)
@hypothesis.settings(deadline=None, max_examples=25)
def test_law_of_ranks(tmp_path_factory, ids, held_out, min_count):
    folder = tmp_path_factory.mktemp("ranks")
    schema = Schema(format="parquet", label="y", categorical=("a",))
    for name, values in (("train", ids), ("test", held_out)):
        pq.write_table(
            pa.table({"y": pa.array([0] * len(values), pa.int8()), "a": pa.array(values, pa.int64())}),
            folder / name,
        )
    files = {"train": [folder / "train"], "test": [folder / "test"]} if held_out else {"train": [folder / "train"]}
    prepared = prepare(files, folder / "out", schema, min_count=min_count)
    counts, expected = prepared.counts("a"), Counter(ids)
    kept = prepared.vocabulary("a").to_pylist()
    assert (np.diff(counts[:-1]) <= 0).all()
    assert counts.sum() == len(ids)
    assert counts[:-1].tolist() == [expected[value] for value in kept]
    assert set(kept) == {value for value, count in expected.items() if count >= min_count}
    for split, values in (("train", ids), ("test", held_out)):
        if values:
            assert read_split(prepared, split)["a"] == [v if v in kept else "<rare>" for v in values]


def test_ranking_never_gives_a_row_to_what_training_has_not_seen():
    ranking = Ranking.from_counts(np.array([0, 2, 0]), min_count=1)
    assert ranking.row_of_code.tolist() == [1, 0, 1]
    assert ranking.counts.tolist() == [2, 0]


def test_multi_hot(tmp_path):
    train = write(tmp_path / "t.csv", ["1,p,u|v", "0,p,", "1,q,v", "0,q,v||u"], "y,a,tags")
    prepared = prepare({"train": [train]}, tmp_path / "out", TAGS)
    assert prepared.table("tags").multi_hot
    assert not prepared.table("a").multi_hot
    assert read_split(prepared, "train")["tags"] == [["u", "v"], [], ["v"], ["v", "<rare>", "u"]]
    batch = next(iter(Loader(prepared, "train", batch_size=4)))
    assert batch.sparse.ids.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 2, 1]


def test_lists_and_single_ids_are_not_mixed(tmp_path):
    schema = Schema(format="parquet", label="y", categorical=("a",))
    pq.write_table(pa.table({"y": [1], "a": [1]}), tmp_path / "one")
    pq.write_table(pa.table({"y": [1], "a": [[1]]}), tmp_path / "list")
    with pytest.raises(DataError, match=r"list: column 'a' holds lists, in .*one it holds single ids"):
        prepare({"train": [tmp_path / "one", tmp_path / "list"]}, tmp_path / "out", schema)


@pytest.mark.parametrize("how", ["order", "random"])
def test_splits_are_cut_and_all_samples_kept(tmp_path, how):
    rows = [f"{i % 2},{i},v{i % 5},w" for i in range(1000)]
    files = {"train": [write(tmp_path / "a.csv", rows[:300]), write(tmp_path / "b.csv", rows[300:])]}
    splitter = Splitter(validation=0.1, test=0.2, how=how)
    prepared = prepare(files, tmp_path / "out", SCHEMA, splitter=splitter, block_samples=64)
    numbers = {split: [int(x) for x in read_split(prepared, split)["x"]] for split in prepared.splits}
    assert sorted(sum(numbers.values(), [])) == list(range(1000))  # noqa: RUF017
    assert all(part == sorted(part) for part in numbers.values())
    assert {split: entry.samples for split, entry in prepared.splits.items()} == {
        split: len(part) for split, part in numbers.items()
    }
    if how == "order":
        assert numbers["validation"] == list(range(700, 800))
        assert numbers["test"] == list(range(800, 1000))
    assert prepared.counts("b").tolist() == [len(numbers["train"]), 0]


@pytest.mark.parametrize(
    ("splitter", "split"),
    [
        (Splitter(validation=0.45, test=0.45), "train"),
        (Splitter(validation=0.1, test=0.4), "validation"),
        (Splitter(validation=0.4, test=0.1), "test"),
        (Splitter(validation=0.5, test=0.49, how="random"), "train"),
    ],
)
def test_a_cut_that_leaves_a_split_empty_is_refused(tmp_path, splitter, split):
    rows = write(tmp_path / "t.csv", ["1,1,p,u", "0,1,p,u"])
    with pytest.raises(
        DataError,
        match=f"the {split} split would be empty: 2 usable rows.*--{split if split != 'train' else 'validation'}-share",
    ):
        prepare({"train": [rows]}, tmp_path / "out", SCHEMA, splitter=splitter)
    assert names(tmp_path) == ["t.csv"]


def test_the_optimum_of_other_samples_is_not_recorded(tmp_path):
    """A cut split, and one with a bad row, are not the samples whose best scores are known."""
    rows = write(tmp_path / "t.csv", ["1,1,p,u", "0,1,p,u"] * 10)
    known = {"train": {"auc": 0.8, "log_loss": 0.4, "samples": 20}}
    whole = prepare({"train": [rows]}, tmp_path / "whole", SCHEMA, optimum=known)
    assert whole.splits["train"].optimum == known["train"]
    cut = prepare({"train": [rows]}, tmp_path / "cut", SCHEMA, optimum=known, splitter=Splitter())
    assert [split.optimum for split in cut.splits.values()] == [None, None, None]
    with rows.open("a") as file:
        file.write("5,1,p,u\n")
    fewer = prepare({"train": [rows]}, tmp_path / "fewer", SCHEMA, optimum={"train": known["train"] | {"samples": 21}})
    assert fewer.splits["train"].optimum is None


def test_equal_input_gives_equal_files(tmp_path):
    train = write(tmp_path / "t.csv", [f"{i % 2},{i},v{i % 7},w{i % 11}" for i in range(500)])
    splitter = Splitter(how="random", seed=1)
    folders = [prepare({"train": [train]}, tmp_path / n, SCHEMA, splitter=splitter).folder for n in "ab"]
    files = [sorted(path for path in folder.rglob("*") if path.is_file()) for folder in folders]
    assert len(files[0]) == 9
    for one, other in zip(*files, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_counts_of_every_table_are_memory_mapped(tmp_path):
    train = write(tmp_path / "t.csv", [f"1,1,v{i % 7},w{i % 3}" for i in range(70)])
    prepare({"train": [train]}, tmp_path / "out", SCHEMA)
    prepared = Prepared.open(tmp_path / "out")
    counts = {table.name: prepared.counts(table.name) for table in prepared.tables}
    assert {name: values.tolist() for name, values in counts.items()} == {"a": [10] * 7 + [0], "b": [24, 23, 23, 0]}
    for table in prepared.tables:
        assert isinstance(counts[table.name], np.memmap)
        assert (counts[table.name].dtype, counts[table.name].shape) == (np.int64, (table.num_rows,))
        assert not counts[table.name].flags.writeable


def test_bad_rows_are_kept_and_counted(tmp_path):
    train = write(tmp_path / "t.csv", ["1,1,p,u", "1,x,p,u", "0,2,p,u", "3,2,p,u"])
    prepared = prepare({"train": [train]}, tmp_path / "out", SCHEMA)
    assert prepared.bad_rows == 2
    assert prepared.splits["train"].samples == 2
    kept = [json.loads(line) for line in (prepared.folder / "quarantine.jsonl").read_text().splitlines()]
    assert [(row["line"], row["row"]) for row in kept] == [(3, "1,x,p,u"), (5, "3,2,p,u")]


def test_too_many_bad_rows_leave_nothing_but_the_quarantine(tmp_path):
    train = write(tmp_path / "t.csv", ["1,1,p,u", "1,x,p,u", "0,2,p,u", "3,2,p,u"])
    with pytest.raises(DataError, match=r"2 bad rows, more than the 1 allowed(.|\n)*t\.csv:3:(.|\n)*out\.quarantine"):
        prepare({"train": [train]}, tmp_path / "out", SCHEMA, max_bad_rows=1)
    assert names(tmp_path) == ["out.quarantine.jsonl", "t.csv"]
    assert len((tmp_path / "out.quarantine.jsonl").read_text().splitlines()) == 2
    prepare({"train": [train]}, tmp_path / "out", SCHEMA)
    assert names(tmp_path) == ["out", "t.csv"]


@pytest.mark.parametrize("step", range(1, 4))
def test_a_full_disk_leaves_the_old_state(tmp_path, monkeypatch, step):
    """The disk is full while codes, the first split or a later one is written."""
    train = write(tmp_path / "t.csv", ["1,1,p,u"] * 100)
    prepare({"train": [train]}, tmp_path / "out", SCHEMA)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    calls = iter(range(1, 100))
    real = SplitWriter.close

    def close(self):
        if next(calls) == step:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self)

    monkeypatch.setattr(SplitWriter, "close", close)
    with pytest.raises(RowmeshError, match="no space left while writing"):
        prepare({"train": [train]}, tmp_path / "out", SCHEMA, splitter=Splitter(), overwrite=True)
    assert names(tmp_path) == ["out", "t.csv"]
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_a_really_full_disk_keeps_its_error_number():
    """What Arrow raises when the file below it cannot take more, tried on a device that is always full."""
    writer = SplitWriter(Path("/dev/full"), pa.schema([("a", pa.int32())]), 8)
    with pytest.raises(OSError, match="No space left") as error:
        writer.write([pa.array(np.arange(1_000_000, dtype=np.int32))])
    writer.abandon()
    assert error.value.errno == errno.ENOSPC


def test_output_in_use_is_refused(tmp_path):
    train = write(tmp_path / "t.csv", ["1,1,p,u"])
    prepare({"train": [train]}, tmp_path / "out", SCHEMA)
    with pytest.raises(RowmeshError, match="not empty"):
        prepare({"train": [train]}, tmp_path / "out", SCHEMA)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"files": {}}, ConfigurationError, "no training files"),
        ({"files": {"train": ["t.csv"], "dev": ["t.csv"]}}, ConfigurationError, "unknown splits ['dev']"),
        ({"files": {"train": ["gone.csv"]}}, DataError, "gone.csv: no such file"),
        ({"min_count": 0}, ConfigurationError, "min_count must be 1 or more"),
        ({"max_bad_rows": -1}, ConfigurationError, "max_bad_rows must be 0 or more"),
        (
            {"files": {"train": ["t.csv"], "test": ["t.csv"]}, "splitter": Splitter()},
            ConfigurationError,
            "either files for the other splits or shares",
        ),
        ({"files": {"train": ["empty.csv"]}}, DataError, "no usable rows in"),
        ({"files": {"train": ["header.csv"]}}, DataError, "no usable rows in"),
    ],
)
def test_mistakes(tmp_path, arguments, kind, message):
    write(tmp_path / "t.csv", ["1,1,p,u"])
    write(tmp_path / "header.csv", [])
    (tmp_path / "empty.csv").touch()
    files = {
        split: [tmp_path / path for path in paths]
        for split, paths in arguments.pop("files", {"train": ["t.csv"]}).items()
    }
    with pytest.raises(kind) as error:
        prepare(files, tmp_path / "out", SCHEMA, **arguments)
    assert message in str(error.value)
    assert names(tmp_path) == ["empty.csv", "header.csv", "t.csv"]


def test_files_of_bad_rows_only_say_what_is_bad(tmp_path):
    train = write(tmp_path / "t.csv", ["1,x,p,u", "2,1,p,u"])
    with pytest.raises(DataError, match=r"no usable rows in .*t\.csv; 2 bad rows, the first:\n  .*t\.csv:2: x is 'x'"):
        prepare({"train": [train]}, tmp_path / "out", SCHEMA)


def test_metadata_of_another_format_is_refused(tmp_path):
    train = write(tmp_path / "t.csv", ["1,1,p,u"])
    prepare({"train": [train]}, tmp_path / "out", SCHEMA)
    path = tmp_path / "out" / "metadata.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 99'))
    with pytest.raises(DataError, match="prepared in format 99"):
        Prepared.open(tmp_path / "out")
    path.write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        Prepared.open(tmp_path / "out")


def test_a_damaged_split_is_named(tmp_path):
    train = write(tmp_path / "t.csv", ["1,1,p,u"])
    prepared = prepare({"train": [train]}, tmp_path / "out", SCHEMA)
    path = prepared.split_path("train")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"train\.arrow had .* when it was opened.*prepare the data again"):
        Loader(prepared, "train", batch_size=1)
    with pytest.raises(DataError, match=r"train\.arrow has .* bytes where .* were written.*prepare the data again"):
        Prepared.open(prepared.folder)
    with pytest.raises(DataError, match=r"train\.arrow: cannot be read as Arrow.*prepare the data again"):
        Loader(Prepared.open(prepared.folder, verify=False), "train", batch_size=1)
    path.unlink()
    with pytest.raises(DataError, match=r"train\.arrow is missing"):
        Loader(Prepared.open(prepared.folder), "train", batch_size=1)


def test_unknown_feature_and_split(tmp_path):
    train = write(tmp_path / "t.csv", ["1,1,p,u"])
    prepared = prepare({"train": [train]}, tmp_path / "out", SCHEMA)
    with pytest.raises(DataError, match="no feature 'aa'; did you mean 'a'"):
        prepared.table("aa")
    with pytest.raises(DataError, match="no split 'test', only: train"):
        prepared.split_path("test")


def test_real_criteo_comes_back(real_data, tmp_path):
    folder = real_data / "criteo_kaggle"
    files = {
        split: [folder / f"{name}.tsv.gz"]
        for split, name in (("train", "train"), ("validation", "dev"), ("test", "test"))
    }
    prepared = prepare(files, tmp_path / "out", CRITEO)
    assert {n: s.samples for n, s in prepared.splits.items()} == {"train": 7200, "validation": 409, "test": 391}
    assert abs(prepared.splits["train"].positive_rate - 0.215) < 0.005
    for split, paths in files.items():
        with gzip.open(paths[0], "rt") as file:
            rows = [line.rstrip("\n").split("\t") for line in file]
        decoded = read_split(prepared, split)
        for i, name in enumerate(prepared.features):
            kept = set(prepared.vocabulary(name).to_pylist())
            original = [row[14 + i] or None for row in rows]
            assert decoded[name] == [value if value in kept else "<rare>" for value in original]


def test_real_avazu(real_data, tmp_path):
    files = {"train": [real_data / "avazu" / "train.csv.gz"]}
    prepared = prepare(files, tmp_path / "out", AVAZU, splitter=Splitter())
    assert sum(split.samples for split in prepared.splits.values()) == 8087
    assert prepared.vocabulary("weekday").to_pylist() == [1]
    batch = next(iter(Loader(prepared, "test", batch_size=100)))
    assert batch.dense.shape == (100, 0)
    assert batch.sparse.num_features == 23


@pytest.mark.parametrize("key", ["time", "score"])
def test_a_schema_with_what_only_raw_data_have_is_refused(tmp_path, key):
    schema = Schema.model_validate({"label": "y", "categorical": ("a",), key: "when"})
    with pytest.raises(ConfigurationError, match=rf"of {key}s, 'when', and prepared data have none; leave {key}"):
        prepare({"train": [write(tmp_path / "rows.csv", ["1,u,5"], "y,a,when")]}, tmp_path / "out", schema)

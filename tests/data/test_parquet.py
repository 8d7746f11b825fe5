"""Parquet columns: what they may hold, and that all files of a data set agree on it."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmesh.data import Prepared, Schema, prepare
from rowmesh.data.parquet import KnownForms, multi_hot_columns, read_parquet
from rowmesh.data.quarantine import NoBadRows, Quarantine
from rowmesh.data.raw import FileSource, RawLoader
from rowmesh.errors import ConfigurationError, DataError

SCHEMA = Schema(format="parquet", label="y", categorical=("a",))


@pytest.fixture
def write(tmp_path):
    """Files with a column `a` of the given arrays, named one.parquet, two.parquet, …"""

    def write(*arrays):
        paths = [tmp_path / f"{name}.parquet" for name, _ in zip(("one", "two", "three"), arrays, strict=False)]
        for path, array in zip(paths, arrays, strict=True):
            pq.write_table(pa.table({"y": pa.array([i % 2 for i in range(len(array))], pa.int8()), "a": array}), path)
        return paths

    return write


INTEGERS, TEXT = pa.array([7, 8]), pa.array(["p", "q"])
LISTS, TEXTS, NULLS = pa.array([[7], [8, 9]]), pa.array([["p"], ["q"]]), pa.nulls(2)
EMPTY = pa.array([[], None], pa.list_(pa.null()))


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ([INTEGERS, NULLS], False),
        ([NULLS, NULLS], False),
        ([NULLS, LISTS], True),
        ([EMPTY, TEXTS, NULLS], True),
        ([INTEGERS, pa.array([True, False])], False),
    ],
)
def test_files_agree_on_lists(write, arrays, expected):
    assert multi_hot_columns(write(*arrays), SCHEMA) == (expected,)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([INTEGERS, TEXT], "column 'a' holds text, in .*one.parquet it holds integers"),
        ([LISTS, INTEGERS], "column 'a' holds single ids, in .*one.parquet it holds lists"),
        ([TEXTS, LISTS], "column 'a' holds integers, in .*one.parquet it holds text"),
        ([NULLS, LISTS, TEXTS], r"three\.parquet: column 'a' holds text, in .*two.parquet it holds integers"),
    ],
)
def test_files_that_disagree_are_named_before_anything_is_read(write, arrays, message):
    with pytest.raises(DataError, match=message):
        multi_hot_columns(write(*arrays), SCHEMA)


@pytest.mark.parametrize("nulls_first", [False, True])
@pytest.mark.parametrize(("ids", "values"), [(INTEGERS, [7, 8, None]), (TEXT, ["p", "q", None])])
def test_a_shard_without_a_value_prepares(write, tmp_path, ids, values, nulls_first):
    paths = write(NULLS, ids) if nulls_first else write(ids, NULLS)
    prepared = prepare({"train": paths}, tmp_path / "out", SCHEMA, min_count=1)
    assert prepared.vocabulary("a").to_pylist() == [None, *values[:2]]
    assert prepared.counts("a").tolist() == [2, 1, 1, 0]


def test_a_shard_without_a_list_holds_empty_bags(write, tmp_path):
    prepared = prepare({"train": write(NULLS, EMPTY, LISTS)}, tmp_path / "out", SCHEMA, min_count=1)
    assert prepared.table("a").multi_hot
    assert prepared.vocabulary("a").to_pylist() == [7, 8, 9]
    with pa.memory_map(str(prepared.split_path("train"))) as file:
        assert pa.ipc.open_file(file).read_all().column("a").to_pylist() == [[], [], [], [], [0], [1, 2]]


def test_lists_of_booleans_and_large_unsigned_ids_prepare(write, tmp_path):
    for number, (ids, values) in enumerate(
        [
            (pa.array([[True], [True, False]]), [1, 0]),
            (pa.array([2**63 + 1, 5], pa.uint64()), [2**63 + 1, 5]),
            (pa.array([[2**63 + 1], [5]], pa.list_(pa.uint64())), [2**63 + 1, 5]),
        ]
    ):
        out = tmp_path / str(number)
        prepare({"train": write(ids)}, out, SCHEMA, min_count=1)
        assert Prepared.open(out).vocabulary("a").to_pylist() == values


def test_ids_below_0_and_past_63_bits_in_one_column_name_the_file(write, tmp_path):
    paths = write(pa.array([-1, 1]), pa.array([2**63, 1], pa.uint64()))
    with pytest.raises(DataError, match=r"two\.parquet: column 'a' holds ids below 0"):
        prepare({"train": paths}, tmp_path / "out", SCHEMA)
    assert not (tmp_path / "out").exists()


def test_a_separator_needs_text(write):
    schema = Schema(format="parquet", label="y", categorical=({"name": "a", "separator": "|"},))
    assert multi_hot_columns(write(TEXT), schema) == (True,)
    for array in (INTEGERS, LISTS):
        with pytest.raises(DataError, match="'a' has a separator but is of type"):
            multi_hot_columns(write(array), schema)


NO_UTF8 = pa.Array.from_buffers(pa.string(), 2, pa.array([b"p", b"caf\xe9"], pa.binary()).buffers())


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        (NO_UTF8, "caf\\xe9"),
        (pa.ListArray.from_arrays([0, 0, 2], NO_UTF8), ["p", "caf\\xe9"]),
        (NO_UTF8.dictionary_encode(), "caf\\xe9"),
        (pa.array([b"p", b"q"]), "q"),
        (pa.array([1, 2], pa.timestamp("ns")), "1970-01-01 00:00:00.000000002"),
        (pa.array([1, 2], pa.timestamp("ns", "Mars/Olympus_Mons")), "2 (timestamp[ns, tz=Mars/Olympus_Mons])"),
        (pa.array([1, 2**31 - 1], pa.date32()), "<value out of range: 2147483647>"),
    ],
)
def test_bad_rows_beside_values_that_python_has_no_form_of_are_kept(tmp_path, ids, shown):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"y": [1, None], "k": pa.array([5, 6]), "a": ids}), path)
    with Quarantine(tmp_path / "bad.jsonl", 1, tmp_path / "kept.jsonl") as bad:
        for table in read_parquet(path, SCHEMA):
            bad.add(path, 2, "", table.text(1))
    assert json.loads(json.loads((tmp_path / "bad.jsonl").read_text())["row"]) == {"y": None, "a": shown}


def test_a_bad_value_that_is_no_utf8_is_named(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"y": NO_UTF8, "a": TEXT}), path)
    with pytest.raises(DataError, match=r"y is 'caf\\\\xe9', not a number"):
        prepare({"train": [path]}, tmp_path / "out", SCHEMA, max_bad_rows=1)


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_a_file_whose_name_is_no_utf8_prepares(tmp_path, kind):
    """Its bad row is kept under that name."""
    path = tmp_path / os.fsdecode(b"caf\xe9")
    if kind == "text":
        path.write_text("y,a\n1,p\n5,q\n")
    else:
        with path.open("wb") as file:
            pq.write_table(pa.table({"y": [1, 5], "a": TEXT}), file)
    prepared = prepare({"train": [path]}, tmp_path / "out", SCHEMA.model_copy(update={"format": kind}))
    assert prepared.bad_rows == 1
    record = json.loads((prepared.folder / "quarantine.jsonl").read_text())
    assert record["file"] == str(path)


@pytest.mark.parametrize("column", ["x", "y"])
def test_missing_values_of_text_that_holds_numbers(tmp_path, column):
    """Null, as "", is a missing dense value; a label must be there."""
    path = tmp_path / "t.parquet"
    values = {"x": pa.array(["1.5", None, "", "2"]), "y": pa.array(["1", "0", "1", "0"]), "a": [1, 1, 2, 2]}
    if column == "y":
        values = {"x": pa.array([1.0] * 4), "y": pa.array(["1", None, "", "0"]), "a": [1, 1, 2, 2]}
    pq.write_table(pa.table(values), path)
    schema = SCHEMA.model_copy(update={"dense": ("x",), "dense_transform": "none"})
    prepared = prepare({"train": [path]}, tmp_path / "out", schema)
    with pa.memory_map(str(prepared.split_path("train"))) as file:
        found = pa.ipc.open_file(file).read_all().to_pydict()
    assert prepared.bad_rows == (2 if column == "y" else 0)
    assert found["x"] == ([1.0, 1.0] if column == "y" else [1.5, 0.0, 0.0, 2.0])
    assert found["y"] == ([1.0, 0.0] if column == "y" else [1.0, 0.0, 1.0, 0.0])


def test_lists_of_dictionary_values_in_many_row_groups_are_read(tmp_path):
    """Of which Arrow reads no batch that goes beyond a row group."""
    bags, path = [[f"v{row % 5}"] * (row % 3) for row in range(50)], tmp_path / "t.parquet"
    encoded = pa.array(bags).cast(pa.list_(pa.dictionary(pa.int32(), pa.string())))
    pq.write_table(pa.table({"y": [row % 2 for row in range(50)], "a": encoded}), path, row_group_size=7)
    tables = list(read_parquet(path, SCHEMA))
    assert [bag for table in tables for bag in table.table["a"].to_pylist()] == bags
    assert [line for table in tables for line in table.lines] == list(range(1, 51))


def test_the_hour_of_a_time_in_floats_is_read(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"y": [0, 1], "t": pa.array([3600.0, 7200.5])}), path)
    hour = {"name": "hour", "column": "t", "derive": "hour_of_day", "time_format": "unix"}
    schema = Schema.parse({"format": "parquet", "label": "y", "categorical": [hour]})
    prepared = prepare({"train": [path]}, tmp_path / "out", schema, min_count=1)
    assert prepared.vocabulary("hour").to_pylist() == [1, 2]


SHARED = Schema.parse(
    {
        "format": "parquet",
        "label": "y",
        "categorical": ["item", {"name": "history", "column": "h", "separator": "|", "vocabulary": "item"}],
    }
)
MIXED = "column 'h' of feature 'history' holds text, and column 'item' of feature 'item', .*, holds integers"


@pytest.mark.parametrize("way", ["prepare", "raw"])
def test_integers_and_text_in_one_vocabulary_are_refused(tmp_path, way):
    """One value would have two ids."""

    def read(name, items, histories):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"y": [0, 1], "item": items, "h": histories}), path)
        if way == "prepare":
            return len(prepare({"train": [path]}, tmp_path / name, SHARED, min_count=1).vocabulary("item"))
        (batch,) = RawLoader(FileSource([path], SHARED), SHARED, batch_size=2, quarantine=NoBadRows())
        return len(batch.sparse.ids.unique())

    assert read("text", pa.array(["7", "8"]), pa.array(["7|8", "8"])) == 2
    assert read("none", pa.nulls(2), pa.array(["7|8", "8"])) == 3
    with pytest.raises(
        DataError, match=rf"mixed\.parquet: {MIXED}: one value would have two ids. Store both in one way"
    ):
        read("mixed", pa.array([7, 8]), pa.array(["7|8", "8"]))


def test_integers_and_text_in_one_vocabulary_of_several_files_are_refused(tmp_path):
    paths = [tmp_path / f"{number}.parquet" for number in range(2)]
    for path, items, history in zip(paths, (INTEGERS, NULLS), (NULLS, TEXT), strict=True):
        pq.write_table(pa.table({"y": [0, 1], "item": items, "h": history.cast(pa.string())}), path)
    known = KnownForms(SHARED)
    known.add(paths[0], [(False, "integers"), (True, None)])
    with pytest.raises(DataError, match=rf"1\.parquet: {MIXED} in .*0\.parquet: one value"):
        known.add(paths[1], [(False, None), (True, "text")])


def test_a_derived_id_and_text_in_one_vocabulary_are_refused():
    hour = {"name": "hour", "column": "t", "derive": "hour_of_day"}
    with pytest.raises(ConfigurationError, match="'a' shares the vocabulary of 'hour', and one of them is derived"):
        Schema.parse({"label": "y", "categorical": [hour, {"name": "a", "vocabulary": "hour"}]})
    start = {"name": "start", "column": "s", "derive": "hour_of_day", "vocabulary": "hour"}
    assert Schema.parse({"label": "y", "categorical": [hour, start]}).table_of("start") == "hour"

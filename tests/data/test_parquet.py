"""Parquet columns: what they may hold, and that all files of a data set agree on it."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmesh.data import Prepared, Schema, prepare
from rowmesh.data.parquet import multi_hot_columns
from rowmesh.errors import DataError

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

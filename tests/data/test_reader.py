"""Readers: every row is read as it stands or reported with its line; nothing is dropped silently."""

import bz2
import datetime
import gzip
import json
import lzma
import math
import random

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmesh.data import Schema, compression, text
from rowmesh.data.quarantine import Quarantine
from rowmesh.data.reader import read_blocks
from rowmesh.data.schema import AVAZU, CRITEO
from rowmesh.errors import DataError

DECLARED = 'a label of other numbers is label = { name = "y", kind = "value" } in the schema'
SCHEMA = Schema(label="y", dense=("x",), dense_transform="none", categorical=("a",))
PARQUET = SCHEMA.model_copy(update={"format": "parquet"})


class Read:
    """Everything that a file holds."""

    def __init__(self, path, schema, max_bad_rows=1000):
        quarantine_path = path.parent / "quarantine.jsonl"
        with Quarantine(quarantine_path, max_bad_rows, path.parent / "kept.jsonl") as quarantine:
            blocks = list(read_blocks(path, schema, quarantine))
        self.labels = [int(y) for block in blocks for y in block.labels[0]]
        self.dense = np.concatenate([block.dense for block in blocks]) if blocks else np.empty((0, 0))
        self.columns = [
            [value for block in blocks for value in block.categorical[i].to_pylist()]
            for i in range(len(schema.categorical))
        ]
        lines = quarantine_path.read_text().splitlines() if quarantine_path.exists() else []
        self.bad = [json.loads(line) for line in lines]
        self.bad_lines = [bad["line"] for bad in self.bad]


def write(tmp_path, content, name="data.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1,2", "2 columns instead of 3"),
        ("1,2,a,b", "4 columns instead of 3"),
        ("1,2,\udcff,b", "4 columns instead of 3"),
        ("\udcff", "1 column instead of 3"),
        ('1,"\udcff', "a line break inside a value, or a quote that is not closed"),
        ("", "y is '', not 0 or 1"),
        ("2,2,a", f"y is '2', not 0 or 1; {DECLARED}"),
        (",2,a", "y is '', not 0 or 1"),
        ("yes,2,a", "y is 'yes', not a number"),
        ("nan,2,a", "y is 'nan', not 0 or 1"),
        ("1,two,a", "x is 'two', not a number"),
        ("1,nan,a", "x is 'nan', not a finite number"),
        ("1,-inf,a", "x is '-inf', not a finite number"),
        ("1,1e39,a", "x is '1e39', not a finite number"),
        ("1,\udcff,a", r"x is '\\xff', not a number"),
        ('1,2,"a', "a line break inside a value, or a quote that is not closed"),
        ("1,2,a\r0,3,b", "a line break inside a value, or a quote that is not closed"),
    ],
)
@pytest.mark.parametrize("block_bytes", [12, 1 << 20])
def test_a_malformed_row_is_reported_with_its_line(tmp_path, monkeypatch, row, reason, block_bytes):
    monkeypatch.setattr(text, "BLOCK_BYTES", block_bytes)
    lines = ["y,x,a", "0,1,a", "1,2,b", row, "1,3,c", "0,4,d"]
    path = write(tmp_path, "\n".join(lines).encode("utf-8", "surrogateescape") + b"\n")
    read = Read(path, SCHEMA)
    assert [(bad["file"], bad["line"], bad["reason"]) for bad in read.bad] == [(str(path), 4, reason)]
    assert read.bad[0]["row"] == row.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    assert read.columns == [[b"a", b"b", b"c", b"d"]]
    assert read.dense[:, 0].tolist() == [1, 2, 3, 4]


@hypothesis.given(
    bad=st.sets(st.integers(0, 199), max_size=30),
    block_bytes=st.sampled_from([64, 300, 1 << 20]),
    line_end=st.sampled_from(["\n", "\r\n"]),
    last_line_ends=st.booleans(),
)
@hypothesis.settings(deadline=None, max_examples=40)
def test_lines_are_exact_whatever_the_blocks(tmp_path_factory, bad, block_bytes, line_end, last_line_ends):
    kinds = random.Random(len(bad)).choices(["1,2", "5,1,v", "1,?,v", "", '"', "1,inf,v"], k=200)
    rows = [kinds[i] if i in bad else f"{i % 2},{i},v{i}" for i in range(200)]
    content = line_end.join(["y,x,a", *rows]) + (line_end if last_line_ends else "")
    path = write(tmp_path_factory.mktemp("lines"), content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "BLOCK_BYTES", block_bytes)
        read = Read(path, SCHEMA)
    if 199 in bad and kinds[199] == "" and not last_line_ends:
        bad = bad - {199}  # there is no such line
    assert sorted(read.bad_lines) == sorted(i + 2 for i in bad)
    assert read.columns[0] == [f"v{i}".encode() for i in range(200) if i not in bad]
    assert [bad_row["row"] for bad_row in sorted(read.bad, key=lambda b: b["line"])] == [kinds[i] for i in sorted(bad)]


BZ2, GZIP = (bz2.compress, gzip.compress)
NO_STREAM = BZ2(b"")
LINES = [f"{number % 2},{number},v{number}\n".encode() for number in range(3000)]


@pytest.mark.parametrize(
    "parts",
    [
        [BZ2(b"y,x,a\n"), NO_STREAM, BZ2(b"".join(LINES))],
        [NO_STREAM, NO_STREAM, BZ2(b"y,x,a\n" + b"".join(LINES))],
        [BZ2(b"y,x,a\n"), BZ2(b"".join(LINES)), NO_STREAM],
        [GZIP(b"y,x,a\n"), GZIP(b""), GZIP(b"".join(LINES))],
        [GZIP(b"y,x,a\n"), bytes(500), GZIP(b"".join(LINES)), bytes(3)],
        [GZIP(b"y,x,a\n" + b"".join(LINES)), bytes(70_000)],
    ],
)
@pytest.mark.parametrize("read_bytes", [1, 7, 1 << 20])
def test_streams_behind_each_other_are_one_text(tmp_path, monkeypatch, parts, read_bytes):
    """As bzip2 and gzip read them: some are empty, and gzip's are padded."""
    monkeypatch.setattr(compression, "_READ_BYTES", read_bytes)
    read = Read(write(tmp_path, b"".join(parts)), SCHEMA)
    assert read.columns == [[f"v{number}".encode() for number in range(3000)]]


@pytest.mark.parametrize("compress", [BZ2, GZIP])
@pytest.mark.parametrize(
    "change", [lambda data: data[:-5], lambda data: data + b"rubbish", lambda data: data[:60] + data[61:]]
)
def test_damaged_streams_are_named(tmp_path, compress, change):
    path = write(tmp_path, change(compress(b"y,x,a\n" + b"".join(LINES))))
    with pytest.raises(DataError, match=rf"{path.name}: cannot be read to its end"):
        Read(path, SCHEMA)


def test_missing_values(tmp_path):
    read = Read(write(tmp_path, "y,x,a\n1,,\n0,5,b\n"), SCHEMA)
    np.testing.assert_array_equal(read.dense[:, 0], [math.nan, 5])
    assert read.columns == [[b"", b"b"]]
    assert not read.bad


def test_log_transform_takes_negative_values_as_zero(tmp_path):
    schema = SCHEMA.model_copy(update={"dense_transform": "log1p"})
    read = Read(write(tmp_path, "y,x,a\n1,-2,a\n0,9,a\n1,,a\n"), schema)
    np.testing.assert_allclose(read.dense[:, 0], [0, math.log(10), math.nan], rtol=1e-6)


def test_quotes_hold_delimiters(tmp_path):
    read = Read(write(tmp_path, 'y,x,"a"\n1,2,"p,q"\n0,3,"say ""hi"""\n'), SCHEMA)
    assert read.columns == [[b"p,q", b'say "hi"']]


def test_byte_order_mark_and_column_order(tmp_path):
    read = Read(write(tmp_path, b"\xef\xbb\xbfa,unused,y,x\nv,0,1,7\n"), SCHEMA)
    assert (read.columns, read.labels, read.dense.tolist()) == ([[b"v"]], [1], [[7.0]])


def test_multi_hot_text(tmp_path):
    schema = Schema(label="y", categorical=({"name": "a", "separator": "|"},))
    read = Read(write(tmp_path, "y,a\n1,p|q\n0,\n1,p\n0,p||q\n"), schema)
    assert read.columns == [[[b"p", b"q"], None, [b"p"], [b"p", b"", b"q"]]]


@pytest.mark.parametrize(("found", "hint"), [("y,price,a", ""), ("y,XX,a", "; did you mean 'XX'?")])
def test_missing_column(tmp_path, found, hint):
    schema = SCHEMA.model_copy(update={"dense": ("xxx",) if hint else ("x",)})
    path = write(tmp_path, f"{found}\n1,2,3\n")
    with pytest.raises(DataError) as error:
        Read(path, schema)
    name = schema.dense[0]
    columns = found.replace(",", ", ")
    assert str(error.value) == f"{path}: column {name!r} is missing{hint} (the file has: {columns})"


def test_duplicate_column(tmp_path):
    with pytest.raises(DataError, match="names x more than once"):
        Read(write(tmp_path, "y,x,a,x\n1,2,3,4\n"), SCHEMA)


def test_truncated_gzip_is_no_shorter_file(tmp_path):
    whole = gzip.compress(b"y,x,a\n" + b"".join(b"1,%d,v\n" % i for i in range(50_000)))
    path = write(tmp_path, whole[: len(whole) // 2], "data.csv.gz")
    with pytest.raises(DataError, match=r"data\.csv\.gz: cannot be read to its end"):
        Read(path, SCHEMA)


def test_gzip_of_several_members(tmp_path):
    path = write(tmp_path, gzip.compress(b"y,x,a\n1,1,p\n") + gzip.compress(b"0,2,q\n"), "data.csv.gz")
    assert Read(path, SCHEMA).columns == [[b"p", b"q"]]


@pytest.mark.parametrize("name", ["data.csv", "data.CSV.GZ", "data.gz", "data.bz2"])
@pytest.mark.parametrize(
    "compress", [bytes, gzip.compress, bz2.compress, lambda data: pa.compress(data, "zstd").to_pybytes()]
)
def test_compression_is_told_by_content(tmp_path, name, compress):
    assert Read(write(tmp_path, compress(b"y,x,a\n1,1,p\n"), name), SCHEMA).columns == [[b"p"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lzma.compress(b"y,x,a\n"), "compressed with xz; decompress it"),
        (b"PK\x03\x04rest", "a zip archive; unpack it"),
        (b"PAR1rest", 'a Parquet file; use a schema with format = "parquet"'),
        ("y,x,a\n1,1,p\n".encode("utf-16"), "text in UTF-16; save it as UTF-8"),
    ],
)
def test_files_that_are_no_text(tmp_path, content, message):
    with pytest.raises(DataError, match=f"data.csv is {message}"):
        Read(write(tmp_path, content), SCHEMA)


def test_byte_order_mark_without_a_header(tmp_path):
    schema = SCHEMA.model_copy(update={"columns": ("y", "x", "a")})
    read = Read(write(tmp_path, b"\xef\xbb\xbf1,1,p\n0,2,q\n"), schema)
    assert (read.labels, read.bad) == ([1, 0], [])


def test_endless_line(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "BLOCK_BYTES", 100)
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 1000)
    with pytest.raises(DataError, match="a line is longer than 1000 bytes"):
        Read(write(tmp_path, "y,x,a\n" + "1" * 5000), SCHEMA)


def test_the_budget_stops_reading(tmp_path):
    path = write(tmp_path, "y,x,a\n" + "1,?,a\n" * 5)
    assert len(Read(path, SCHEMA, max_bad_rows=5).bad) == 5
    with pytest.raises(DataError) as error:
        Read(path, SCHEMA, max_bad_rows=4)
    message = str(error.value)
    assert "5 bad rows, more than the 4 allowed" in message
    assert f"{path}:2: x is '?', not a number" in message
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 5


def parquet(tmp_path, **columns):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_rows_are_checked_like_lines(tmp_path):
    path = parquet(tmp_path, y=[1, 0, None, 2, 1], x=[1.0, math.nan, 1.0, 1.0, None], a=[7, 8, 9, 9, None])
    read = Read(path, PARQUET)
    assert [(bad["line"], bad["reason"]) for bad in read.bad] == [
        (2, "x is nan, not a finite number"),
        (3, "y is None, not 0 or 1"),
        (4, f"y is 2, not 0 or 1; {DECLARED}"),
    ]
    assert json.loads(read.bad[2]["row"]) == {"y": 2, "x": 1.0, "a": 9}
    assert read.columns == [[7, None]]
    np.testing.assert_array_equal(read.dense, [[1], [math.nan]])


@pytest.mark.parametrize(
    "ids",
    [
        pa.array(["p", "q", None]),
        pa.array(["p", "q", "p"]).dictionary_encode(),
        pa.array([True, False, None]),
        pa.array([[1, 2], [], None], pa.list_(pa.int32())),
        pa.array([[True, None], [], [False]]),
        pa.array([["p", None], [], None], pa.large_list(pa.string())),
        pa.array([[1, 2], [3, 4], None], pa.list_(pa.int64(), 2)),
        pa.array([2**64 - 1, 2**63, None], pa.uint64()),
        pa.nulls(3),
        pa.array([b"\xff\x00", b"ab", None], pa.binary(2)),
    ],
    ids=lambda ids: str(ids.type),
)
def test_parquet_types_of_ids(tmp_path, ids):
    read = Read(parquet(tmp_path, y=[True, False, True], x=[1, 2, 3], a=ids), PARQUET)
    assert read.columns == [ids.to_pylist()]


def test_parquet_lists_of_encoded_text(tmp_path):
    ids = pa.ListArray.from_arrays([0, 2, 3], pa.array(["p", "q", "p"]).dictionary_encode())
    assert Read(parquet(tmp_path, y=[1, 0], x=[1, 2], a=ids), PARQUET).columns == [[["p", "q"], ["p"]]]


def test_parquet_dates_are_text(tmp_path):
    ids = pa.array([datetime.date(2020, 1, 2), None])
    assert Read(parquet(tmp_path, y=[1, 0], x=[None, None], a=ids), PARQUET).columns == [["2020-01-02", None]]


def test_parquet_types_that_cannot_be(tmp_path):
    with pytest.raises(DataError, match="column 'a' is categorical but of type double"):
        Read(parquet(tmp_path, y=[1], x=[1], a=[1.5]), PARQUET)
    with pytest.raises(DataError, match="column 'x' is missing"):
        Read(parquet(tmp_path, y=[1], a=[1]), PARQUET)
    with pytest.raises(DataError, match=r"column 'a' is categorical but of type list.*double"):
        Read(parquet(tmp_path, y=[1], x=[1], a=[[1.5]]), PARQUET)
    with pytest.raises(DataError, match=r"data\.parquet: column 'x' of type list.* holds no numbers"):
        Read(parquet(tmp_path, y=[1], x=[[1]], a=[1]), PARQUET)
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        Read(write(tmp_path, "no parquet", "text.parquet"), PARQUET)


def test_times_become_hour_and_weekday(tmp_path):
    schema = Schema(
        label="y",
        categorical=(
            {"name": "hour", "column": "t", "derive": "hour_of_day"},
            {"name": "day", "column": "t", "derive": "weekday"},
        ),
    )
    read = Read(write(tmp_path, "y,t\n1,14102107\n0,\n1,14109907\n0,14102623\n"), schema)
    assert read.columns == [[7, None, 23], [1, None, 6]]  # a Tuesday and a Sunday
    assert [(bad["line"], bad["reason"]) for bad in read.bad] == [(4, "t is '14109907', not a time like %y%m%d%H")]


def test_unix_times(tmp_path):
    feature = {"name": "hour", "column": "t", "derive": "hour_of_day", "time_format": "unix"}
    schema = Schema(label="y", categorical=(feature,))
    read = Read(write(tmp_path, "y,t\n1,881250949\n0,3600.5\n1,soon\n0,1e99\n"), schema)
    assert read.columns == [[15, 1]]
    assert [bad["reason"] for bad in read.bad] == [
        "t is 'soon', not a time like unix",
        "t is '1e99', not a time like unix",
    ]


def test_a_wrong_delimiter_is_suspected(tmp_path):
    with pytest.raises(DataError, match="column 'y' is missing; is the delimiter ',' right"):
        Read(write(tmp_path, "y\tx\ta\n1\t1\tp\n"), SCHEMA)


def test_real_criteo(real_data):
    read = read_real(real_data / "criteo_kaggle" / "train.tsv.gz", CRITEO)
    labels, dense, columns = read
    with gzip.open(real_data / "criteo_kaggle" / "train.tsv.gz", "rt") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    assert labels == [int(row[0]) for row in rows]
    expected = [[math.log1p(max(float(v), 0)) if v else math.nan for v in row[1:14]] for row in rows]
    np.testing.assert_allclose(dense, expected, rtol=1e-6)
    for i, column in enumerate(columns):
        assert column == [row[14 + i].encode() for row in rows]


def test_real_avazu(real_data):
    labels, dense, columns = read_real(real_data / "avazu" / "train.csv.gz", AVAZU)
    with gzip.open(real_data / "avazu" / "train.csv.gz", "rt") as file:
        header, *rows = [line.rstrip("\n").split(",") for line in file]
    assert labels == [int(row[1]) for row in rows]
    assert dense.shape == (len(rows), 0)
    assert set(columns[0]) == {0}  # one hour after midnight
    assert set(columns[1]) == {1}  # 2014-10-21 was a Tuesday
    for feature, column in list(zip(AVAZU.categorical, columns, strict=True))[2:]:
        position = header.index(feature.source)
        assert column == [row[position].encode() for row in rows]


def read_real(path, schema):
    class NoBadRows:
        def add(self, *bad):
            pytest.fail(f"a bad row in real data: {bad}")

    blocks = list(read_blocks(path, schema, NoBadRows()))
    labels = [int(y) for block in blocks for y in block.labels[0]]
    columns = [
        [value for block in blocks for value in block.categorical[i].to_pylist()]
        for i in range(len(schema.categorical))
    ]
    return labels, np.concatenate([block.dense for block in blocks]), columns


@pytest.mark.parametrize("time_format", ["unix", "%y%m%d%H"])
@pytest.mark.parametrize("zone", [None, "UTC"])
def test_timestamps_of_nanoseconds_become_hour_and_weekday(tmp_path, time_format, zone):
    names = {"hour": "hour_of_day", "day": "weekday"}
    features = [
        {"name": name, "column": "t", "derive": derive, "time_format": time_format} for name, derive in names.items()
    ]
    schema = Schema.parse({"format": "parquet", "label": "y", "categorical": features})
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"y": [1, 0], "t": pa.array([3_600_000_000_001, None], pa.timestamp("ns", zone))}), path)
    read = Read(path, schema)
    assert not read.bad
    assert read.columns == [[1, None], [3, None]]


@pytest.mark.parametrize("column", [pa.array([[1]]), pa.array([True]), pa.array([1], pa.time64("ns"))])
def test_columns_that_hold_no_times_are_named(tmp_path, column):
    feature = {"name": "hour", "column": "t", "derive": "hour_of_day"}
    path = tmp_path / "t.parquet"
    derived = {"format": "parquet", "label": "y", "categorical": [feature]}
    timed = {"format": "parquet", "label": "y", "categorical": ["y2"], "time": "t"}
    pq.write_table(pa.table({"y": [1], "y2": [1], "t": column}), path)
    for values in (derived, timed):
        with pytest.raises(DataError, match=r"t\.parquet: column 't' of type .* holds no times"):
            Read(path, Schema.parse(values))

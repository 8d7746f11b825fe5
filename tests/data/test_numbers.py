"""Numbers in text: one rule for every column."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmesh.data import Schema
from rowmesh.data.events import EventSchema, prepare_events
from rowmesh.data.numbers import floats_of, parse_numbers
from rowmesh.data.quarantine import NoBadRows
from rowmesh.data.reader import check_rows
from rowmesh.data.source import RawTable
from rowmesh.data.times import SECONDS, of_times

NO_NUMBERS = ["1_000", "1_0.5", "0x10", "ten", "\u0661", "1 0"]
"""The first, the second and the fifth are numbers to Python."""


class Kept(list):
    def add(self, file, line, reason, row):
        self.append(reason)


@pytest.mark.parametrize("text", NO_NUMBERS)
@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_what_is_no_number_is_none_in_any_column(tmp_path, text, kind):
    column = pa.array([text, "7", None]).cast(kind)
    np.testing.assert_array_equal(floats_of(column)[0], [math.nan, 7.0, math.nan])
    assert parse_numbers(column, pa.int64())[1] == [0]
    assert of_times(column, "unix", SECONDS).to_pylist() == [None, 7, None]
    columns = {"y": ["1"], "w": ["1"], "x": ["1"], "t": ["1"], "s": ["1"], "a": ["1"], "h": ["1"]}
    hour = {"name": "h", "derive": "hour_of_day", "time_format": "unix"}
    schema = Schema.parse(
        {"label": {"name": "y", "kind": "value"}, "weight": "w", "dense": ["x"], "categorical": ["a", hour]}
        | {"time": "t", "score": "s"}
    )
    for name in "ywxtsh":
        table, bad = pa.table({**columns, name: [text]}), Kept()
        block = check_rows(RawTable(table, np.array([1]), str, 0), tmp_path, schema, bad)
        assert (len(block.lines), [reason.split()[0] for reason in bad]) == (0, [name])
    good = RawTable(pa.table(columns), np.array([1]), str, 0)
    assert len(check_rows(good, tmp_path, schema, NoBadRows()).lines) == 1


@pytest.mark.parametrize("text", NO_NUMBERS)
@pytest.mark.parametrize("column", ["t", "r"])
def test_what_is_no_number_is_none_of_an_event(tmp_path, text, column):
    rows = [{"u": "a", "i": "b", "t": "5", "r": "2"}] * 3
    pq.write_table(pa.Table.from_pylist([*rows, {**rows[0], column: text}]), tmp_path / "events.parquet")
    schema = EventSchema.parse(
        {"format": "parquet", "user": "u", "item": "i", "time": "t", "positive": {"column": "r", "minimum": 1}}
    )
    found = prepare_events([tmp_path / "events.parquet"], tmp_path / "out", schema)
    assert (found.counts.num_events, found.counts.bad_rows) == (3, 1)

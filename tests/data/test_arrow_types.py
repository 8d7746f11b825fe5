"""Every type of Arrow × every use of a column × every way in: read as its plain twin, or refused by its name.

A new type of Arrow, and a new reader, fail a test here until they are in the tables.
"""

import ast
import datetime
import decimal
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.lib
import pyarrow.parquet as pq
import pytest

import rowmesh
from rowmesh.data import Schema, prepare
from rowmesh.data.encoder import Encoder, prepared_encoder
from rowmesh.data.events import EventSchema, prepare_events
from rowmesh.data.quarantine import NoBadRows, Quarantine
from rowmesh.data.raw import FileSource, RawData, RawLoader
from rowmesh.data.raw.encoder import raw_encoder
from rowmesh.errors import DataError
from rowmesh.run.predict import _batches, _encoded, _Scores
from rowmesh.run.trained_model import as_table

# -- the types --------------------------------------------------------------------------------------------------------

TEXT = {
    "id": ["p", "q", None, "p"],
    "separated": ["p|q", "", None, "p"],
    "dense": ["1.5", "", None, "2"],
    "label": ["1", "0", "0", "1"],
    "weight": ["1", "2", "0.5", "1"],
    "time": ["1700000000", "1700003600", "90", "1700000000"],
    "derived": ["1700000000", "1700003600", None, "1700000000"],
    "score": ["5", "7", "9", "5"],
}
NARROW = {use: ["1", "0", "0", "1"] for use in TEXT}  # of one width
WHOLE = {
    "id": [1, 0, None, 1],
    "dense": [1, 0, None, 1],
    "label": [1, 0, 0, 1],
    "weight": [1, 1, 0, 1],
    "time": [100, 50, 7, 100],
    "derived": [100, 50, None, 100],
    "score": [1, 0, 0, 1],
}
BOOLEANS = {use: WHOLE[use] for use in ("id", "dense", "label", "weight", "score")}
FLOATS = {
    **{use: WHOLE[use] for use in ("label", "weight", "time", "derived", "score")},
    "dense": [1.5, 0.0, None, 2.0],
}
MOMENTS = [datetime.datetime(2024, 2, 29, 5, tzinfo=datetime.UTC), datetime.datetime(1999, 1, 1, tzinfo=datetime.UTC)]
TIMES = {
    "id": [*MOMENTS, None, MOMENTS[0]],
    "separated": [*MOMENTS, None, MOMENTS[0]],
    "time": [*MOMENTS, *MOMENTS],
    "derived": [*MOMENTS, None, MOMENTS[0]],
}
DAYS = {use: [value and value.replace(hour=0) for value in values] for use, values in TIMES.items()}
CLOCKS = {use: [3600, 7200, None, 3600] for use in ("id", "separated")}
BAGS = {"list": [["p", "q"], [], None, ["p"]]}
NUMBERED_BAGS = {"list": [[7, 8], [], None, [7]]}
PAIRS = {"list": [["p", "q"], ["q", "q"], None, ["p", "p"]]}
NOTHING = {use: [None] * 4 for use in ("id", "separated", "dense", "derived")}


class Type(NamedTuple):
    """A type, the values that its columns have by use, for the uses that it has, and how columns are made of them."""

    values: dict[str, Any]
    make: Callable[[list[Any]], pa.Array]
    twin: Callable[[str, pa.Array, list[Any]], pa.Array]

    @property
    def uses(self) -> set[str]:
        return {use for use, values in self.values.items() if values is not None}

    def column(self, use: str) -> pa.Array:
        return self.make(self.values[use])

    def twin_column(self, use: str, *, in_file: bool) -> pa.Array:
        column = self.column(use)
        return self.twin(use, read_back(column) if in_file else column, self.values[use])


def read_back(column: pa.Array) -> pa.Array:
    """As Parquet has it, which knows no seconds of timestamps."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": column}), sink)
    return pq.read_table(pa.BufferReader(sink.getvalue()))["a"].combine_chunks()


def cast(kind: pa.DataType) -> Callable[[list[Any]], pa.Array]:
    return lambda values: pa.array(values).cast(kind)


def of(kind: pa.DataType) -> Callable[[list[Any]], pa.Array]:
    return lambda values: pa.array(values, kind)


def dictionary(values: pa.DataType) -> Callable[[list[Any]], pa.Array]:
    def make(given: list[Any]) -> pa.Array:
        found = pa.array(given).dictionary_encode()
        return pa.DictionaryArray.from_arrays(found.indices, found.dictionary.cast(values))

    return make


def run_ends(values: pa.DataType) -> Callable[[list[Any]], pa.Array]:
    """A slice, so that its runs begin before it."""

    def make(given: list[Any]) -> pa.Array:
        ends = pa.array(range(2, len(given) + 3), pa.int32())
        return pa.RunEndEncodedArray.from_arrays(ends, pa.array([given[0], *given]).cast(values)).slice(2)

    return make


def extension(kind: pa.BaseExtensionType) -> Callable[[list[Any]], pa.Array]:
    return lambda values: pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))


def backwards(kind: pa.DataType) -> Callable[[list[Any]], pa.Array]:
    """A view whose lists stand in another order than their values."""

    def make(given: list[Any]) -> pa.Array:
        flat = [value for bag in reversed(given) for value in bag or []]
        sizes = [len(bag or []) for bag in given]
        begins = [sum(sizes[i + 1 :]) for i in range(len(sizes))]
        made = pa.LargeListViewArray if pa.types.is_large_list_view(kind) else pa.ListViewArray
        return made.from_arrays(
            pa.array(begins, pa.int64() if made is pa.LargeListViewArray else pa.int32()),
            pa.array(sizes, pa.int64() if made is pa.LargeListViewArray else pa.int32()),
            pa.array(flat).cast(kind.value_type),
            mask=pa.array([bag is None for bag in given]),
        )

    return make


def as_text(use: str, column: pa.Array, values: list[Any]) -> pa.Array:
    return pa.array(values, pa.string())


def as_integers(use: str, column: pa.Array, values: list[Any]) -> pa.Array:
    return pa.array(values, pa.int64())


def as_floats(use: str, column: pa.Array, values: list[Any]) -> pa.Array:
    return pa.array(values, pa.float64())


def as_decimals(use: str, column: pa.Array, values: list[Any]) -> pa.Array:
    return column.cast(pa.string()) if use in ("id", "separated") else pa.array(values, pa.float64())


def as_times(use: str, column: pa.Array, values: list[Any]) -> pa.Array:
    return column.cast(pa.string()) if use in ("id", "separated") else pa.array(values, pa.timestamp("us", "UTC"))


def as_bags(use: str, column: pa.Array, values: list[Any]) -> pa.Array:
    return pa.array(values, pa.list_(pa.string()))


def as_numbered_bags(use: str, column: pa.Array, values: list[Any]) -> pa.Array:
    return pa.array(values, pa.list_(pa.int64()))


def as_nothing(use: str, column: pa.Array, values: list[Any]) -> pa.Array:
    return pa.array(values, pa.float64() if use == "dense" else pa.timestamp("s") if use == "derived" else pa.string())


def none(use: str, column: pa.Array, values: list[Any]) -> pa.Array:
    raise AssertionError


def text(make: Callable[[list[Any]], pa.Array], values: dict[str, Any] = TEXT) -> Type:
    return Type(values, make, as_text)


DECIMALS = {**FLOATS, "id": [1.5, 2.5, None, 1.5], "separated": [1.5, 2.5, None, 1.5]}


def decimals(kind: pa.DataType) -> Type:
    def make(values: list[Any]) -> pa.Array:
        return pa.array([None if value is None else decimal.Decimal(value) for value in values], kind)

    return Type(DECIMALS, make, as_decimals)


def unusable(make: Callable[[list[Any]], pa.Array]) -> Type:
    return Type({}, make, none)


def intervals(values: list[Any]) -> pa.Array:
    return pa.array([pa.MonthDayNano([1, 2, 3])] * 4, pa.month_day_nano_interval())


def union(made: str) -> Callable[[list[Any]], pa.Array]:
    def make(values: list[Any]) -> pa.Array:
        kinds, children = pa.array([0] * 4, pa.int8()), [pa.array([1, 2, 3, 4])]
        if made == "dense":
            return pa.UnionArray.from_dense(kinds, pa.array(range(4), pa.int32()), children)
        return pa.UnionArray.from_sparse(kinds, children)

    return make


TYPES: dict[str, Type] = {
    "string": text(of(pa.string())),
    "large_string": text(of(pa.large_string())),
    "string_view": text(of(pa.string_view())),
    "binary": text(cast(pa.binary())),
    "large_binary": text(cast(pa.large_binary())),
    "binary_view": text(cast(pa.binary_view())),
    "fixed_size_binary": text(lambda values: pa.array(values).cast(pa.binary()).cast(pa.binary(1)), NARROW),
    "uuid": text(
        lambda values: pa.ExtensionArray.from_storage(pa.uuid(), pa.array([16 * b"x"] * 4, pa.binary(16))),
        {"id": [16 * "x"] * 4, "separated": [16 * "x"] * 4},
    ),
    "json": text(extension(pa.json_())),
    "dictionary": text(dictionary(pa.string())),
    "dictionary_of_views": text(dictionary(pa.string_view())),
    "dictionary_of_integers": Type(WHOLE, dictionary(pa.int16()), as_integers),
    "run_ends": text(run_ends(pa.string())),
    "run_ends_of_views": text(run_ends(pa.string_view())),
    "run_ends_of_integers": Type(WHOLE, run_ends(pa.int16()), as_integers),
    **{
        str(kind): Type(WHOLE, of(kind), as_integers)
        for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
    },
    "bool": Type(BOOLEANS, cast(pa.bool_()), as_integers),
    "bool8": Type(WHOLE, extension(pa.bool8()), as_integers),
    **{str(kind): Type(FLOATS, cast(kind), as_floats) for kind in (pa.float16(), pa.float32(), pa.float64())},
    "decimal32": decimals(pa.decimal32(6, 1)),
    "decimal64": decimals(pa.decimal64(12, 1)),
    "decimal128": decimals(pa.decimal128(20, 1)),
    "decimal256": decimals(pa.decimal256(40, 1)),
    **{
        f"timestamp_{unit}{'' if zone is None else '_utc'}": Type(TIMES, cast(pa.timestamp(unit, zone)), as_times)
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "UTC")
    },
    "date32": Type(DAYS, cast(pa.date32()), as_times),
    "date64": Type(DAYS, cast(pa.date64()), as_times),
    "time32": Type(CLOCKS, of(pa.time32("s")), lambda use, column, values: column.cast(pa.string())),
    "time64": Type(CLOCKS, of(pa.time64("us")), lambda use, column, values: column.cast(pa.string())),
    "duration": Type(CLOCKS, of(pa.duration("s")), lambda use, column, values: column.cast(pa.string())),
    "null": Type(NOTHING, of(pa.null()), as_nothing),
    "list": Type(BAGS, of(pa.list_(pa.string())), as_bags),
    "large_list": Type(BAGS, of(pa.large_list(pa.large_string())), as_bags),
    "fixed_size_list": Type(PAIRS, of(pa.list_(pa.string(), 2)), as_bags),
    "list_view": Type(BAGS, backwards(pa.list_view(pa.string())), as_bags),
    "large_list_view": Type(NUMBERED_BAGS, backwards(pa.large_list_view(pa.int16())), as_numbered_bags),
    "list_of_views": Type(BAGS, of(pa.list_(pa.string_view())), as_bags),
    "list_view_of_views": Type(BAGS, backwards(pa.list_view(pa.string_view())), as_bags),
    "list_of_binary_views": Type(BAGS, cast(pa.list_(pa.binary_view())), as_bags),
    "list_of_dictionaries": Type(BAGS, cast(pa.list_(pa.dictionary(pa.int32(), pa.string()))), as_bags),
    "list_of_integers": Type(NUMBERED_BAGS, of(pa.list_(pa.uint8())), as_numbered_bags),
    "struct": unusable(lambda values: pa.array([{"a": 1}] * 4)),
    "map": unusable(lambda values: pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int64()))),
    "list_of_lists": unusable(lambda values: pa.array([[[1]]] * 4)),
    "list_of_floats": unusable(lambda values: pa.array([[0.5]] * 4)),
    "intervals": unusable(intervals),
    "dense_union": unusable(union("dense")),
    "sparse_union": unusable(union("sparse")),
}
UNMAKEABLE = {"Type_INTERVAL_MONTHS", "Type_INTERVAL_DAY_TIME"}
"""PyArrow has no class for them."""


def type_of(name: str) -> pa.DataType:
    kind = TYPES[name]
    use = next(iter(sorted(kind.uses)), "")
    return kind.make(kind.values.get(use, [])).type


def test_no_type_of_arrow_is_left_out():
    known = {name for name in dir(pyarrow.lib) if name.startswith("Type_")}
    found = {type_of(name).id for name in TYPES}
    assert found - {pa.uuid().id} == {getattr(pyarrow.lib, name) for name in known - UNMAKEABLE}


# -- the uses ---------------------------------------------------------------------------------------------------------

PLAIN: dict[str, pa.Array] = {
    "label": pa.array([1, 0, 1, 0]),
    "weight": pa.array([1.0, 2.0, 1.0, 1.0]),
    "dense": pa.array([0.5, 1.5, 2.5, 0.5]),
    "id": pa.array(["u", "v", "u", "w"]),
    "separated": pa.array(["u|v", "v", "u", "w"]),
    "list": pa.array([["u"], ["v"], ["u"], ["w"]]),
    "derived": pa.array([0, 3600, 7200, 10800]),
    "time": pa.array([100, 200, 300, 400]),
    "score": pa.array([4, 3, 2, 1]),
}
CATEGORICAL = (
    "id",
    {"name": "separated", "separator": "|"},
    "list",
    {"name": "derived", "derive": "hour_of_day", "time_format": "unix"},
)
SCHEMA = Schema.parse(
    {
        "format": "parquet",
        "label": "label",
        "weight": "weight",
        "dense": ["dense"],
        "dense_transform": "none",
        "categorical": CATEGORICAL,
    }
)
RAW_SCHEMA = SCHEMA.model_copy(update={"time": "time", "score": "score"})
EVENTS = EventSchema.parse(
    {
        "format": "parquet",
        "user": "user",
        "item": "id",
        "time": "time",
        "side": ["side"],
        "positive": {"column": "score", "minimum": 0},
    }
)


def table(**columns: pa.Array) -> pa.Table:
    """A row each of what a schema of samples and one of events read."""
    return pa.table({**PLAIN, "user": PLAIN["id"], "side": columns.get("id", PLAIN["id"]), **columns})


# -- the ways in ------------------------------------------------------------------------------------------------------


def of_prepared(prepared) -> dict[str, Any]:
    with pa.memory_map(str(prepared.split_path("train"))) as file:
        found = pa.ipc.open_file(file).read_all().to_pydict()
    for name in prepared.features:
        values = [*prepared.vocabulary(name).to_pylist(), "rare"]
        column = found[name]
        found[name] = [[values[i] for i in row] if isinstance(row, list) else values[row] for row in column]
    return found


NUMBERS = itertools.count()


class Ways:
    """Reads a table in each way, in a folder; the result in plain values."""

    def __init__(self, folder: Path, twin: pa.Table) -> None:
        self.folder, self.twin = folder, twin
        self.encoders: dict[bool, Encoder] = {}
        self.results: dict[str, Any] = {}

    def expected(self, way: str) -> Any:
        """What a way makes of the twin."""
        if way not in self.results:
            self.results[way] = getattr(self, way)(self.twin)
        return self.results[way]

    def file(self, given: pa.Table) -> Path:
        path = self.folder / f"{next(NUMBERS)}.parquet"
        pq.write_table(given, path, row_group_size=3)
        return path

    def prepare(self, given: pa.Table):
        path = self.file(given)
        return of_prepared(prepare({"train": [path]}, path.with_suffix(""), SCHEMA, min_count=1, max_bad_rows=0))

    def raw(self, given: pa.Table):
        (batch,) = RawLoader(
            FileSource([self.file(given)], RAW_SCHEMA), RAW_SCHEMA, batch_size=9, quarantine=NoBadRows()
        )
        sparse, weights, scores = batch.sparse, batch.weights, batch.sparse.scores
        assert weights is not None
        assert scores is not None
        tensors = (batch.dense, batch.labels, weights, sparse.ids, sparse.offsets, scores)
        return [sparse.time, *(tensor.tolist() for tensor in tensors)]

    def events(self, given: pa.Table):
        path = self.file(given)
        found = prepare_events([path], path.with_suffix(""), EVENTS, max_bad_rows=4)
        values = (found.user_values(), found.item_values(), found.side_values("side"))
        arrays = (found.items, found.times, found.offsets, found.side["side"])
        return [found.counts, *(v.to_pylist() for v in values), *(a.tolist() for a in arrays)]

    def _encoder(self, *, raw: bool) -> Encoder:
        if raw not in self.encoders:
            self.encoders[raw] = self._trained(raw=raw)
        return self.encoders[raw]

    def _trained(self, *, raw: bool) -> Encoder:
        if not raw:
            path = self.file(self.twin)
            return prepared_encoder(prepare({"train": [path]}, path.with_suffix(""), SCHEMA, min_count=1))
        data = RawData(location=str(self.file(self.twin)), schema=SCHEMA)
        for _ in data.source().chunks(None):
            pass  # the forms of its columns are known then
        return raw_encoder(data)

    def predict(self, given: pa.Table, *, raw: bool = False):
        file, encoder, schema = self.file(given), self._encoder(raw=raw), SCHEMA.for_scoring(["score"])
        encoder.check_forms(file, schema, pq.read_schema(file))
        with Quarantine(self.folder / "bad", 0, self.folder / "bad") as quarantine:
            model: Any = SimpleNamespace(encoder=encoder)
            parts = [*_encoded(file, schema, model, quarantine, lambda *_: None)]
        return [
            column
            for name, column in pa.Table.from_batches(parts).to_pydict().items()
            if name not in ("score", "label", "weight")
        ]

    def kept(self, file: Path) -> pa.ChunkedArray:
        """The column `score` of a file, as it is written beside the scores of the model."""
        model: Any = SimpleNamespace(encoder=self._encoder(raw=True))
        sink = io.BytesIO()
        with _Scores(sink) as scores:
            for part in _batches(_encoded(file, SCHEMA.for_scoring(["score"]), model, NoBadRows(), lambda *_: None), 3):
                scores.write(part.select(["line", "score"]), {"own": pa.array([0.5] * part.num_rows)})
        return pq.read_table(pa.BufferReader(sink.getvalue()))["score"]

    def predict_raw(self, given: pa.Table):
        return self.predict(given, raw=True)

    def load_run(self, given: pa.Table, *, raw: bool = False):
        encoder, schema = self._encoder(raw=raw), SCHEMA.for_scoring()
        found = encoder.encode(encoder.check_table(as_table(given), schema))
        return [column for name, column in found.to_pydict().items() if name not in ("label", "weight")]

    def load_run_raw(self, given: pa.Table):
        return self.load_run(given, raw=True)


SAMPLES = {"id", "separated", "dense", "label", "weight", "derived", "list"}
WAYS = {
    "prepare": SAMPLES,
    "raw": SAMPLES | {"time", "score"},
    "events": {"id", "time", "score"},
    "predict": SAMPLES - {"label", "weight"},
    "predict_raw": SAMPLES - {"label", "weight"},
    "load_run": SAMPLES - {"label", "weight"},
    "load_run_raw": SAMPLES - {"label", "weight"},
}
READERS = {
    "rowmesh/data/codes.py": "prepare",
    "rowmesh/data/parquet.py": "prepare",
    "rowmesh/data/raw/loader.py": "raw",
    "rowmesh/data/raw/files.py": "raw",
    "rowmesh/data/events/read.py": "events",
    "rowmesh/run/predict.py": "predict",
    "rowmesh/data/encoder.py": "load_run",
    "rowmesh/data/reader.py": "prepare",
}
"""What reads raw columns, and the way in that has it in the tables."""


def test_no_reader_of_columns_is_left_out():
    """Whatever calls these is a way in."""
    calls = {"read_blocks", "check_rows", "read_parquet", "read_tables", "read_types", "column_forms"}
    package = Path(rowmesh.__file__).parent
    found = set()
    for path in (*(package / "data").rglob("*.py"), *(package / "run").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = getattr(getattr(node, "func", None), "id", ""), getattr(getattr(node, "func", None), "attr", "")
            if names[0] in calls or names[1] in ("ParquetFile", "read_schema", "read_table"):
                found.add(path.relative_to(package.parent).as_posix())
    assert found == set(READERS)
    assert set(READERS.values()) <= set(WAYS)


def can_be_written(column: pa.Array) -> bool:
    try:
        pq.write_table(pa.table({"a": column}), pa.BufferOutputStream())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return False
    return True


def ways_of(column: pa.Array) -> list[str]:
    return [way for way in WAYS if way.startswith("load_run") or can_be_written(column)]


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """The ways in beside a twin; those of equal twins are made once."""
    known: dict[str, Ways] = {}

    def ways(twin: pa.Table) -> Ways:
        return known.setdefault(f"{twin.schema} {twin.to_pydict()}", Ways(tmp_path_factory.mktemp("twin"), twin))

    return ways


@pytest.mark.parametrize("name", TYPES)
def test_columns_are_read_as_their_plain_twins(name, ways):
    """In all their uses at once."""
    kind = TYPES[name]
    for way in ways_of(kind.column(next(iter(kind.uses)))) if kind.uses else ():
        if name == "null" and way == "events":
            continue  # an event needs an item
        uses, in_file = kind.uses & WAYS[way], not way.startswith("load_run")
        given = table(**{use: kind.column(use) for use in uses})
        twin = table(**{use: kind.twin_column(use, in_file=in_file) for use in uses})
        assert getattr(ways(twin), way)(given) == ways(twin).expected(way), way


@pytest.mark.parametrize("name", TYPES)
def test_columns_are_kept_beside_scores_as_they_are_in_the_file(name, ways):
    """But for dictionaries, of which the values are kept."""
    kind = TYPES[name]
    column = kind.make(kind.values.get(next(iter(sorted(kind.uses)), ""), []))
    if not can_be_written(column):
        return
    given = table(score=column)
    file = ways(table()).file(given)
    found = ways(table()).kept(file)
    expected = pq.read_table(file)["score"]
    assert found.to_pylist() == expected.to_pylist()
    assert pa.types.is_dictionary(expected.type) or found.type == expected.type


@pytest.mark.parametrize("name", TYPES)
def test_columns_that_have_no_such_use_are_named(name, ways):
    kind = TYPES[name]
    any_use = next(iter(sorted(kind.uses)), "")
    column = kind.make(kind.values.get(any_use, []))
    for way in ways_of(column):
        taken = {"id", "list"} if kind.uses & {"id", "list"} else set()  # which name one kind of column
        if "list" in kind.uses and way.startswith("load_run"):
            taken.add("separated")  # takes lists too
        for use in WAYS[way] - kind.uses - taken:
            if name == "null":
                continue  # its values are missing, which labels refuse row by row
            with pytest.raises(DataError, match=rf"'{use}'|'side'|: {use} is "):
                getattr(ways(table()), way)(table(**{use: column}))

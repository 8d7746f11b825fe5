"""Readers: any data set as a stream of checked blocks of rows.

A row that cannot be used (wrong number of columns, a label other than 0 and 1, a dense value that is no
finite number, a time that does not parse) goes to the quarantine; nothing is dropped silently.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rowmesh.data.quarantine import Quarantine
from rowmesh.data.schema import Categorical, Schema
from rowmesh.data.source import RawTable, check_columns
from rowmesh.data.text import read_text
from rowmesh.errors import DataError

PARQUET_ROWS = 65_536


@dataclass(frozen=True)
class Block:
    """Checked rows.

    Attributes:
        labels: float32 `[n]`, 0 or 1.
        dense: float32 `[n, number of dense features]`, transformed, finite.
        categorical: one array a feature: ids as integers or bytes, or lists of them. Null and "" are
            the missing id; a null or empty list is an empty bag.
        position: how many bytes (rows in Parquet) of the file have been read so far.
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    categorical: tuple[pa.Array, ...]
    position: int


def read_blocks(path: Path, schema: Schema, quarantine: Quarantine) -> Iterator[Block]:
    """Streams a file in blocks of some ten thousand rows; memory does not depend on the file's size.

    Raises:
        DataError: the file lacks a column, cannot be read, or has more bad rows than the quarantine takes.
    """
    tables = read_text(path, schema, quarantine) if schema.format == "text" else _read_parquet(path, schema)
    for raw in tables:
        yield _check(raw, path, schema, quarantine)


def total_size(path: Path, schema: Schema) -> int:
    """What `Block.position` reaches at the end of a file."""
    if schema.format == "text":
        return path.stat().st_size
    try:
        return pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error


def transform_dense(values: NDArray[np.float64], transform: str) -> NDArray[np.float32]:
    """The dense transform: log(1 + max(x, 0)) or the value itself.

    >>> transform_dense(np.array([-2.0, 0.0, np.e - 1]), "log1p").tolist()
    [0.0, 0.0, 1.0]
    """
    if transform == "log1p":
        values = np.log1p(np.maximum(values, 0))
    with np.errstate(over="ignore"):  # past float32 becomes infinite, which the check rejects
        return values.astype(np.float32)


def _read_parquet(path: Path, schema: Schema) -> Iterator[RawTable]:
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            check_columns(path, schema, file.schema_arrow.names)
            _check_types(path, schema, file.schema_arrow)
            position = 0
            for batch in file.iter_batches(PARQUET_ROWS, columns=list(schema.source_columns)):
                table = pa.Table.from_batches([batch])
                lines = np.arange(position + 1, position + 1 + batch.num_rows)
                position += batch.num_rows
                yield RawTable(table, lines, _row_text(table), position)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error


def _row_text(table: pa.Table):
    return lambda row: json.dumps(table.slice(row, 1).to_pylist()[0], default=str)


def _check_types(path: Path, schema: Schema, types: pa.Schema) -> None:
    for feature in schema.categorical:
        kind = types.field(feature.source).type
        if pa.types.is_dictionary(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        if pa.types.is_floating(kind) or pa.types.is_nested(kind):
            raise DataError(
                f"{path}: column {feature.source!r} is categorical but of type {kind}; "
                "store its ids as integers, strings, or lists of them"
            )


@dataclass
class _Faults:
    """Which rows of a block are bad, and why; the first reason of a row counts."""

    reasons: dict[int, str] = field(default_factory=dict)

    def add(self, rows: NDArray[np.integer] | list[int], column: str, values: pa.Array, what: str) -> None:
        for row in rows:
            value = values[int(row)].as_py()
            shown = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
            self.reasons.setdefault(int(row), f"{column} is {shown!r}, {what}")


def _check(raw: RawTable, path: Path, schema: Schema, quarantine: Quarantine) -> Block:
    columns = {name: _plain(raw.table.column(name)) for name in raw.table.column_names}
    faults = _Faults()
    labels = _labels(columns[schema.label], schema.label, faults)
    dense = _dense(columns, schema, faults)
    categorical = tuple(_ids(columns[feature.source], feature, faults) for feature in schema.categorical)
    if faults.reasons:
        bad = sorted(faults.reasons)
        for row in bad:
            quarantine.add(path, int(raw.lines[row]), faults.reasons[row], raw.text(row))
        keep = np.ones(len(labels), bool)
        keep[bad] = False
        labels, dense = labels[keep], dense[keep]
        categorical = tuple(array.filter(pa.array(keep)) for array in categorical)
    return Block(labels, dense, categorical, raw.position)


def _plain(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # no rows, or too large for one array
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _labels(column: pa.Array, name: str, faults: _Faults) -> NDArray[np.float32]:
    values = _numbers(column, name, faults)
    faults.add(np.flatnonzero((values != 0) & (values != 1)), name, column, "not 0 or 1")
    return values.astype(np.float32)


def _dense(columns: dict[str, pa.Array], schema: Schema, faults: _Faults) -> NDArray[np.float32]:
    """Transformed dense values `[n, number of dense features]`; missing ones are 0."""
    num_rows = len(columns[schema.label])
    dense = np.empty((num_rows, len(schema.dense)), np.float32)
    for i, name in enumerate(schema.dense):
        column = columns[name]
        numbers = _numbers(column, name, faults)
        missing = _missing(column)
        values = transform_dense(numbers, schema.dense_transform)
        faults.add(np.flatnonzero(~np.isfinite(values) & ~missing), name, column, "not a finite number")
        dense[:, i] = np.where(missing, 0, values)
    return dense


def _missing(column: pa.Array) -> NDArray[np.bool_]:
    null = pc.is_null(column)
    if _is_text(column):
        null = pc.or_(null, pc.equal(pc.binary_length(column), 0))
    return null.to_numpy(zero_copy_only=False)


def _is_text(column: pa.Array) -> bool:
    kind = column.type
    return any(
        test(kind)
        for test in (
            pa.types.is_binary,
            pa.types.is_string,
            pa.types.is_large_binary,
            pa.types.is_large_string,
        )
    )


def _numbers(column: pa.Array, name: str, faults: _Faults) -> NDArray[np.float64]:
    """float64 values; NaN where missing or no number (the latter recorded)."""
    if not _is_text(column):
        try:
            return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            raise DataError(f"column {name!r} of type {column.type} holds no numbers") from error
    values, bad = _parse_numbers(column)
    faults.add(bad, name, column, "not a number")
    return values


def _parse_numbers(column: pa.Array, first: int = 0) -> tuple[NDArray[np.float64], list[int]]:
    """Parses text; where some value is no number, halves the column until it is found."""
    try:
        text = pc.ascii_trim_whitespace(column.cast(pa.string()))
        values = pc.if_else(pc.equal(text, ""), None, text).cast(pa.float64())
        return values.to_numpy(zero_copy_only=False), []
    except pa.ArrowInvalid:
        if len(column) == 1:
            return np.full(1, np.nan), [first]
        half = len(column) // 2
        low, low_bad = _parse_numbers(column[:half], first)
        high, high_bad = _parse_numbers(column[half:], first + half)
        return np.concatenate([low, high]), low_bad + high_bad


def _ids(column: pa.Array, feature: Categorical, faults: _Faults) -> pa.Array:
    if feature.derive is not None:
        return _derive(column, feature, faults)
    if pa.types.is_boolean(column.type):
        return column.cast(pa.int64())
    if feature.separator is not None and _is_text(column):
        bags = pc.if_else(pc.equal(pc.binary_length(column), 0), None, column)
        return pc.split_pattern(bags, feature.separator)
    if pa.types.is_integer(column.type) or _is_text(column) or pa.types.is_nested(column.type):
        return column
    return column.cast(pa.string())


def _derive(column: pa.Array, feature: Categorical, faults: _Faults) -> pa.Array:
    """Ids from times; computed once for every distinct time of the block."""
    times = (column if _is_text(column) else column.cast(pa.string())).dictionary_encode()
    derived = [_derive_one(value, feature) for value in times.dictionary.to_pylist()]
    ids = pa.array(derived, pa.int64()).take(times.indices)
    valid = ~_missing(column)
    faults.add(
        np.flatnonzero(pc.is_null(ids).to_numpy(zero_copy_only=False) & valid),
        feature.source,
        column,
        f"not a time like {feature.time_format}",
    )
    return ids


def _derive_one(value: bytes | str | None, feature: Categorical) -> int | None:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
    try:
        time = datetime.datetime.strptime(text, feature.time_format)
    except ValueError:
        return None
    return time.hour if feature.derive == "hour_of_day" else time.weekday()

"""Readers: any data set as a stream of checked blocks of rows.

A row that cannot be used (wrong number of columns, a label other than 0 and 1, a weight below 0, a dense value that is
no finite number, a time that does not parse) goes to the quarantine; nothing is dropped silently.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmesh.data.numbers import floats_of, parse_numbers
from rowmesh.data.parquet import id_type, num_rows, read_parquet
from rowmesh.data.plain_columns import is_list, is_text, joined, plain
from rowmesh.data.quarantine import BadRows
from rowmesh.data.scalars import shown
from rowmesh.data.schema import Categorical, Label, Schema
from rowmesh.data.source import RawTable
from rowmesh.data.text import read_text
from rowmesh.data.times import HOUR, SECONDS, WEEKDAY, of_times


@dataclass(frozen=True)
class Block:
    """Checked rows.

    Attributes:
        labels: float32 `[L, n]`, a row a label; NaN where the schema does not read them.
        weights: float32 `[n]`, 0 or more; None where the schema has none, NaN where it does not read them.
        dense: `[n, number of dense features]` of `dense_dtype`, transformed if that takes no statistics of the data;
            NaN where missing, else finite.
        categorical: one array a feature: ids as integers or text, or lists of them; of type null where no
            row has one. Null and "" are the missing id; a null or empty list is an empty bag.
        position: how many bytes (rows in Parquet) of the file have been read so far.
        lines: int64 `[n]`, the 1-based line of every row (the row number in Parquet).
        copied: the columns that the schema copies, as they are in the file, but dictionaries as their values; those of
            text files are binary.
        times: int64 `[n]`, seconds since 1970; None where the schema reads none.
        scores: int64 `[n]`; None where the schema reads none.
    """

    labels: NDArray[np.float32]
    weights: NDArray[np.float32] | None
    dense: NDArray[np.floating]
    categorical: tuple[pa.Array, ...]
    position: int
    lines: NDArray[np.int64]
    copied: tuple[pa.Array, ...]
    times: NDArray[np.int64] | None
    scores: NDArray[np.int64] | None


def read_blocks(path: Path, schema: Schema, quarantine: BadRows) -> Iterator[Block]:
    """Streams a file in blocks of some ten thousand rows; memory does not depend on the file's size.

    Raises:
        DataError: the file lacks a column, cannot be read, or has more bad rows than the quarantine takes.
    """
    tables = read_text(path, schema, quarantine) if schema.format == "text" else read_parquet(path, schema)
    for raw in tables:
        yield check_rows(raw, path, schema, quarantine)


def total_size(path: Path, schema: Schema) -> int:
    """What `Block.position` reaches at the end of a file."""
    if schema.format == "text":
        return path.stat().st_size
    return num_rows(path)


def dense_dtype(schema: Schema) -> np.dtype[np.floating]:
    """The dtype of dense values in blocks: float32, as models take them, unless something is subtracted first.

    float32 holds no seconds of a time and no units of a large id, so values that are to be standardised stay float64.
    """
    is_wide = bool(schema.dense) and schema.dense_transform == "standardize"
    return np.dtype(np.float64 if is_wide else np.float32)


def transform_dense(values: NDArray[np.float64], transform: str) -> NDArray[np.float32]:
    """log(1 + max(x, 0)) for "log1p", else the value itself. The caller refuses values that are not finite.

    >>> transform_dense(np.array([-2.0, 0.0, np.e - 1]), "log1p").tolist()
    [0.0, 0.0, 1.0]
    """
    if transform == "log1p":
        values = np.log1p(np.maximum(values, 0))
    with np.errstate(over="ignore"):  # past float32 becomes infinite, which the check rejects
        return values.astype(np.float32)


@dataclass
class Faults:
    """Which rows of a block are bad, and why; the first reason of a row counts."""

    reasons: dict[int, str] = field(default_factory=dict)

    def add(self, rows: NDArray[np.integer] | list[int], column: str, values: pa.Array, what: str) -> None:
        for row in rows:
            self.reasons.setdefault(int(row), f"{column} is {shown(values[int(row)])!r}, {what}")


def check_rows(raw: RawTable, path: Path, schema: Schema, quarantine: BadRows) -> Block:
    """The usable ones of some rows; the others go to the quarantine under the name `path`."""
    columns = {name: plain(raw.table.column(name)) for name in raw.table.column_names}
    faults = Faults()
    labels, weights = _targets(columns, schema, faults, raw.table.num_rows)
    dense = _dense(columns, schema, faults, raw.table.num_rows)
    categorical = tuple(_ids(columns[feature.source], feature, faults) for feature in schema.categorical)
    times = _times(columns[schema.time], schema, faults) if schema.time in schema.rule_columns else None
    scores = _scores(columns[schema.score], schema.score, faults) if schema.score in schema.rule_columns else None
    lines, copied = raw.lines, tuple(_copied(raw.table.column(name)) for name in schema.copied_columns)
    if faults.reasons:
        bad = sorted(faults.reasons)
        for row in bad:
            quarantine.add(path, int(raw.lines[row]), faults.reasons[row], raw.text(row))
        keep = np.ones(len(lines), bool)
        keep[bad] = False
        labels, dense, lines = labels[:, keep], dense[keep], lines[keep]
        weights = None if weights is None else weights[keep]
        times = None if times is None else times[keep]
        scores = None if scores is None else scores[keep]
        categorical = tuple(array.filter(pa.array(keep)) for array in categorical)
        copied = tuple(array.filter(pa.array(keep)) for array in copied)
    return Block(labels, weights, dense, categorical, raw.position, lines, copied, times, scores)


def _copied(column: pa.ChunkedArray) -> pa.Array:
    return plain(column) if pa.types.is_dictionary(column.type) else joined(column)


def _targets(
    columns: dict[str, pa.Array], schema: Schema, faults: Faults, num_rows: int
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Labels and weights; NaN where the schema does not read them."""
    labels = np.full((len(schema.labels), num_rows), np.nan, np.float32)
    weights = None if schema.weight is None else np.full(num_rows, np.nan, np.float32)
    if schema.is_labelled:
        for row, label in zip(labels, schema.labels, strict=True):
            row[:] = _label(columns[label.name], label, faults)
        if schema.weight is not None:
            weights = _weights(columns[schema.weight], schema.weight, faults)
    return labels, weights


def _label(column: pa.Array, label: Label, faults: Faults) -> NDArray[np.float32]:
    numbers = _numbers(column, label.name, faults)
    values = transform_dense(numbers, "none")
    if label.kind == "value":
        faults.add(np.flatnonzero(~np.isfinite(values)), label.name, column, "not a finite number")
        return values
    found = np.flatnonzero((numbers != 0) & (numbers != 1))
    # The setting is named where it would help: not beside a missing label.
    others = np.isfinite(numbers[found])
    faults.add(found[~others], label.name, column, "not 0 or 1")
    faults.add(found[others], label.name, column, f"not 0 or 1; {_declared(label.name)}")
    return values


def _declared(name: str) -> str:
    return f'a label of other numbers is label = {{ name = "{name}", kind = "value" }} in the schema'


def _weights(column: pa.Array, name: str, faults: Faults) -> NDArray[np.float32]:
    values = transform_dense(_numbers(column, name, faults), "none")
    bad = ~np.isfinite(values) | (values < 0)
    faults.add(np.flatnonzero(bad), name, column, "not a weight: a finite number, 0 or more")
    return values


def _dense(columns: dict[str, pa.Array], schema: Schema, faults: Faults, num_rows: int) -> NDArray[np.float32]:
    """Transformed dense values `[n, number of dense features]`; missing ones are NaN."""
    dense = np.empty((num_rows, len(schema.dense)), dense_dtype(schema))
    for i, name in enumerate(schema.dense):
        column = columns[name]
        numbers = _numbers(column, name, faults)
        missing = _missing(column)
        values = transform_dense(numbers, schema.dense_transform)
        is_finite = np.isfinite(numbers) & np.isfinite(values)  # log1p makes 0 of −∞; float32 makes ∞ of 1e39
        faults.add(np.flatnonzero(~is_finite & ~missing), name, column, "not a finite number")
        kept = numbers if dense.dtype == np.float64 else values
        dense[:, i] = np.where(missing | ~is_finite, np.nan, kept)
    return dense


def _missing(column: pa.Array) -> NDArray[np.bool_]:
    null = pc.is_null(column)
    if is_text(column.type):
        null = pc.or_kleene(null, pc.equal(pc.binary_length(column), 0))
    return null.to_numpy(zero_copy_only=False)


def _numbers(column: pa.Array, name: str, faults: Faults) -> NDArray[np.float64]:
    """float64 values; NaN where missing or no number (the latter recorded)."""
    values, bad = floats_of(column)
    faults.add(bad, name, column, "not a number")
    return values


def _ids(column: pa.Array, feature: Categorical, faults: Faults) -> pa.Array:
    if feature.derive is not None:
        return _derive(column, feature, faults)
    if is_list(column.type):
        list_of = pa.large_list if pa.types.is_large_list(column.type) else pa.list_
        return column.cast(list_of(id_type(column.type.value_type)))
    ids = column.cast(id_type(column.type))
    if feature.separator is not None and is_text(ids.type):
        return pc.split_pattern(pc.if_else(pc.equal(pc.binary_length(ids), 0), None, ids), feature.separator)
    return ids


def _times(column: pa.Array, schema: Schema, faults: Faults) -> NDArray[np.int64]:
    """Seconds since 1970."""
    found = of_times(column, schema.time_format, SECONDS)
    bad = np.flatnonzero(pc.is_null(found).to_numpy(zero_copy_only=False))
    faults.add(bad, str(schema.time), column, f"not a time like {schema.time_format}")
    return found.fill_null(0).to_numpy()


def _scores(column: pa.Array, name: str | None, faults: Faults) -> NDArray[np.int64]:
    numbers, _ = parse_numbers(column, pa.int64())
    bad = np.flatnonzero(pc.is_null(numbers).to_numpy(zero_copy_only=False))
    faults.add(bad, str(name), column, "not a score: a whole number of 64 bits")
    return numbers.fill_null(0).to_numpy()


def _derive(column: pa.Array, feature: Categorical, faults: Faults) -> pa.Array:
    """Ids from times."""
    ids = of_times(column, feature.time_format, HOUR if feature.derive == "hour_of_day" else WEEKDAY)
    bad = np.flatnonzero(pc.is_null(ids).to_numpy(zero_copy_only=False) & ~_missing(column))
    faults.add(bad, feature.source, column, f"not a time like {feature.time_format}")
    return ids

"""Parquet files as a stream of tables, and what their columns may hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowmesh._support.files.regular import check_regular
from rowmesh.data.plain_columns import is_list, is_text, plain_type
from rowmesh.data.scalars import shown
from rowmesh.data.schema import Categorical, Schema
from rowmesh.data.source import RawTable, check_columns
from rowmesh.errors import DataError

PARQUET_ROWS = 65_536

Form = tuple[bool | None, str | None]
"""Whether a column holds lists, and of what ("integers" or "text"); None where its type does not determine it."""


def read_parquet(path: Path, schema: Schema) -> Iterator[RawTable]:
    """Tables of the columns that the schema reads.

    Raises:
        DataError: the file is not Parquet, lacks a column, or holds a type that cannot be used.
    """
    position = 0
    for table in read_tables(path, schema, lambda types: column_forms(path, schema, types)):
        lines = np.arange(position + 1, position + 1 + table.num_rows)
        position += table.num_rows
        yield RawTable(table, lines, row_text(table), position)


def read_tables(path: Path, schema: Schema, check: Callable[[pa.Schema], object]) -> Iterator[pa.Table]:
    """The columns that the schema reads, at most `PARQUET_ROWS` at a time.

    Args:
        path: the file.
        schema: names the columns.
        check: is called with the types of the file's columns before any row is read.

    Raises:
        DataError: the file is not Parquet, or cannot be read.
    """
    try:
        with _mapped(path) as source, pq.ParquetFile(source) as file:
            check(file.schema_arrow)
            columns = list(schema.source_columns)
            # Arrow reads no batch of nested dictionaries that goes beyond a row group.
            nested = any(_has_nested_dictionary(file.schema_arrow.field(name).type) for name in columns)
            for groups in [[i] for i in range(file.num_row_groups)] if nested else [None]:
                for batch in file.iter_batches(PARQUET_ROWS, row_groups=groups, columns=columns):
                    yield pa.Table.from_batches([batch])
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from error


def _has_nested_dictionary(kind: pa.DataType) -> bool:
    fields = [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_nested(kind) else []
    return any(pa.types.is_dictionary(field.type) or _has_nested_dictionary(field.type) for field in fields)


def num_rows(path: Path) -> int:
    """How many rows a file has."""
    try:
        with _mapped(path) as source:
            return pq.read_metadata(source).num_rows
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from error


def multi_hot_columns(files: Sequence[Path], schema: Schema) -> tuple[bool, ...]:
    """Which categorical features hold lists, from the types of all files, which have to agree.

    A column without a single value, which other programs write as of type null, agrees with all.

    Raises:
        DataError: a file cannot be read, a column is missing, its type cannot be used, or it holds lists
            (or integers) in one file and single ids (or text) in another.
    """
    known = KnownForms(schema)
    for path in files:
        known.add(path, read_forms(path, schema))
    return known.multi_hot


class KnownForms:
    """The forms of categorical columns that files, which have to agree, have shown so far.

    A column without a single value, which other programs write as of type null, agrees with all.

    Args:
        schema: which columns.
    """

    def __init__(self, schema: Schema) -> None:
        self._features = schema.categorical
        self._known: list[list[tuple[Path | str, bool | str] | None]] = [[None, None] for _ in self._features]

    def add(self, place: Path | str, forms: Sequence[Form]) -> None:
        """Takes in the forms that a file has, which is named in errors about later ones.

        Raises:
            DataError: they differ from those of a place before, or features that share a vocabulary differ; names the
                places and the columns.
        """
        for feature, known, form in zip(self._features, self._known, forms, strict=True):
            for part, value in enumerate(form):
                if value is None:
                    continue
                before, expected = known[part] or (place, value)
                if value != expected:
                    raise DataError(
                        f"{place}: column {feature.source!r} holds {_words(part, value)}, in {before} it holds "
                        f"{_words(part, expected)}; store it in one way everywhere"
                    )
                known[part] = before, expected
        self._check_shared()

    def _check_shared(self) -> None:
        """Refuses integers and text in one vocabulary: a value would have an id as each."""
        by_table: dict[str, tuple[Categorical, Path | str, bool | str]] = {}
        for feature, (_, found) in zip(self._features, self._known, strict=True):
            if found is None:
                continue
            place, kind = found
            first, first_place, expected = by_table.setdefault(feature.table, (feature, place, kind))
            if kind != expected:
                raise DataError(
                    f"{place}: column {feature.source!r} of feature {feature.name!r} holds {kind}, and column "
                    f"{first.source!r} of feature {first.name!r}, which shares its vocabulary, holds {expected}"
                    f"{'' if place == first_place else f' in {first_place}'}: one value would have two ids. Store both "
                    "in one way"
                )

    def take_unknown_as_single(self, place: Path | str) -> None:
        """Columns of which nothing says whether they hold lists hold single ids from now on."""
        self.add(place, [(False if form[0] is None else None, None) for form in self.forms])

    @property
    def forms(self) -> tuple[Form, ...]:
        """The form of each categorical feature, as far as it is known."""
        return tuple(
            (None if is_list is None else bool(is_list[1]), None if kind is None else str(kind[1]))
            for is_list, kind in self._known
        )

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left that a file could add."""
        return all(None not in known for known in self._known)

    @property
    def multi_hot(self) -> tuple[bool, ...]:
        """By feature, whether its column holds lists; those of which that is not known hold single ids."""
        return tuple(bool(is_list) for is_list, _ in self.forms)


def id_type(kind: pa.DataType) -> pa.DataType:
    """The type in which ids of a plain type are taken: integers, text, or null where there is none."""
    if pa.types.is_boolean(kind):
        return pa.int64()
    if pa.types.is_null(kind) or pa.types.is_integer(kind) or is_text(kind):
        return kind
    return pa.string()


def read_forms(path: Path, schema: Schema) -> list[Form]:
    """As `column_forms`, of a file."""
    return column_forms(path, schema, read_types(path))


def read_types(path: Path) -> pa.Schema:
    """The names and types of a file's columns.

    Raises:
        DataError: the file is not Parquet, or cannot be read.
    """
    try:
        with _mapped(path) as source:
            return pq.read_schema(source)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from error


def column_forms(path: Path, schema: Schema, types: pa.Schema) -> list[Form]:
    """The form of every categorical feature, after checking that all columns can be used.

    Raises:
        DataError: a column is missing, or of a type that cannot be used; names it and `path`.
    """
    check_columns(path, schema, types.names)
    for name in schema.target_columns + schema.dense:
        check_numbers(path, name, types)
    if schema.time in schema.rule_columns:
        check_times(path, schema.time, types)
    if schema.score in schema.rule_columns:
        check_numbers(path, schema.score, types)
    for feature in schema.categorical:
        if feature.derive is not None:
            check_times(path, feature.source, types)
    return [_form(path, feature, types.field(feature.source).type) for feature in schema.categorical]


def check_numbers(path: Path, name: str, types: pa.Schema) -> None:
    """Raises DataError where a column can hold no numbers."""
    kind = types.field(name).type
    if not is_text(plain_type(kind)) and not _can_cast(plain_type(kind), pa.float64()):
        raise DataError(f"{path}: column {name!r} of type {kind} holds no numbers")


def check_times(path: Path, name: str, types: pa.Schema) -> None:
    """Raises DataError where a column can hold no times."""
    kind = plain_type(types.field(name).type)
    tests = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    if not is_text(kind) and not pa.types.is_null(kind) and not any(test(kind) for test in tests):
        raise DataError(
            f"{path}: column {name!r} of type {types.field(name).type} holds no times; store it as timestamps, dates, "
            "numbers or text"
        )


def _form(path: Path, feature: Categorical, given: pa.DataType) -> Form:
    if feature.derive is not None:  # of times, which were checked
        return False, "integers"
    kind = plain_type(given)
    values = kind.value_type if is_list(kind) else kind
    if pa.types.is_floating(values) or pa.types.is_nested(values) or not _can_cast(values, id_type(values)):
        raise DataError(
            f"{path}: column {feature.source!r} is categorical but of type {given}; "
            "store its ids as integers, strings, or lists of them"
        )
    name = None if pa.types.is_null(values) else "integers" if pa.types.is_integer(id_type(values)) else "text"
    if feature.separator is None:
        return (None if pa.types.is_null(kind) else is_list(kind)), name
    if is_list(kind) or name == "integers":
        raise DataError(
            f"{path}: column {feature.source!r} has a separator but is of type {given}; "
            "leave the separator out of the schema"
        )
    return True, name


def _can_cast(kind: pa.DataType, goal: pa.DataType) -> bool:
    try:
        pa.array([], kind).cast(goal)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return False
    return True


def _words(part: int, value: bool | str) -> str:
    if part == 1:
        return str(value)
    return "lists" if value else "single ids"


def row_text(table: pa.Table) -> Callable[[int], str]:
    names = table.column_names
    return lambda row: json.dumps({name: shown(table.column(name)[row]) for name in names}, default=str)


def _mapped(path: Path) -> pa.MemoryMappedFile:
    check_regular(path)
    return pa.memory_map(os.fsencode(path))  # Arrow takes no path whose name is not UTF-8, but takes its bytes


def unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: cannot be read as Parquet: {error}")

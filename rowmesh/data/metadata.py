"""What `metadata.json` may say: read from bytes, checked key by key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rowmesh.data.schema import Schema
from rowmesh.errors import ConfigurationError, DataError

FORMAT_VERSION = 1
SPLITS = ("train", "validation", "test")
MAX_ROWS = 2**31 - 1  # rows are stored as int32

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def check_optimum(scores: dict[str, float]) -> dict[str, float]:
    """The scores of an optimum, if those are there that are shown."""
    if lost := {"auc", "log_loss"} - set(scores):
        raise ValueError(f"lacks {', '.join(sorted(lost))}")
    return scores


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Table(_Section):
    name: str
    num_rows: Annotated[int, Field(ge=1, le=MAX_ROWS)]
    multi_hot: bool
    num_distinct: Count
    rare_share: dict[str, Share]


class _Split(_Section):
    samples: Count
    positive_rate: Share | None
    optimum: Annotated[dict[str, Finite], AfterValidator(check_optimum)] | None = None
    label_means: dict[str, Finite]


class _Scale(_Section):
    name: str
    log1p: bool
    mean: Finite
    std: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    missing: dict[str, Share]


class _Order(_Section):
    model_config = ConfigDict(strict=True, extra="allow")

    first: Count
    num_ids: Count


class _Reordering(_Section):
    options: dict[str, Any]
    tables: dict[str, _Order]


class _Metadata(_Section):
    format_version: int
    rowmesh_version: str
    splits: Annotated[dict[Literal["train", "validation", "test"], _Split], Field(min_length=1)]
    tables: Annotated[list[_Table], Field(min_length=1)]
    min_count: Annotated[int, Field(ge=1)]
    bad_rows: Count
    block_samples: Annotated[int, Field(ge=1, le=MAX_ROWS)]
    sources: dict[str, list[str]]
    columns: Annotated[dict[str, Any], Field(alias="schema")]
    dense_scales: list[_Scale] | None = None
    reordering: _Reordering | None = None


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """The values of a JSON file.

    Raises:
        DataError: it is none, or of another format version.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); prepare the data again") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: holds a {type(values).__name__} and no keys; prepare the data again")
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path.parent}: prepared in format {version} ({path.name}: format_version), this rowmesh reads format "
            f"{FORMAT_VERSION}; prepare the data again"
        )
    return values


def check(values: dict[str, Any], path: Path) -> Schema:
    """Checks every value of a `metadata.json`; returns the schema, which it holds too.

    Raises:
        DataError: a key is missing, unknown, or has a value that it cannot have; names file and key.
    """
    try:
        metadata = _Metadata.model_validate(values)
    except ValidationError as error:
        item = error.errors()[0]
        raise _refusal(path, item["loc"], item["msg"].removeprefix("Value error, ")) from None
    try:
        schema = Schema.parse(metadata.columns)
    except ConfigurationError as error:
        raise _refusal(path, ["schema"], str(error)) from None
    _check_tables(metadata, schema, path)
    for name, split in metadata.splits.items():
        _check_labels(split, schema, path, name)
    is_scaled = bool(schema.dense) and schema.dense_transform == "standardize"
    if [scale.name for scale in metadata.dense_scales or ()] != list(schema.dense if is_scaled else ()):
        raise _refusal(path, ["dense_scales"], "their names are not those of the standardized features of the schema")
    return schema


def _check_tables(metadata: _Metadata, schema: Schema, path: Path) -> None:
    names = [table.name for table in metadata.tables]
    if names != list(schema.features):
        raise _refusal(path, ["tables"], "their names are not those of the categorical features of the schema")
    rows = {table.name: table.num_rows for table in metadata.tables}
    for name in names:
        if rows[name] != rows[schema.table_of(name)]:
            message = f"not that of {schema.table_of(name)!r}, whose table it has"
            raise _refusal(path, ["tables", name, "num_rows"], message)
    orders = metadata.reordering.tables if metadata.reordering else {}
    for name, order in orders.items():
        if name not in names:
            raise _refusal(path, ["reordering", "tables", name], "there is no such table")
        if order.first + order.num_ids >= metadata.tables[names.index(name)].num_rows:
            raise _refusal(path, ["reordering", "tables", name], "first and num_ids lead past the last row")


def _check_labels(split: _Split, schema: Schema, path: Path, name: str) -> None:
    if (split.positive_rate is None) != (schema.labels[0].kind != "binary"):
        raise _refusal(path, ["splits", name, "positive_rate"], "there is one where the first label is of 0 and 1")
    if list(split.label_means) != list(schema.label_names):
        raise _refusal(path, ["splits", name, "label_means"], "their names are not those of the labels of the schema")


def _refusal(path: Path, keys: Sequence[int | str], message: str) -> DataError:
    key = ".".join(str(each) for each in keys) or "the file"
    return DataError(f"{path}: {key}: {message}; the file was changed since it was written: prepare the data again")

"""RawTable: rows as a reader found them, and what is wrong with a file that lacks a column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmesh._support.suggest import hint
from rowmesh.data.schema import Schema
from rowmesh.errors import DataError

MAX_SHOWN = 1000


@dataclass(frozen=True)
class RawTable:
    """Some rows of a file, before any check of their values.

    Attributes:
        table: the columns the schema reads; those of text files are binary.
        lines: int64 `[n]`, the 1-based line of every row (the row number in Parquet).
        text: the i-th row as it stands in the file, for the quarantine.
        position: how many bytes (rows in Parquet) of the file have been read so far.
    """

    table: pa.Table
    lines: NDArray[np.int64]
    text: Callable[[int], bytes | str]
    position: int


def check_columns(path: Path, schema: Schema, found: Sequence[str]) -> None:
    """Raises DataError, naming the columns, where the file lacks one that the schema reads, or has it twice."""
    for column in schema.source_columns:
        if column not in found:
            is_whole_line = schema.format == "text" and len(found) == 1
            suggestion = f"; is the delimiter {schema.delimiter!r} right?" if is_whole_line else hint(column, found)
            raise DataError(f"{path}: column {column!r} is missing{suggestion} (the file has: {_shown(found)})")
    if twice := sorted({name for name in schema.source_columns if found.count(name) > 1}):
        raise DataError(f"{path}: the file names {', '.join(twice)} more than once; rename one of them, or drop it")


def _shown(names: Sequence[str]) -> str:
    """Some names, without what a terminal would take for commands."""
    text = ", ".join(name if name.isprintable() else repr(name) for name in names)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"

"""The first step: event tables to coded events on disk, one after the other."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmesh.data.events.schema import EventSchema
from rowmesh.data.numbers import floats_of
from rowmesh.data.parquet import check_numbers, check_times, column_forms, read_types
from rowmesh.data.plain_columns import plain
from rowmesh.data.progress import Progress
from rowmesh.data.quarantine import BadRows
from rowmesh.data.reader import Faults, read_blocks, total_size
from rowmesh.data.scalars import shown
from rowmesh.data.schema import UNIX_TIME, ScoringSchema
from rowmesh.data.times import MICROSECONDS, is_time, of_times
from rowmesh.data.vocabulary import Vocabulary
from rowmesh.errors import DataError

EVENT = np.dtype([("user", np.int32), ("item", np.int32), ("time", np.int64)])
"""A coded event without side columns; the time is in microseconds."""

BLOCK_EVENTS = 1 << 18
_MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1}
_LATEST = 2**53  # whole numbers beyond it are not exact as float64: in microseconds, the year 2255


@dataclass
class CodedEvents:
    """Events on disk whose users and items are codes, in the order of the files.

    Attributes:
        path: an array of `dtype`.
        users, items: what the codes stand for.
        side: of each side column what its codes stand for.
        num_events: that are there.
        num_negative: events that the schema does not count, which were left out.
    """

    path: Path
    users: Vocabulary = field(default_factory=lambda: Vocabulary("user"))
    items: Vocabulary = field(default_factory=lambda: Vocabulary("item"))
    side: dict[str, Vocabulary] = field(default_factory=dict)
    num_events: int = 0
    num_negative: int = 0

    @property
    def dtype(self) -> np.dtype:
        """EVENT, and a field `side` of a code for each side column where there are any."""
        more = [("side", np.int32, (len(self.side),))] if self.side else []
        return np.dtype([*EVENT.descr, *more])

    def blocks(self) -> Iterator[NDArray[np.void]]:
        """The events, `BLOCK_EVENTS` at a time."""
        with self.path.open("rb") as file:
            while data := file.read(BLOCK_EVENTS * self.dtype.itemsize):
                yield np.frombuffer(data, self.dtype)


def read_events(
    files: Sequence[Path], path: Path, schema: EventSchema, quarantine: BadRows, progress: Progress
) -> CodedEvents:
    """Reads files in order; rows without a user, an item or a time go to the quarantine.

    Raises:
        DataError: a file cannot be read, lacks a column, holds one of a type that cannot be, or has too many bad rows.
    """
    events, reading = CodedEvents(path, side={name: Vocabulary(name) for name in schema.side}), schema.reading()
    if schema.format == "parquet":
        _check_types(files, schema, reading)
    with path.open("wb") as out:
        for source in files:
            size = max(total_size(source, reading), 1)
            for block in read_blocks(source, reading, quarantine):
                columns = dict(zip(reading.copied_columns, map(plain, block.copied), strict=True))
                users, items, *side = block.categorical
                faults, counts = Faults(), np.ones(len(block.lines), np.bool_)
                faults.add(_missing(users), schema.user, users, "not a user")
                faults.add(_missing(items), schema.item, items, "not an item")
                times, has_time = _times(columns[schema.time], schema)
                what = f"not a time like {schema.time_format}"
                faults.add(np.flatnonzero(~has_time), schema.time, columns[schema.time], what)
                if schema.positive is not None:
                    name = schema.positive.column
                    values, is_number = _numbers(columns[name])
                    faults.add(np.flatnonzero(~is_number), name, columns[name], "not a number")
                    counts = values >= schema.positive.minimum
                good = np.ones(len(counts), np.bool_)
                for row, reason in sorted(faults.reasons.items()):
                    good[row] = False
                    text = ", ".join(str(shown(values[row])) for values in (users, items, columns[schema.time]))
                    quarantine.add(source, int(block.lines[row]), reason, text)
                kept = np.flatnonzero(good & counts)
                coded = np.empty(len(kept), events.dtype)
                coded["user"], coded["item"] = _codes(events.users, users, kept), _codes(events.items, items, kept)
                coded["time"] = times[kept]
                for number, (vocabulary, values) in enumerate(zip(events.side.values(), side, strict=True)):
                    coded["side"][:, number] = _codes(vocabulary, values, kept)
                out.write(coded.tobytes())
                events.num_events += len(kept)
                events.num_negative += int((good & ~counts).sum())
                progress(f"read {source.name}", block.position / size)
    return events


def _check_types(files: Sequence[Path], schema: EventSchema, reading: ScoringSchema) -> None:
    """Raises DataError where a column of a Parquet file is of a type that cannot be used."""
    for path in files:
        types = read_types(path)
        for feature, (holds_lists, _) in zip(reading.categorical, column_forms(path, reading, types), strict=True):
            if holds_lists:
                raise DataError(
                    f"{path}: column {feature.source!r} holds lists ({types.field(feature.source).type}), and an event "
                    "has one value of each column; store one event a row"
                )
        check_times(path, schema.time, types)
        if schema.positive is not None:
            check_numbers(path, schema.positive.column, types)


def _codes(vocabulary: Vocabulary, values: pa.Array, rows: NDArray[np.int64]) -> NDArray[np.int32]:
    return vocabulary.encode(values.take(pa.array(rows)))


def _missing(values: pa.Array) -> NDArray[np.int64]:
    """The rows of ids that are not there."""
    valid = values.is_valid()
    if not pa.types.is_integer(values.type) and not pa.types.is_null(values.type):
        valid = pc.and_(valid, pc.greater(pc.binary_length(values), 0).fill_null(False))
    return np.flatnonzero(~valid.to_numpy(zero_copy_only=False))


def _times(column: pa.Array, schema: EventSchema) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Microseconds since 1970, and which of them are known."""
    if schema.time_format != UNIX_TIME or is_time(column.type):
        found = of_times(column, schema.time_format, MICROSECONDS)
        return found.fill_null(0).to_numpy(), found.is_valid().to_numpy(zero_copy_only=False)
    values, valid = _numbers(column)
    with np.errstate(over="ignore"):  # what is too large is no time
        scaled = values * _MICROSECONDS[schema.time_unit]
    valid &= np.abs(scaled) < _LATEST
    return np.where(valid, scaled, 0).astype(np.int64), valid


def _numbers(column: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """A column as numbers, 0 where it holds none, and where it holds one."""
    values, _ = floats_of(column)
    finite = np.isfinite(values)
    return np.where(finite, values, 0.0), finite

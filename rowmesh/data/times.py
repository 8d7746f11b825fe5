"""of_times: numbers from a column of times, whether they are text in some format, dates or timestamps."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmesh.data.numbers import floats_of
from rowmesh.data.plain_columns import is_text
from rowmesh.data.schema import UNIX_TIME

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799  # the years 1 to 9999, as Python's datetime
_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_WIDTHS = {"Y": 4, "m": 2, "d": 2, "H": 2, "M": 2, "S": 2}


@dataclass(frozen=True)
class TimeNumber:
    """A number that a time has.

    Attributes:
        of_time: from one time.
        of_column: int64, from a column of timestamps.
    """

    of_time: Callable[[datetime.datetime], int]
    of_column: Callable[[pa.Array], pa.Array]


def _in_unit(unit: str) -> Callable[[pa.Array], pa.Array]:
    return lambda times: times.cast(pa.timestamp(unit, times.type.tz), safe=False).cast(pa.int64())


SECONDS = TimeNumber(lambda time: int(time.timestamp()), _in_unit("s"))
"""Since 1970, UTC."""
MICROSECONDS = TimeNumber(lambda time: (time - _EPOCH) // _MICROSECOND, _in_unit("us"))
"""Since 1970, UTC."""
HOUR = TimeNumber(lambda time: time.hour, lambda times: pc.hour(times).cast(pa.int64()))
"""0 to 23, in the zone of the time, which is UTC unless it says otherwise."""
WEEKDAY = TimeNumber(lambda time: time.weekday(), lambda times: pc.day_of_week(times).cast(pa.int64()))
"""0 is Monday; in the zone of the time."""


def is_time(kind: pa.DataType) -> bool:
    """Whether a type is that of dates or timestamps, which need no format."""
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def of_times(column: pa.Array, time_format: str, number: TimeNumber) -> pa.Array:
    """A number of each time: int64, null where there is no time, or none of the years 1 to 9999.

    Args:
        column: dates or timestamps, which are taken as they are; or text, or what can be text.
        time_format: of text: directives of `strptime`, or "unix" for seconds since 1970.
        number: which.

    Example:
        >>> of_times(pa.array(["2024-02-29", "2024-02-30"]), "%Y-%m-%d", WEEKDAY).to_pylist()
        [3, None]
        >>> of_times(pa.array([1], pa.timestamp("ms")), "unix", MICROSECONDS).to_pylist()
        [1000]
    """
    if is_time(column.type):
        return number.of_column(_within_years(column))
    text = (column if is_text(column.type) else column.cast(pa.string())).dictionary_encode()
    return _of_text(text.dictionary.cast(pa.large_binary()), time_format, number).take(text.indices)


def _within_years(column: pa.Array) -> pa.Array:
    """Timestamps; null outside the years 1 to 9999, where casts would overflow."""
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("ms"))
    per_s, limits = _PER_S[column.type.unit], np.iinfo(np.int64)
    first, last = max(_FIRST_S * per_s, int(limits.min)), min((_LAST_S + 1) * per_s - 1, int(limits.max))
    numbers = column.cast(pa.int64())
    is_within = pc.and_(pc.greater_equal(numbers, first), pc.less_equal(numbers, last))
    return pc.if_else(is_within, column, pa.scalar(None, column.type))


def _of_text(values: pa.Array, time_format: str, number: TimeNumber) -> pa.Array:
    """The numbers of distinct texts: texts of fixed width are parsed all at once, the others one by one."""
    found = number.of_column(_of_fixed_width(values, time_format))
    numbers = found.fill_null(0).to_numpy().copy()
    is_known = found.is_valid().to_numpy(zero_copy_only=False).copy()
    rest = np.flatnonzero(~is_known)
    for row, time in zip(rest.tolist(), _times_of(values.take(pa.array(rest)), time_format), strict=True):
        if time is not None:
            numbers[row], is_known[row] = number.of_time(time), True
    return pa.array(numbers, mask=~is_known)


def _times_of(values: pa.Array, time_format: str) -> list[datetime.datetime | None]:
    """In UTC unless they have a zone; None where one is no time."""
    if time_format == UNIX_TIME:
        return [_from_seconds(seconds) for seconds in floats_of(values)[0].tolist()]
    return [_parsed(value, time_format) for value in values.to_pylist()]


def _from_seconds(seconds: float) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError):  # no number, or one that is no time
        return None


def _parsed(value: bytes, time_format: str) -> datetime.datetime | None:
    try:
        time = datetime.datetime.strptime(value.decode("utf-8", "replace"), time_format)
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=datetime.UTC)


# [Note: times of fixed width] strptime takes 5 µs and more for each time, and a log has about as many distinct times as
# rows. Where a format is made of year, month, day and perhaps hour, minute and second, and a text has all their digits,
# each has one place: numpy computes all of them. Other texts, and those whose digits are no time, go to strptime.


@cache
def _places(time_format: str) -> tuple[dict[str, int], dict[int, bytes], int] | None:
    """Where each directive begins, what stands between them, and the width; None where a format has none of its own."""
    directives: dict[str, int] = {}
    literals: dict[int, bytes] = {}
    width = 0
    between, *found = re.split(r"%(.)", time_format, flags=re.DOTALL)
    for directive, literal in (("", between), *zip(found[::2], found[1::2], strict=True)):
        if directive:
            if directive not in _WIDTHS or directive in directives:
                return None
            directives[directive] = width
            width += _WIDTHS[directive]
        literals[width] = literal.encode()
        width += len(literals[width])
    return (directives, literals, width) if {"Y", "m", "d"} <= directives.keys() else None


def _of_fixed_width(values: pa.Array, time_format: str) -> pa.Array:
    """The times of texts that have a format's own width; null for all others."""
    seconds, is_known = np.zeros(len(values), np.int64), np.zeros(len(values), np.bool_)
    if (places := _places(time_format)) is not None:
        directives, literals, width = places
        rows = np.flatnonzero(pc.equal(pc.binary_length(values), width).fill_null(False).to_numpy(zero_copy_only=False))
        if len(rows):
            text = np.frombuffer(b"".join(values.take(pa.array(rows)).to_pylist()), np.uint8).reshape(-1, width)
            seconds[rows], is_known[rows] = _seconds(text, directives, literals)
    return pa.array(seconds, mask=~is_known).cast(pa.timestamp("s"))


def _seconds(
    text: NDArray[np.uint8], directives: dict[str, int], literals: dict[int, bytes]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Seconds since 1970 of texts `[n, width]`, and which of them are times."""
    is_time = np.ones(len(text), np.bool_)
    for begin, literal in literals.items():
        is_time &= (text[:, begin : begin + len(literal)] == np.frombuffer(literal, np.uint8)).all(1)
    field = dict.fromkeys(_WIDTHS, np.zeros(len(text), np.int64))
    for directive, begin in directives.items():
        digits = text[:, begin : begin + _WIDTHS[directive]].astype(np.int64) - ord("0")
        is_time &= ((digits >= 0) & (digits <= 9)).all(1)
        field[directive] = digits @ 10 ** np.arange(_WIDTHS[directive])[::-1]
    months = (field["Y"] - 1970) * 12 + field["m"] - 1
    first, next_first = (
        number.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) for number in (months, months + 1)
    )
    is_time &= (field["Y"] >= 1) & (field["m"] >= 1) & (field["m"] <= 12)
    is_time &= (field["d"] >= 1) & (field["d"] <= next_first - first)
    is_time &= (field["H"] < 24) & (field["M"] < 60) & (field["S"] < 60)
    days = first + field["d"] - 1
    return ((days * 24 + field["H"]) * 60 + field["M"]) * 60 + field["S"], is_time

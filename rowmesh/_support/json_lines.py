"""JSON lines: one record a line, on disk as soon as it is written."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rowmesh._support.records import RecordFile

_TAIL_BYTES = 1 << 16  # more than a line has


class JsonLines:
    """Writes records to a file, one JSON object a line, each at once.

    A line that cannot be written is counted and said, see `RecordFile`, and never there in part.

    Args:
        path: the file; None writes nothing, so that every rank can hold a writer and one writes.
        log: receives a message when lines are lost; by default rowmesh's log.
        goes_on: whether lines follow those that are in the file; else it is made anew.

    Example:
        >>> with JsonLines(None) as lines:
        ...     lines.write(step=1, loss=0.5)
    """

    def __init__(self, path: Path | None, log: Callable[[str], None] | None = None, *, goes_on: bool = False) -> None:
        self._file = None if path is None else RecordFile(path, *([log] if log else []), goes_on=goes_on)

    def write(self, **record: Any) -> None:
        """Writes one record; NaN and infinities, which JSON does not have, become null."""
        if self._file is not None:
            line = json.dumps({key: _json_value(value) for key, value in record.items()}) + "\n"
            self._file.append(line.encode())

    def sync(self) -> None:
        """Waits until the lines are on disk."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def cut_after(path: Path, step: int) -> None:
    """Cuts off the lines of steps after `step`, and one that a crash left in part; nothing where there is no file.

    Steps must not fall from line to line. The file is cut in one call: after a crash amid it, it has all lines or those
    up to `step`.
    """
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return
    with file:
        end = file.seek(0, os.SEEK_END)
        if end == 0:
            return
        with mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as mapped:
            while end:
                begin = mapped.rfind(b"\n", 0, end - 1) + 1
                if _is_up_to(mapped[begin:end], step):
                    break
                end = begin
        file.truncate(end)
        os.fsync(file.fileno())


def last_step(path: Path) -> int:
    """The step of the last whole line; 0 where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    whole = [line for line in lines if line.endswith(b"\n")]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def _is_up_to(line: bytes, step: int) -> bool:
    """Whether it is a whole line, of a step not after `step`."""
    if not line.endswith(b"\n"):
        return False
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False


def utc_text(moment: datetime | None = None) -> str:
    """A moment (now) as ISO 8601 in UTC, to the millisecond.

    >>> utc_text(datetime(2026, 3, 1, 12, 30, 5, 250_000, tzinfo=UTC))
    '2026-03-01T12:30:05.250Z'
    """
    moment = (moment or datetime.now(UTC)).astimezone(UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json_value(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Standard output and error that end no command, whatever they lead to.

The work of a command is worth more than its output: a run whose terminal is closed, or whose output goes through
`head`, goes on in silence. Characters that an encoding lacks are written in ASCII.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import sys
from typing import Any

PLAIN = "rowmesh.plain"
"""How errors of encoding are handled, to Python's codecs."""
_NAMES = {"stdout": "standard output", "stderr": "standard error"}
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EIO)  # the reader ended; EIO of a terminal
_DEFAULTS = ("strict", "surrogateescape", "backslashreplace")  # Python's own: other ways are the user's choice
_ASCII = {"×": "x", "·": "*", "…": "...", "→": "->", "←": "<-", "≥": ">=", "≤": "<=", "−": "-", "–": "-", "µ": "u"}
_lost: dict[str, OSError] = {}


def lasting_streams() -> None:
    """Lets `sys.stdout` and `sys.stderr` go on without an error after their reader has ended."""
    codecs.register_error(PLAIN, _plainly)
    _fill_descriptors()
    if os.environ.get("COLUMNS") == "0":  # some environments write 0 for unknown; rich would print nothing
        del os.environ["COLUMNS"]
    for name in _NAMES:
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - as long as the process
        elif stream is getattr(sys, f"__{name}__") and not isinstance(_raw(stream), _LastingFile):
            setattr(sys, name, _lasting(stream, name))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in _DEFAULTS:
            stream.reconfigure(errors=PLAIN)


def lost() -> str | None:
    """Which stream is incomplete and why, unless its reader has ended; flushes them first."""
    for name in _NAMES:
        if (stream := getattr(sys, name)) is not None:
            stream.flush()
    for name, error in _lost.items():
        return f"{_NAMES[name]} is incomplete: {error.strerror}"
    return None


class _LastingFile(io.FileIO):
    """A descriptor that takes all bytes, also where they are lost."""

    def __init__(self, descriptor: int, stream: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._stream = stream

    def write(self, data: Any, /) -> int:
        try:
            while (number := super().write(data)) is None:  # a descriptor that does not block, and cannot take more now
                select.select([], [self], [])
            return number
        except OSError as error:
            if error.errno not in _GONE:
                _lost.setdefault(self._stream, error)
            return memoryview(data).nbytes


def _lasting(stream: Any, name: str) -> io.TextIOWrapper:
    """The same stream over a descriptor that lasts."""
    stream.flush()
    file = _LastingFile(stream.fileno(), name)
    file.name = stream.name
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=PLAIN if stream.errors in _DEFAULTS else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _raw(stream: Any) -> Any:
    return getattr(getattr(stream, "buffer", None), "raw", None)


def _fill_descriptors() -> None:
    """Opens 0, 1 and 2 where they are closed: else a file gets such a number, and what libraries print with it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(_ASCII.get(each) or ascii(each)[1:-1] for each in characters), error.end

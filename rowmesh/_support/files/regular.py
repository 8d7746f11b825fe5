"""Opening what must be a file: a pipe, a socket or a device in its place is an error, and is not waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)  # opening a pipe waits for a writer


def open_regular(path: str | Path, *, dir_fd: int | None = None) -> int:
    """A descriptor of a file, open for reading.

    Args:
        path: the file.
        dir_fd: of the folder from which a relative path leads.

    Raises:
        IsADirectoryError: it is a folder.
        OSError: it is no file, or cannot be opened.

    Example:
        >>> open_regular("/dev/null")
        Traceback (most recent call last):
        OSError: [Errno 22] a device, no file: '/dev/null'
    """
    descriptor = os.open(path, _FLAGS, dir_fd=dir_fd)
    try:
        _check(os.fstat(descriptor).st_mode, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: Path) -> None:
    """Raises OSError where a path leads to no file; for those that open it by themselves."""
    _check(path.stat().st_mode, path)


def why_no_file(path: Path) -> str:
    """Why a path leads to no file that could be read, in a few words; "" where it leads to one.

    >>> why_no_file(Path("/dev/null")), why_no_file(Path("/no/such"))
    ('a device, no file', 'no such file')
    """
    try:
        check_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return "no such file"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def read_regular(path: Path) -> bytes:
    """The content of a file.

    Raises:
        OSError: see `open_regular`.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def _check(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        what = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise OSError(errno.EINVAL, f"{what}, no file", str(path))

"""A log of records, each in the file whole or not at all; what cannot be written is counted, and ends nothing."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from rowmesh._support.faults import reach

_logger = logging.getLogger("rowmesh")
# Windows has no O_CLOEXEC, and without O_BINARY writes line ends of its own.
_FLAGS = os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class RecordFile:
    """Appends records to a file, on disk as soon as the system has them.

    A record that cannot be written (disk full, say) is lost, not the run: that is said once, and again with the number
    of lost records when there is room again, or at the end. No part of a lost record stays in the file.

    Args:
        path: the file.
        log: receives messages about lost records.
        goes_on: whether records follow those that are in the file; else it is made anew.

    Attributes:
        lost: records that are not in the file.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, log: Callable[[str], None] = _logger.warning, *, goes_on: bool = False) -> None:
        self._path, self._log = path, log
        self._descriptor = os.open(path, _FLAGS if goes_on else _FLAGS | os.O_TRUNC, 0o666)
        self._end = os.lseek(self._descriptor, 0, os.SEEK_END) if goes_on else 0  # of the last whole record
        self.lost = self._lost_since = 0
        self._is_open = True

    def append(self, record: bytes) -> None:
        """Writes one record behind the last."""
        try:
            reach("observe.write", self._path)
            self._write(record)
        except OSError as error:
            with contextlib.suppress(OSError):  # where it stays, the next record overwrites it
                os.ftruncate(self._descriptor, self._end)
            if not self._lost_since:
                self._log(f"cannot write {self._path}: {error.strerror}; training goes on without, until it can be")
            self.lost += 1
            self._lost_since += 1
        else:
            self._end += len(record)
            if self._lost_since:
                self._log(f"{self._path} can be written again; {self._lost_since:,} records before are lost")
                self._lost_since = 0

    def sync(self) -> None:
        """Waits until what is in the file is on disk, as far as the system lets it."""
        if self._is_open:
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        if self._lost_since:
            self._log(f"{self._path}: the last {self._lost_since:,} records could not be written and are lost")

    def _write(self, record: bytes) -> None:
        rest = memoryview(record)
        os.lseek(self._descriptor, self._end, os.SEEK_SET)
        while rest:  # a nearly full disk takes a part
            rest = rest[os.write(self._descriptor, rest) :]

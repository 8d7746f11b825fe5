"""exclusive: a lock file that one process holds at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from rowmesh.errors import RowmeshError


@contextlib.contextmanager
def exclusive(path: Path, refusal: str) -> Iterator[None]:
    """Holds the lock file `path`, made here and removed at the end; a crash releases it.

    Args:
        path: the lock file.
        refusal: what to say where another process holds it.

    Raises:
        RowmeshError: another process holds the lock.
    """
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise RowmeshError(refusal) from error
    try:
        held = path.stat()
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError, PermissionError):  # Windows removes no file that is open
                # The folder may have been removed and made again, with the lock of another process in it.
                if os.path.samestat(held, path.stat()):
                    path.unlink()
    finally:
        lock.release()

"""exclusive: a lock file that one process holds at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

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
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last owner may have removed the file since it was opened here: then it locks nothing.
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError) as error:
            raise RowmeshError(refusal) from error
        try:
            yield
        finally:
            # The folder may have been removed and made again, with the lock of somebody else in it.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    path.unlink()

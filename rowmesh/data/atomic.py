"""Writing a folder so that it appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rowmesh.errors import RowmeshError


@contextlib.contextmanager
def replacing_folder(target: Path, *, marker: str, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside `target`, which takes its place if the block ends without an error.

    On any error or interruption the temporary folder is removed and what stood at `target` stays. After a
    crash the next writer removes what was left. Two writers of one target exclude each other.

    Args:
        target: the folder.
        marker: a file that every such folder holds; no other folder is ever replaced.
        overwrite: replace a folder that is not empty.

    Raises:
        RowmeshError: the target is not empty and `overwrite` is not given or it holds no marker, another
            process writes it, or the disk is full.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 - resolve() would follow a link and replace its goal
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target):
        partial, old = target.parent / f".{target.name}.partial", target.parent / f".{target.name}.old"
        _restore(old, target)
        _check_free(target, marker, overwrite)
        for stale in (partial, old):
            shutil.rmtree(stale, ignore_errors=True)
        try:
            partial.mkdir()
            yield partial
            if target.exists():
                target.rename(old)
            partial.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _disk_full(target) from error
            raise
        finally:
            _restore(old, target)
            shutil.rmtree(partial, ignore_errors=True)


def _restore(old: Path, target: Path) -> None:
    """Undoes the first of the two renames where the second did not happen."""
    if old.exists() and not target.exists():
        old.rename(target)


def _check_free(target: Path, marker: str, overwrite: bool) -> None:
    if target.is_dir():
        if any(target.iterdir()) and not overwrite:
            raise RowmeshError(f"{target} exists and is not empty; choose another folder or pass --overwrite")
        if any(target.iterdir()) and not (target / marker).is_file():
            raise RowmeshError(
                f"{target} holds other things than this command writes (it has no {marker}), so --overwrite "
                "does not replace it; choose another folder or remove it yourself"
            )
    elif target.exists():
        raise RowmeshError(f"{target} exists and is not a folder; choose another output folder")


def _disk_full(target: Path) -> RowmeshError:
    free = shutil.disk_usage(target.parent).free / 2**30
    return RowmeshError(
        f"no space left while writing {target} ({free:.1f} GiB free there now that the partial output is "
        "removed); nothing was changed. Free some space or write to another disk"
    )


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Holds `.<name>.lock` beside the target; a crash releases it."""
    path = target.parent / f".{target.name}.lock"
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it may have removed the file since it was opened here: then it locks nothing.
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError) as error:
            raise RowmeshError(
                f"{target} is being written by another process (it holds {path}); wait for it to end"
            ) from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

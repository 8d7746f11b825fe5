"""Writing one file so that it is whole or as it was before, also after a crash or a power cut."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from rowmesh._support.faults import reach

_numbers = itertools.count()


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Adds the path to an OSError of a write, which does not know its file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:  # one without a number prints its own text alone
            error.filename = str(path)
        raise


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` when the block ends without an error.

    Content and name are on disk (`fsync`) before this returns. On any error the partial file is removed and what
    stood at `path` stays, but for an error of the last step: where the folder cannot be synced, the new file has its
    place, and a power cut may bring the former back. The folder of `path` must exist. Where `path` is a link, the link
    stays and its target is replaced. A device or a pipe, as `/dev/stdout`, is
    written to as it is.

    Raises:
        OSError: the file cannot be written; it names `path`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing_file(Path(folder) / "plan.json") as file:
        ...         _ = file.write(b"{}")
        ...     (Path(folder) / "plan.json").read_text()
        '{}'
    """
    if _is_special(path):
        with naming(path), path.open("wb") as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    # A name of its own: two writers of a file must not write into each other's. The last to end wins.
    partial = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}.partial")
    try:
        with naming(path):
            with synced_file(partial, name=path) as file:
                yield file
            partial.replace(path)
            reach("files.replaced", path)
            sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


@contextlib.contextmanager
def synced_file(path: Path, *, name: Path | None = None) -> Iterator[IO[bytes]]:
    """A file to write, made anew, whose content is on disk when the block ends; its name is after `sync_folder`.

    Args:
        path: the file.
        name: what errors call it, where it is not to keep its name.
    """
    with naming(name or path), path.open("wb") as file:
        yield file
        reach("files.write", name or path)
        file.flush()
        os.fsync(file.fileno())


def remove_partial_files(folder: Path, names: Iterable[str]) -> None:
    """Removes what killed writers left of some files, as far as the system lets it; no writer may be at work there.

    Args:
        folder: of the files.
        names: of the files as they are called when they are whole.
    """
    pattern = rf"\.({'|'.join(map(re.escape, names))})\.\d+\.\d+\.partial"
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if re.fullmatch(pattern, path.name):
                with contextlib.suppress(OSError):
                    path.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file, whole or not at all; its folder must exist."""
    with replacing_file(path) as file:
        file.write(text.encode())


def sync_file(path: Path) -> None:
    """Waits until a file's content is on disk."""
    _sync(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows flushes only what may be written


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on disk: a new or renamed file is safe only after that.

    Does nothing where the file system, or a folder that may be written and not read, does not offer that.
    """
    try:
        _sync(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOTSUP):
            raise


def _is_special(path: Path) -> bool:
    """Whether something is there that cannot be replaced by a file."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Writing a large file past the page cache.

Pages of the cache are memory that the system has to find, fill and give back: that takes more of a processor than the
file is worth where it is not read soon, and programs beside it wait for the memory. So whole chunks go from memory that
is kept straight to the disk, where system and file system offer that (`O_DIRECT`).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from rowmesh._support.faults import reach
from rowmesh._support.files.atomic import naming
from rowmesh._support.worker import Worker

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

CHUNK_BYTES = 8 << 20
_SECTOR_BYTES = 4096  # what addresses, sizes and places in the file are multiples of, on any disk of today
_SYNCED_BYTES = 1 << 20
_KEPT_CHUNKS = 8

_spare: list[mmap.mmap] = []  # without a lock, which a process that is forked could find held


@contextlib.contextmanager
def direct_file(path: Path, *, passes_cache: bool = True) -> Iterator[DirectFile]:
    """A file to write in order, made anew, whose content is on disk when the block ends; its name is after
    `sync_folder`.

    Args:
        path: the file.
        passes_cache: whether it may; where nothing runs beside the writing, the cache is the faster way.

    Raises:
        OSError: the file cannot be written; it names `path`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with direct_file(Path(folder) / "rows") as file:
        ...         _ = file.write(b"rows")
        ...     (Path(folder) / "rows").read_bytes()
        b'rows'
    """
    with naming(path), path.open("wb", buffering=0) as raw:
        file = DirectFile(raw, passes_cache)
        try:
            yield file
            reach("files.write", path)
            file.finish()
            os.fsync(raw.fileno())
        finally:
            file.close()


class DirectFile:
    """Collects what is written in chunks, which begin and end where the disk's sectors do.

    A thread writes a chunk while the next is filled. Its error is raised by the next call.

    Args:
        raw: the file, new, open for writing without a buffer.
        passes_cache: whether it may; else there are no chunks.

    Attributes:
        is_direct: whether what is written now passes the cache.
    """

    def __init__(self, raw: IO[bytes], passes_cache: bool) -> None:
        self._raw, self._passes_cache, self._written = raw, passes_cache, 0
        self._chunk: mmap.mmap | None = None
        self._used = 0
        self._thread: Worker | None = None
        self._error: Exception | None = None
        self.is_direct = False

    def write(self, data: Any) -> int:
        """Takes the bytes of any contiguous buffer; returns how many."""
        view = np.asarray(memoryview(data).cast("B"))
        begin = 0
        if not self._passes_cache:
            for begin in range(0, len(view), CHUNK_BYTES):
                self._put(view[begin:], min(CHUNK_BYTES, len(view) - begin))
            return len(view)
        while begin < len(view):
            if self._chunk is None:
                self._chunk, self._used = _take(), 0
            count = min(CHUNK_BYTES - self._used, len(view) - begin)
            chunk = np.frombuffer(self._chunk, np.uint8)
            chunk[self._used : self._used + count] = view[begin : begin + count]  # without the interpreter's lock
            begin, self._used = begin + count, self._used + count
            if self._used == CHUNK_BYTES:
                self._begin_chunk(self._chunk)
        return len(view)

    def flush(self) -> None:
        """No-op: the last chunk waits for more."""

    def finish(self) -> None:
        """Writes what is left, which ends anywhere."""
        self._wait()
        self._set_direct(False)
        if self._chunk is not None:
            self._put(self._chunk, self._used)
            self._drop_chunk()

    def close(self) -> None:
        """Closes the file, of which what is not finished is lost; may be called again."""
        self._join()
        self._drop_chunk()
        self._raw.close()

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._raw.closed

    def _begin_chunk(self, chunk: mmap.mmap) -> None:
        self._wait()
        if self._written == 0:
            self._set_direct(True)
        thread = Worker(target=self._run, args=(chunk,), name="rowmesh file", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            self._put(chunk, CHUNK_BYTES)
            self._drop_chunk()
            return
        self._thread, self._chunk = thread, None

    def _run(self, chunk: mmap.mmap) -> None:
        try:
            self._put(chunk, CHUNK_BYTES)
        except Exception as error:  # raised by the next call
            self._error = error
        finally:
            _give(chunk)

    def _wait(self) -> None:
        self._join()
        if self._error is not None:
            raise self._error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _drop_chunk(self) -> None:
        if self._chunk is not None:
            _give(self._chunk)
            self._chunk = None

    def _put(self, chunk: Any, count: int) -> None:
        begin, at = self._written, 0
        while at < count:
            with memoryview(chunk) as whole, whole[at:count] as left:
                done = self._write_some(left)
            at, self._written = at + done, self._written + done
            if done % _SECTOR_BYTES:  # a disk that is full, which the next call says
                self._set_direct(False)
        if not self.is_direct and count >= _SYNCED_BYTES:
            self._begin_sync(begin)

    def _write_some(self, part: memoryview) -> int:
        try:
            return os.write(self._raw.fileno(), part)
        except OSError as error:
            if not self.is_direct or error.errno != errno.EINVAL:
                raise
        self._set_direct(False)  # the file system took the flag, and does not do it
        return os.write(self._raw.fileno(), part)

    def _set_direct(self, is_direct: bool) -> None:
        """As far as system and file system let it."""
        if fcntl is None or not hasattr(os, "O_DIRECT") or is_direct == self.is_direct:
            return
        flags = fcntl.fcntl(self._raw, fcntl.F_GETFL) & ~os.O_DIRECT
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._raw, fcntl.F_SETFL, flags | os.O_DIRECT if is_direct else flags)
            self.is_direct = is_direct

    def _begin_sync(self, begin: int) -> None:
        """Has the system write what is in the cache to disk without waiting for that, where it offers it.

        Linux begins by itself only when much is unwritten: the disk would stand still until `fsync`, and then this.
        """
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # what cannot be written `fsync` says
                os.posix_fadvise(self._raw.fileno(), begin, self._written - begin, os.POSIX_FADV_DONTNEED)


def _take() -> mmap.mmap:
    """Memory of a chunk, which begins on a page. A process that is forked has its own copy, not the same memory.

    Such memory must not be forked while a disk writes into it. Here a disk reads it, and nobody writes until it has.
    """
    with contextlib.suppress(IndexError):
        return _spare.pop()
    return mmap.mmap(-1, CHUNK_BYTES, access=mmap.ACCESS_COPY)


def _give(chunk: mmap.mmap) -> None:
    if len(_spare) < _KEPT_CHUNKS:
        _spare.append(chunk)

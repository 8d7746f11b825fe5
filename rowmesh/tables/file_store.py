"""FileStore: the records of a tiered table in a file, read and written by several threads.

The threads run kernels that call `pread` and `pwrite`, one record a call, without the interpreter's lock. (`os.preadv`
in Python threads is as fast while nothing else runs, and was 20 times slower beside one busy Python thread, since every
call has to get the lock back.)

By default reads and writes go through the system's page cache, which keeps what it has room for. With `direct` they go
past it: then memory is bounded by the fast arena alone, and a benchmark measures the disk. Records are then padded to
whole sectors.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.ops.memory import Buffer, round_up
from rowmesh.ops.simd import uncached_kernel

_SECTORS = (512, 4096)  # what direct reads and writes must be multiples of, by disk
_LEAST_A_THREAD = 32  # records that are worth waking a thread for


@functools.cache
def _kernels() -> SimpleNamespace:
    """The kernels `read` and `write`; they return the first record that the system did not move whole, or `end`."""
    pread, pwrite = _system_call("pread"), _system_call("pwrite")

    @uncached_kernel
    def read(file, slots, first, end, records, stride):
        for i in range(first, end):
            if pread(file, records + i * stride, stride, np.int64(slots[i]) * stride) != stride:
                return i
        return end

    @uncached_kernel
    def write(file, slots, first, end, records, stride):
        for i in range(first, end):
            if pwrite(file, records + i * stride, stride, np.int64(slots[i]) * stride) != stride:
                return i
        return end

    return SimpleNamespace(read=read, write=write)


def _system_call(name: str) -> Callable[[int, int, int, int], int]:
    function = getattr(ctypes.CDLL(None), name)
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
    function.restype = ctypes.c_ssize_t
    return function


class FileStore:
    """Records in a file, which grows as they are written; parts never written take no room on the disk.

    The file has no name once it is open, unless it is kept, so that nothing is left of it however the process ends.

    Args:
        num_records: of one group on one rank.
        record_bytes: of a record.
        path: the file, which must not exist.
        num_threads: that read, and as many that write; 4 to 8 keep most disks busy.
        direct: whether to go past the page cache.
        keep: whether the file stays, with its name: record i from byte i · stride on, zeros where none was written.

    Raises:
        ConfigurationError: the file exists, its folder does not or cannot be written, or its file system has no
            direct access; names it.

    Example:
        >>> import tempfile
        >>> store = FileStore(100, 8, path=Path(tempfile.mkdtemp()) / "rows")
        >>> store.write(np.array([3], np.uint32), np.full((1, 8), 7, np.uint8))
        >>> records = np.empty((1, 8), np.uint8)
        >>> store.read(np.array([3], np.uint32), records)
        >>> records.tolist()
        [[7, 7, 7, 7, 7, 7, 7, 7]]
        >>> store.close()
    """

    def __init__(
        self,
        num_records: int,
        record_bytes: int,
        *,
        path: Path,
        num_threads: int = 4,
        direct: bool = False,
        keep: bool = False,
    ) -> None:
        if num_threads < 1:
            raise ConfigurationError(f"file store {path}: num_threads must be 1 or more, got {num_threads}")
        if not hasattr(os, "pread"):
            raise ConfigurationError(
                f"file store {path}: this system cannot read files at a position (Linux and macOS can); keep rows of "
                "tiered tables in memory, which is the default of `tiers.folder`"
            )
        self.path, self.num_threads = Path(path), num_threads
        self.num_bytes = 0
        self._num_records = num_records
        self._file = _open(self.path, direct)
        if not keep:
            self.path.unlink()
        self.stride = round_up(record_bytes, _sector_of(self._file)) if direct else record_bytes
        # The calling thread does a part, too.
        self._readers = ThreadPoolExecutor(max(num_threads - 1, 1), "rowmesh-read")
        self._writers = ThreadPoolExecutor(max(num_threads - 1, 1), "rowmesh-write")
        self._finalizer = weakref.finalize(self, _close, self._file, self._readers, self._writers)

    def read(self, slots: np.ndarray, records: np.ndarray) -> None:
        """Reads records; see BackingStore."""
        self._move(_kernels().read, self._readers, slots, records, self._read_one)

    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        """Writes records; see BackingStore."""
        self._move(_kernels().write, self._writers, slots, records, self._write_one)

    def flush(self) -> None:
        """Waits for the disk."""
        try:
            (os.fdatasync if sys.platform == "linux" else os.fsync)(self._file)
        except OSError as error:
            raise RowmeshError(f"cannot write {self.path}: {error.strerror}; {self._free()}") from error

    def close(self) -> None:
        """Stops the threads and closes the file; may be called again."""
        self._finalizer()

    def __str__(self) -> str:
        return f"file {self.path}"

    def _move(
        self,
        kernel: Callable[..., int],
        pool: ThreadPoolExecutor,
        slots: np.ndarray,
        records: np.ndarray,
        move_one: Callable[[int, memoryview], None],
    ) -> None:
        assert self._finalizer.alive, f"{self} is closed"
        assert records.shape == (len(slots), self.stride), records.shape
        assert records.flags.c_contiguous
        address = records.ctypes.data

        def part(first: int, end: int) -> None:
            while (first := kernel(self._file, slots, first, end, address, self.stride)) < end:
                move_one(int(slots[first]), memoryview(records[first]))
                first += 1

        count = len(slots)
        parts = max(min(self.num_threads, count // _LEAST_A_THREAD), 1)
        ends = [count * number // parts for number in range(parts + 1)]
        others = [pool.submit(part, *bounds) for bounds in itertools.pairwise(ends[1:])]
        try:
            part(0, ends[1])
        finally:  # no thread may write into `records` after this call
            failures = [failure for other in others if (failure := other.exception())]
        if failures:
            raise failures[0]

    def _read_one(self, slot: int, record: memoryview) -> None:
        """Reads what a kernel could not, or says why."""
        try:
            count = os.preadv(self._file, [record], slot * self.stride)
        except OSError as error:
            raise RowmeshError(f"cannot read slot {slot} of {self.path}: {error.strerror}") from error
        if count != self.stride:
            raise RowmeshError(
                f"cannot read slot {slot} of {self.path}: it ends {self.stride - count} bytes too early; was it cut?"
            )

    def _write_one(self, slot: int, record: memoryview) -> None:
        """Writes what a kernel could not, or says why."""
        moved = 0
        try:
            while moved < self.stride:
                moved += os.pwrite(self._file, record[moved:], slot * self.stride + moved)
        except OSError as error:
            total = self._num_records * self.stride
            raise RowmeshError(
                f"cannot write slot {slot} to {self.path}: {error.strerror}; {self._free()}, and the file may grow to "
                f"{total:,} bytes; make room, or put it on a larger disk"
            ) from error

    def _free(self) -> str:
        status = os.fstatvfs(self._file)
        return f"{status.f_bavail * status.f_frsize:,} bytes are free on its disk"


def _open(path: Path, direct: bool) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct and not hasattr(os, "O_DIRECT"):
        raise ConfigurationError(f"file store {path}: this system has no direct access; leave `direct` out")
    try:
        file = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
    except FileExistsError as error:
        raise ConfigurationError(f"file store {path} exists already; remove it, or name another file") from error
    except OSError as error:
        without = "; its file system may have no direct access: leave `direct` out" if direct else ""
        raise ConfigurationError(f"cannot make file store {path}: {error.strerror}{without}") from error
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # else every record brings megabytes that follow it along
    return file


def _sector_of(file: int) -> int:
    """The least that can be written directly; leaves the file empty."""
    for size in _SECTORS:
        try:
            os.pwrite(file, Buffer(size).bytes.data, 0)
        except OSError:
            continue
        os.ftruncate(file, 0)
        return size
    return _SECTORS[-1]


def _close(file: int, *pools: ThreadPoolExecutor) -> None:
    for pool in pools:
        pool.shutdown()
    os.close(file)

"""VerifiedFile: a mapped file that is kept open, compared with its checksums where it is first read."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
import weakref
from pathlib import Path
from typing import IO

import xxhash

from rowmesh._support.files.checksums import Checksums
from rowmesh.errors import DamagedFileError


class VerifiedFile:
    """Maps a file through a descriptor, so that it may be renamed or removed meanwhile.

    A block of the checksums is verified when a byte of it is first read. Each read checks first whether the file
    is still as long as it was, and whether it was written to since. If it was, it is verified again where it is read;
    without checksums it is refused. This remains: a file that is cut short between that question and the use of the
    bytes, or a disk that fails then, ends the process by SIGBUS. (Reading into buffers instead takes 1.5 times the
    time of a whole window, every time.) Safe from several threads.

    Args:
        path: the file, for messages.
        descriptor: of the file, open for reading; it belongs to this object.
        expected: what the file is to hold; None verifies nothing.
        advice: what a user does about a damaged file, for messages.

    Raises:
        DamagedFileError: the file has another size than its checksums say.
        IsADirectoryError: it is a folder.
    """

    def __init__(self, path: Path, descriptor: int, expected: Checksums | None, advice: str) -> None:
        self.path = path
        self.generation = 0
        """How often the file was written to since it was opened, as far as noticed."""
        self._close = weakref.finalize(self, os.close, descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):  # which opens like a file, and cannot be mapped
            self._close()
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        self._descriptor, self._expected, self._advice = descriptor, expected, advice
        self._verified: set[int] = set()
        self._lock = threading.Lock()
        self.size_bytes, self._modified_ns = self._state()
        if expected is not None and self.size_bytes != expected.size_bytes:
            self._close()
            raise DamagedFileError(
                f"{path} has {self.size_bytes:,} bytes where {expected.size_bytes:,} were written; {advice}"
            )
        mapped = mmap.mmap(descriptor, self.size_bytes, access=mmap.ACCESS_READ) if self.size_bytes else b""
        self._bytes = memoryview(mapped)

    def read(self, begin: int = 0, end: int | None = None) -> memoryview:
        """The bytes `begin` to `end`, or to the end of the file, in the map.

        Raises:
            DamagedFileError: a block is not what was written, or the file was changed; names the bytes.
        """
        self._check_unchanged()
        end = self.size_bytes if end is None else end
        if self._expected is not None:
            size = self._expected.block_bytes
            for number in range(begin // size, -(-end // size)):
                if number not in self._verified:
                    self._verify(number, self._expected)
        return self._bytes[begin:end]

    def verify(self) -> None:
        """Verifies the whole file.

        Raises:
            DamagedFileError: see `read`.
        """
        if self._expected is not None:
            self.read()

    def copy_to(self, file: IO[bytes], chunk_bytes: int = 1 << 22) -> None:
        """Writes the content into another file."""
        for begin in range(0, self.size_bytes, chunk_bytes):
            file.write(self.read(begin, min(begin + chunk_bytes, self.size_bytes)))

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _check_unchanged(self) -> None:
        """Raises where the file was written to, unless it has checksums; then it is verified again."""
        size, modified_ns = self._state()
        if size != self.size_bytes:
            raise DamagedFileError(
                f"{self.path} had {self.size_bytes:,} bytes when it was opened and has {size:,} now: something writes "
                f"to it while it is read; {self._advice}"
            )
        if modified_ns != self._modified_ns:
            if self._expected is None:
                raise DamagedFileError(
                    f"{self.path} was written to after it was opened, and nothing shows whether it still holds the "
                    f"same; {self._advice}"
                )
            with self._lock:
                self._verified, self._modified_ns = set(), modified_ns
                self.generation += 1

    def _verify(self, number: int, expected: Checksums) -> None:
        begin = number * expected.block_bytes
        block, verified = self._bytes[begin : begin + expected.block_bytes], self._verified
        if xxhash.xxh3_64_hexdigest(block) != expected.blocks[number]:
            raise DamagedFileError(
                f"{self.path} is damaged: bytes {begin:,} to {begin + len(block) - 1:,} are not what was written; "
                f"{self._advice}"
            )
        with self._lock:
            verified.add(number)


class PositionedReader:
    """A VerifiedFile as a file object with a position of its own, for libraries that read from one.

    Attributes:
        copies: whether what is read is copied, and stays whatever becomes of the file; else it is in the map.
    """

    def __init__(self, file: VerifiedFile) -> None:
        self._file, self._position = file, 0
        self.closed, self.copies = False, False

    def read(self, num_bytes: int | None = -1) -> bytes | memoryview:
        """The next bytes, as many as there are at most."""
        begin = min(self._position, self._file.size_bytes)
        rest = self._file.size_bytes - begin
        count = rest if num_bytes is None or num_bytes < 0 else min(num_bytes, rest)
        self._position = begin + count
        data = self._file.read(begin, begin + count)
        return bytes(data) if self.copies else data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Sets the position."""
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence, self._file.size_bytes)
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def close(self) -> None:
        """Says that this is closed; the file stays open."""
        self.closed = True

"""PinnedFolder: the files of a prepared data set as they were when it was opened, whatever becomes of the folder."""

from __future__ import annotations

import contextlib
import mmap
import os
import tokenize
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmesh._support.faults import reach
from rowmesh._support.files.checksums import Checksums
from rowmesh._support.files.manifest import MANIFEST, Manifest
from rowmesh._support.files.regular import open_regular
from rowmesh._support.files.verified import VerifiedFile
from rowmesh.errors import DataError

ADVICE = "copy the folder again, or prepare the data again"
_State = tuple[int, int, int]


class PinnedFolder:
    """Opens the files of one folder, found by its descriptor: a folder that takes its name later is not read.

    Files that are `kept` stay open, so that they can be read when the folder has been replaced and removed. The
    identity of others is kept: one that is replaced or written to later is refused, unless its checksums show that it
    holds the same.

    Args:
        path: the folder.
        verify: whether what is read is compared with the checksums in the manifest.

    Raises:
        DataError: the folder cannot be opened, or its manifest is malformed; names the key.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path
        self._directory: int | None = None
        if os.open in os.supports_dir_fd:  # on Windows a folder cannot be opened, and files are found by their path
            self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, self._directory)
        self._states: dict[str, _State] = {}
        self._verified: dict[str, _State] = {}
        self._kept: dict[str, VerifiedFile] = {}
        self.checksums: dict[str, Checksums] = {}
        if (text := self.find(MANIFEST)) is not None:
            self.checksums = dict(Manifest.parse(text, path / MANIFEST).checksums)
        self.is_verified = verify

    def find(self, name: str) -> bytes | None:
        """The whole content of a file, as it is, not verified; None where there is none."""
        try:
            return bytes(self._open(name, None).read())
        except FileNotFoundError:
            return None

    def pin(self, kept: Iterable[str], others: Iterable[str]) -> None:
        """Opens some files for good, and notes which the others are; those that are missing are missed when read."""
        for name in kept:
            with contextlib.suppress(FileNotFoundError):
                self._kept[name] = self._open(name, self._expected(name))
        for name in others:
            with contextlib.suppress(OSError):
                self._states[name] = _state(os.stat(self._place(name), dir_fd=self._directory))

    def open(self, name: str) -> VerifiedFile:
        """A file, verified where it is read.

        Raises:
            DamagedFileError: it has another size than its checksums say.
            DataError: it has no checksums, is missing, cannot be opened, or is another than was pinned.
        """
        if name in self._kept:
            return self._kept[name]
        try:
            return self._open(name, self._expected(name))
        except FileNotFoundError as error:
            raise DataError(
                f"{self.path / name} is missing: removed, or replaced with its folder after the data set was opened; "
                "start again with the data as they are now, or prepare the data again"
            ) from error

    def whole(self, name: str) -> VerifiedFile:
        """A file, open, that was verified whole, if anything is verified.

        Raises:
            DamagedFileError: it is not what was written.
            DataError: see `open`.
        """
        reach("data.open", self.path / name)
        file = self.open(name)
        state = _state(os.fstat(file.fileno()))
        if self._verified.get(name) != state:
            file.verify()
            self._verified[name] = state
        return file

    def array(self, name: str, dtype: type[np.generic], length: int) -> NDArray:
        """An .npy file of one dimension, memory-mapped.

        Raises:
            DataError: it holds something else.
        """
        file, path = self.whole(name), self.path / name
        with os.fdopen(os.dup(file.fileno()), "rb") as stream:
            stream.seek(0)
            try:
                if np.lib.format.read_magic(stream) != (1, 0):
                    raise ValueError("of another version")
                shape, _, found = np.lib.format.read_array_header_1_0(stream)
            except (ValueError, EOFError, TypeError, KeyError, SyntaxError, tokenize.TokenError) as error:
                raise DataError(f"{path}: no array of numpy ({error}); {ADVICE}") from error
            if (shape, found) != ((length,), np.dtype(dtype)):
                raise DataError(
                    f"{path}: holds {found} of shape {shape}, not {length} times {np.dtype(dtype)}; {ADVICE}"
                )
            if file.size_bytes < stream.tell() + length * found.itemsize:
                raise DataError(f"{path}: ends before its {length:,} values do; {ADVICE}")
            return np.memmap(stream, found, "r", stream.tell(), shape)

    def column(self, name: str, length: int) -> pa.Array:
        """The one column of an Arrow file, memory-mapped.

        Raises:
            DataError: it holds something else.
        """
        file, path = self.whole(name), self.path / name
        if not file.size_bytes:
            raise DataError(f"{path}: is empty; {ADVICE}")
        mapped = mmap.mmap(file.fileno(), file.size_bytes, access=mmap.ACCESS_READ)
        try:
            table = pa.ipc.open_file(pa.py_buffer(mapped)).read_all()
            table.validate(full=True)  # offsets and text, which are used without a look
            values = table.column("value")
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise DataError(f"{path}: cannot be read as Arrow ({error}); {ADVICE}") from error
        if len(values) != length:
            raise DataError(f"{path}: holds {len(values):,} values, not {length:,}; {ADVICE}")
        return values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()  # which copies even one

    def _place(self, name: str) -> str | Path:
        """Where a file is from the open folder, or from anywhere."""
        return self.path / name if self._directory is None else name

    def _expected(self, name: str) -> Checksums | None:
        if self.is_verified and name not in self.checksums:
            raise DataError(
                f"{self.path / MANIFEST} has no checksum of {name}, which preparation writes: {ADVICE}, or read it "
                "unverified (--no-verify, verify=False)"
            )
        return self.checksums[name] if self.is_verified else None

    def _open(self, name: str, expected: Checksums | None) -> VerifiedFile:
        try:
            return self._open_as_pinned(name, expected)
        except (FileNotFoundError, DataError):
            raise
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{self.path / name}: cannot be opened ({reason}); {ADVICE}") from error

    def _open_as_pinned(self, name: str, expected: Checksums | None) -> VerifiedFile:
        path, descriptor = self.path / name, open_regular(self._place(name), dir_fd=self._directory)
        state = _state(os.fstat(descriptor))
        if expected is None and self._states.get(name, state) != state:
            os.close(descriptor)
            raise DataError(
                f"{path} was replaced or written to after the data set was opened; start again to use the data as they "
                "are now"
            )
        return VerifiedFile(path, descriptor, expected, ADVICE)


def _state(status: os.stat_result) -> _State:
    """Which file, and of when."""
    return status.st_ino, status.st_size, status.st_mtime_ns

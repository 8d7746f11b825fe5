"""The files of a checkpoint, mapped and verified: what is read is what was written, or an error names the file."""

from __future__ import annotations

import errno
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rowmesh._support.files.advice import as_refusal
from rowmesh._support.files.regular import open_regular
from rowmesh._support.files.verified import VerifiedFile
from rowmesh.checkpoint.manifest import DENSE, Manifest, as_numpy
from rowmesh.errors import CheckpointError, DamagedCheckpointError, DamagedFileError, UnreadableError

ADVICE = "restore the file from a copy, or train again; --no-verify (verify=False) reads it as it is"
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}


def cannot_read(text: str, error: Exception) -> CheckpointError:
    """The error for what could not be read: one where it is missing or damaged, another where the system refused.

    A disk or its connection that fails refuses too: what is on it may be whole.
    """
    is_refused = isinstance(error := as_refusal(error), OSError) and error.errno not in _MISSING
    return (UnreadableError if is_refused else DamagedCheckpointError)(text)


class SavedFiles:
    """Opens the files that a manifest names.

    Args:
        folder: the checkpoint.
        manifest: of the checkpoint.
        verify: compare what is read with the manifest's checksums.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, verify: bool = True) -> None:
        self.checkpoint, self.folder = folder, folder / manifest.folder
        self._checksums = manifest.checksums if verify else {}

    def array(
        self, table: str, kind: str, names: Mapping[str, str], target: torch.Tensor, shape: tuple[int, ...]
    ) -> SavedArray:
        """The file of one kind, mapped; its shape and dtype checked against where it goes.

        Raises:
            CheckpointError: there is none, it cannot be read, is damaged, or holds something else.
        """
        if kind not in names:
            raise CheckpointError(f"table {table!r}: the checkpoint in {self.checkpoint} has no state {kind!r}")
        name, wanted = f"table {table!r}", as_numpy(target)
        file = self._open(names[kind], name)
        try:
            offset, found_shape, dtype = _header(file)
        except DamagedFileError as error:
            raise DamagedCheckpointError(f"{name}: {error}") from None
        except Exception as error:  # NumPy raises many kinds on damaged headers
            raise self._unread(f"{name}: {file.path} cannot be read ({error})", error, names[kind]) from None
        if found_shape != shape or dtype != wanted.dtype:
            raise CheckpointError(f"{name}: {file.path} holds {dtype} {found_shape}, expected {wanted.dtype} {shape}")
        size = offset + math.prod(shape) * dtype.itemsize
        if file.size_bytes < size:
            raise DamagedCheckpointError(
                f"{name}: {file.path} cannot be read (it has {file.size_bytes:,} bytes of {size:,})"
            )
        return SavedArray(file, offset, shape, dtype, name)

    def like(self, name: str) -> torch.Tensor:
        """A tensor without memory, of the shape and dtype that the file `name` has; of bfloat16 numbers the bits.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        file = self._open(name, "a checkpoint")
        try:
            _, shape, dtype = _header(file)
        except DamagedFileError as error:
            raise DamagedCheckpointError(str(error)) from None
        except Exception as error:  # NumPy raises many kinds on damaged headers
            raise self._unread(f"{file.path} cannot be read ({error})", error, name) from None
        return torch.from_numpy(np.empty(1, dtype)).expand(shape)

    def dense(self) -> dict[str, Any]:
        """The values that were saved as `dense`.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        file = self._open(DENSE, "the dense network")
        try:
            # a copy: the bytes that were verified are loaded, even if the file changes now
            values = torch.load(io.BytesIO(file.read()), weights_only=True, map_location="cpu")
        except DamagedFileError as error:
            raise DamagedCheckpointError(str(error)) from None
        except Exception as error:  # torch raises many kinds on damaged files
            text = f"{file.path} cannot be read: {str(error) or type(error).__name__}"
            raise self._unread(text, error, DENSE) from None
        if not isinstance(values, dict):
            raise CheckpointError(
                f"{file.path} cannot be read: it holds {type(values).__name__}, no state dictionaries"
            )
        return values

    def verify(self) -> tuple[int, int]:
        """Reads all files that have checksums; returns how many they are, and of how many bytes.

        Raises:
            CheckpointError: one is missing or damaged; names it.
        """
        for name in self._checksums:
            try:
                self._open(name, "a checkpoint").verify()
            except DamagedFileError as error:
                raise DamagedCheckpointError(str(error)) from None
        return len(self._checksums), sum(each.size_bytes for each in self._checksums.values())

    def _open(self, name: str, what: str) -> VerifiedFile:
        path = self.folder / name
        try:
            return VerifiedFile(path, open_regular(path), self._checksums.get(name), ADVICE)
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{what}: {path} is missing; the checkpoint is incomplete") from None
        except DamagedFileError as error:
            raise DamagedCheckpointError(f"{what}: {error}") from None
        except (OSError, ValueError, MemoryError) as error:
            raise cannot_read(f"{what}: {path} cannot be read ({error})", error) from None

    def _unread(self, text: str, error: Exception, name: str) -> CheckpointError:
        """The error where a file makes no sense: what its checksums find whole is not damaged."""
        if isinstance(as_refusal(error), OSError):
            return UnreadableError(text)
        return (CheckpointError if name in self._checksums else DamagedCheckpointError)(text)


class SavedArray:
    """Rows of a mapped .npy file; those that are read are verified first.

    Args:
        file: has all of them.
        offset: where in the file they begin.
        shape: of all rows.
        dtype: of their numbers.
        name: whose they are, for messages.
    """

    def __init__(
        self, file: VerifiedFile, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], name: str
    ) -> None:
        self._file, self._offset, self._name = file, offset, name
        self._shape, self._dtype = shape, dtype
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        """Some rows, in the map.

        Raises:
            CheckpointError: they are not what was written.
        """
        numbers = range(self._shape[0])[rows]
        ends = (numbers[0], numbers[-1]) if numbers else ()  # the least and most of a range would go through all
        first, last = (min(ends), max(ends) + 1) if ends else (0, 0)
        begin, end = (self._offset + row * self._row_bytes for row in (first, last))
        try:
            data = self._file.read(begin, end)
        except DamagedFileError as error:
            raise DamagedCheckpointError(f"{self._name}: {error}") from None
        return np.ndarray((last - first, *self._shape[1:]), self._dtype, data)[:: numbers.step]


def _header(file: VerifiedFile) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Where the numbers of a .npy file begin, their shape and dtype."""
    start = bytes(file.read(0, min(10, file.size_bytes)))
    length = 10 + int.from_bytes(start[8:], "little")
    stream = io.BytesIO(file.read(0, min(length, file.size_bytes)))
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"it has version {version} of the format")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if is_fortran or dtype.hasobject:
        raise ValueError(f"it holds {dtype}{' by column' if is_fortran else ''}")
    return stream.tell(), shape, dtype

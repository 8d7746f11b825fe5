"""The files of a checkpoint, mapped and verified: what is read is what was written, or an error names the file."""

from __future__ import annotations

import io
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rowmesh.checkpoint.manifest import DENSE, Manifest, as_numpy
from rowmesh.errors import CheckpointError, DamagedFileError
from rowmesh.files.checksums import VerifiedBytes

ADVICE = "restore the file from a copy, or train again; --no-verify (verify=False) reads it as it is"
UNVERIFIABLE = "has no checksums, since an earlier version wrote it: what is read of it is not verified"


class SavedFiles:
    """Opens the files that a manifest names.

    Args:
        folder: the checkpoint.
        manifest: of the checkpoint.
        verify: compare what is read with the manifest's checksums, where it has some.
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
        path, data, verified = self._open(names[kind], name)
        try:
            offset, found_shape, dtype = _header(data, verified)
        except DamagedFileError as error:
            raise CheckpointError(f"{name}: {error}") from None
        except Exception as error:  # NumPy raises many kinds on damaged headers
            raise CheckpointError(f"{name}: {path} cannot be read ({error})") from None
        if found_shape != shape or dtype != wanted.dtype:
            raise CheckpointError(f"{name}: {path} holds {dtype} {found_shape}, expected {wanted.dtype} {shape}")
        size = offset + math.prod(shape) * dtype.itemsize
        if len(data) < size:
            raise CheckpointError(f"{name}: {path} cannot be read (it has {len(data):,} bytes of {size:,})")
        return SavedArray(np.ndarray(shape, dtype, data, offset), offset, verified, name)

    def dense(self) -> dict[str, Any]:
        """What was saved as `dense`.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        path, _, verified = self._open(DENSE, "the dense network")
        try:
            verified.verify()
            values = torch.load(path, weights_only=True, map_location="cpu")
        except DamagedFileError as error:
            raise CheckpointError(str(error)) from None
        except Exception as error:  # torch raises many kinds on damaged files
            raise CheckpointError(f"{path} cannot be read: {str(error) or type(error).__name__}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} cannot be read: it holds {type(values).__name__}, no state dictionaries")
        return values

    def _open(self, name: str, what: str) -> tuple[Path, mmap.mmap | bytes, VerifiedBytes]:
        path = self.folder / name
        try:
            with path.open("rb") as file:
                size = file.seek(0, io.SEEK_END)
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""  # nothing is not mapped
            return path, data, VerifiedBytes(path, data, self._checksums.get(name), ADVICE)
        except FileNotFoundError:
            raise CheckpointError(f"{what}: {path} is missing; the checkpoint is incomplete") from None
        except DamagedFileError as error:
            raise CheckpointError(f"{what}: {error}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{what}: {path} cannot be read ({error})") from None


class SavedArray:
    """Rows of a mapped .npy file; those that are read are verified first.

    Args:
        values: mapped.
        offset: where in the file they begin.
        verified: the bytes of the file.
        name: whose they are, for messages.
    """

    def __init__(self, values: npt.NDArray[Any], offset: int, verified: VerifiedBytes, name: str) -> None:
        self._values, self._offset, self._verified, self._name = values, offset, verified, name

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        """Some rows.

        Raises:
            CheckpointError: they are not what was written.
        """
        numbers = range(len(self._values))[rows]
        if numbers:
            row_bytes = self._values.strides[0]
            begin, end = (self._offset + row * row_bytes for row in (min(numbers), max(numbers) + 1))
            try:
                self._verified.verify(begin, end)
            except DamagedFileError as error:
                raise CheckpointError(f"{self._name}: {error}") from None
        return self._values[rows]


def _header(data: mmap.mmap | bytes, verified: VerifiedBytes) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Where the numbers of a .npy file begin, their shape and dtype."""
    verified.verify(0, min(10, len(data)))
    length = 10 + int.from_bytes(data[8:10], "little")
    start = io.BytesIO(data[:length])
    verified.verify(0, len(start.getbuffer()))
    version = np.lib.format.read_magic(start)
    if version != (1, 0):
        raise ValueError(f"it has version {version} of the format")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(start)
    if is_fortran or dtype.hasobject:
        raise ValueError(f"it holds {dtype}{' by column' if is_fortran else ''}")
    return start.tell(), shape, dtype

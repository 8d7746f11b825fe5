"""NewFiles: the files of a checkpoint that a rank writes, and their checksums."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rowmesh._support.faults import reach
from rowmesh._support.files.atomic import naming
from rowmesh._support.files.checksums import BLOCK_BYTES, Checksums, ChecksumWriter, Writable
from rowmesh._support.files.direct import direct_file
from rowmesh.checkpoint.manifest import as_numpy
from rowmesh.tables.shard import RowPiece

WRITTEN_ROWS = 1 << 16  # at once, 16 MiB of 64 numbers: the disk begins with them while the next are prepared


class NewFiles:
    """Writes files into a folder, each of which is on disk when its method ends; its name is after `sync_folder`.

    Args:
        folder: where.
        passes_cache: whether large ones are to; see `rowmesh._support.files.direct`.

    Attributes:
        checksums: of what is written, by name.
    """

    def __init__(self, folder: Path, passes_cache: bool) -> None:
        self.folder, self._passes_cache = folder, passes_cache
        self.checksums: dict[str, Checksums] = {}

    def write(self, name: str, write: Callable[[Any], Any], point: str) -> None:
        """Writes a file by a function of the open file."""
        with self._opened(name, point) as file:
            try:
                write(file)
            except RuntimeError:
                if file.error is None:
                    raise
                raise file.error from None

    def write_pieces(self, names: Mapping[str, str], pieces: Sequence[RowPiece]) -> None:
        """Writes one piece after the other, without a copy of the whole.

        Args:
            names: of the .npy files, by kind: "values", and those of the states.
            pieces: one at least, which are forgotten one by one.
        """
        count = sum(len(each.rows) for each in pieces)
        with contextlib.ExitStack() as files:
            point = "checkpoint.write_rows"
            outputs = {kind: files.enter_context(self._opened(name, point)) for kind, name in names.items()}
            for number, piece in enumerate(pieces):
                for kind, output in outputs.items():
                    array = as_numpy(piece.values if kind == "values" else piece.state[kind])
                    with naming(self.folder / names[kind]):
                        if number == 0:
                            _write_header(output, array, count)
                        _write_array(output, array)
                piece.forget()

    @contextlib.contextmanager
    def _opened(self, name: str, point: str) -> Iterator[Output]:
        with direct_file(self.folder / name, passes_cache=self._passes_cache) as file:
            output = Output(file, BLOCK_BYTES)
            reach(point, self.folder / name)
            yield output
        self.checksums[name] = output.checksums()


class Output(ChecksumWriter):
    """A file whose first error is kept: torch passes on one of its own in place of it."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = self.error or error
            raise


def write_whole(file: Writable, array: npt.NDArray[Any]) -> None:
    """Writes an array as a .npy file."""
    _write_header(file, array, len(array))
    _write_array(file, array)


def _write_header(file: Any, array: npt.NDArray[Any], count: int) -> None:
    """Writes the header of a .npy file of `count` rows like those of an array."""
    shape = (count, *array.shape[1:])
    header = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _write_array(file: Writable, array: npt.NDArray[Any]) -> None:
    for begin in range(0, len(array), WRITTEN_ROWS):
        file.write(np.ascontiguousarray(array[begin : begin + WRITTEN_ROWS]).data)

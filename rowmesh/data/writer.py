"""SplitWriter: the Arrow file of a split, in record batches of one size."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Self

import pyarrow as pa

from rowmesh._support.files.checksums import Checksums, ChecksumWriter

CHECKSUM_BYTES = 1 << 19
"""Less than a record batch, so that reading record batches in any order verifies little that is not read."""


class SplitWriter:
    """Writes rows as uncompressed Arrow IPC, `block_samples` to a record batch, so that a position in the
    file is arithmetic and a reader can map it into memory.

    A context manager; the file is complete only when it ends without an error.
    """

    def __init__(self, path: Path, schema: pa.Schema, block_samples: int) -> None:
        self.block_samples = block_samples
        self.schema = schema
        self.num_samples = 0
        # A Python file, so that a full disk keeps its errno.
        self._file = ChecksumWriter(path.open("wb", buffering=1 << 20), CHECKSUM_BYTES)
        self._writer = pa.ipc.new_file(self._file, schema)
        self._pending: list[pa.RecordBatch] = []
        self._num_pending = 0

    def write(self, columns: list[pa.Array]) -> None:
        """Appends rows, one array a column."""
        batch = pa.record_batch(columns, schema=self.schema)
        self.num_samples += batch.num_rows
        self._pending.append(batch)
        self._num_pending += batch.num_rows
        if self._num_pending >= self.block_samples:
            self._flush()

    def _flush(self) -> None:
        """Writes whole blocks; keeps the rest."""
        table = pa.Table.from_batches(self._pending, self.schema)
        whole = table.num_rows - table.num_rows % self.block_samples
        for start in range(0, whole, self.block_samples):
            self._writer.write(_one_batch(table.slice(start, self.block_samples)))
        rest = table.slice(whole)
        self._pending, self._num_pending = rest.to_batches(), rest.num_rows

    def close(self) -> None:
        """Writes what is left and the footer."""
        if self._num_pending:
            self._writer.write(_one_batch(pa.Table.from_batches(self._pending, self.schema)))
            self._pending, self._num_pending = [], 0
        self._writer.close()
        self._file.close()

    @property
    def checksums(self) -> Checksums:
        """The checksums of the file, once it is closed."""
        return self._file.checksums()

    def abandon(self) -> None:
        """Closes the file as it is; does nothing after `close`."""
        with contextlib.suppress(OSError):  # the disk may be full; the file is not used
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abandon()


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    return table.combine_chunks().to_batches()[0]

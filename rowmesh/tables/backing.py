"""Backing stores: all rows of a tiered table, of which the cache has some.

A store keeps records of a fixed size, one a slot: a row and its state. It does not know initial values, nor which rows
were ever written. There are two: host memory, and a file (`rowmesh.tables.file_store`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from rowmesh.ops.memory import Buffer
from rowmesh.ops.records import Records


class BackingStore(Protocol):
    """Records by slot. `read` and `write` may run at the same time in two threads, of different slots.

    Attributes:
        stride: bytes from one record to the next in what is read and written, at least `record_bytes`.
        num_bytes: host memory that the store holds, or may come to hold.
    """

    stride: int
    num_bytes: int

    def read(self, slots: np.ndarray, records: np.ndarray) -> None:
        """Reads records that were written before.

        Args:
            slots: uint32 `[n]`.
            records: uint8 `[n, stride]` out, in memory that begins on a page.

        Raises:
            RowmeshError: it cannot be read; names the store.
        """
        ...

    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        """Writes records; slots are distinct. Where it raises, records of other slots are what they were.

        Raises:
            RowmeshError: it cannot be written; names the store.
        """
        ...

    def flush(self) -> None:
        """Returns when what was written would outlive this process, where the store can do that at all.

        Raises:
            RowmeshError: it cannot be written; names the store.
        """
        ...

    def close(self) -> None:
        """Frees what the store holds. May be called again."""
        ...


MakeStore = Callable[[int, int], BackingStore]
"""Makes the store of a group on a rank, given the number of records and the bytes of one."""


class MemoryStore:
    """Records in this process's memory, which the system provides page by page as records are written.

    Example:
        >>> store = MemoryStore(100, 8)
        >>> store.write(np.array([3], np.uint32), np.full((1, 8), 7, np.uint8))
        >>> records = np.empty((1, 8), np.uint8)
        >>> store.read(np.array([3], np.uint32), records)
        >>> records.tolist()
        [[7, 7, 7, 7, 7, 7, 7, 7]]
    """

    def __init__(self, num_records: int, record_bytes: int) -> None:
        self.stride = record_bytes
        memory = Buffer(num_records * record_bytes)
        self.num_bytes = memory.num_bytes
        self._records: Records | None = Records([memory.tensor(torch.uint8, num_records, record_bytes)])

    def read(self, slots: np.ndarray, records: np.ndarray) -> None:
        """Copies records out."""
        assert self._records is not None, "the store is closed"
        self._records.pack(slots, records)

    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        """Copies records in."""
        assert self._records is not None, "the store is closed"
        self._records.unpack(slots, records)

    def flush(self) -> None:
        """Memory does not outlive the process."""

    def close(self) -> None:
        """Frees the memory."""
        self._records, self.num_bytes = None, 0

    def __str__(self) -> str:
        return "host memory"

"""RecordStore: what every store of records offers, and what all of them check.

A record is a fixed number of bytes, by logical shard and id, of one table. Stores do not look into it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rowmesh.errors import DataError

_SIGN = np.uint64(1 << 63)  # flipped, so that bytes sort as the ids do
KEY = np.dtype([("shard", ">u4"), ("id", ">u8")])


class RecordStore(Protocol):
    """Records of one table. A write is acknowledged when its call returns. One thread at a time.

    A call can be repeated: it leaves the same records. Where one raises, some of its own records may be written, and
    no other has changed.

    Attributes:
        record_bytes: of a record.
    """

    record_bytes: int

    def get(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Reads records.

        Args:
            shards: int64 `[N]`.
            ids: int64 `[N]`, distinct.
            records: uint8 `[N, record_bytes]` out; those not found stay as they were.

        Returns:
            bool `[N]`, whether each was found.

        Raises:
            StoreError: the store does not answer, or has lost records; names it.
        """
        ...

    def put(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> None:
        """Writes records, in place of those that are there; see `get`.

        Raises:
            NoRoomError: the store is bounded and full; nothing was written.
            StoreError: the store does not answer, or has lost records; names it.
        """
        ...

    def delete(self, shards: np.ndarray, ids: np.ndarray) -> None:
        """Removes records; those that are not there are left out silently."""
        ...

    def ids_in(self, shard: int) -> np.ndarray:
        """The ids of all records of a shard, int64 `[N]` ascending."""
        ...

    def clear(self, shards: range) -> None:
        """Removes all records of some shards. A store that no other process may have open is emptied."""
        ...

    def flush(self) -> None:
        """Returns when what was written would outlive this process, and a power cut where the store can do that."""
        ...

    def close(self) -> None:
        """Frees what the store holds here; may be called again."""
        ...


def check_batch(name: str, shards: np.ndarray, ids: np.ndarray, shape: tuple[int, ...] | None, width: int) -> None:
    """Raises where the arrays of a call are not what a store takes.

    Args:
        name: of the store, for errors.
        shards: see `RecordStore.get`.
        ids: see `RecordStore.get`.
        shape: of the records; None where there are none.
        width: bytes of a record.
    """
    if ids.dtype != np.int64 or ids.ndim != 1 or shards.dtype != np.int64 or shards.shape != ids.shape:
        raise DataError(
            f"{name}: shards and ids must be int64 [N], got {shards.dtype} {list(shards.shape)} and {ids.dtype} "
            f"{list(ids.shape)}"
        )
    if shape is not None and shape != (len(ids), width):
        raise DataError(f"{name}: records must be uint8 [{len(ids)}, {width}], got {list(shape)}")
    if len(np.unique(ids)) != len(ids):
        raise DataError(f"{name}: ids must be distinct")


def keys_of(shards: np.ndarray, ids: np.ndarray) -> list[bytes]:
    """Twelve bytes a record, in the order of (shard, id).

    Example:
        >>> keys = keys_of(np.array([1, 1, 0]), np.array([5, -5, 7]))
        >>> sorted(keys) == [keys[2], keys[1], keys[0]]
        True
    """
    keys = np.empty(len(ids), KEY)
    keys["shard"], keys["id"] = shards, ids.view(np.uint64) ^ _SIGN
    return rows_of(keys.view(np.uint8).reshape(len(ids), KEY.itemsize))


def ids_of(keys: list[bytes]) -> np.ndarray:
    """The ids of keys, int64 `[N]`."""
    return (np.frombuffer(b"".join(keys), KEY)["id"].astype(np.uint64) ^ _SIGN).view(np.int64)


def rows_of(rows: np.ndarray) -> list[bytes]:
    """The bytes of each row of `[N, width]`."""
    whole, width = rows.tobytes(), rows.shape[1] * rows.itemsize
    return [whole[first : first + width] for first in range(0, len(whole), width)]


def fill(values: list[bytes | None], records: np.ndarray, name: str) -> np.ndarray:
    """Copies what was found into `records`; returns which were."""
    found = np.array([value is not None for value in values], bool)
    whole = b"".join(value for value in values if value is not None)
    width = records.shape[1]
    if len(whole) != int(found.sum()) * width:
        raise DataError(f"{name} has a record that is not {width} bytes long; something else wrote to it")
    if found.any():
        records[found] = np.frombuffer(whole, np.uint8).reshape(-1, width)
    return found

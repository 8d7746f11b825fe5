"""RocksRecords: records in RocksDB, which outlive the process."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from rowmesh._support import extras
from rowmesh._support.faults import reach
from rowmesh.errors import ConfigurationError, StoreError
from rowmesh.tables.dynamic.stores.protocol import check_batch, fill, ids_of, keys_of, rows_of
from rowmesh.tables.dynamic.stores.retry import Retry

_ABOUT = b"rowmesh"  # a key of another length than those of records
_BITS_A_KEY = 10.0  # of the filters: one read of a hundred is in vain
_BLOCK_BYTES = 1024  # some records: neighbours in a shard are seldom wanted together
_KEYS_A_BUCKET = 0.75  # of the hash table in each block


def rocksdict() -> Any:
    """The package, or an error that names the extra."""
    return extras.load("rocksdict", "rocksdb", "RocksDB is used")


def options_of(rocks: Any) -> Any:
    """How databases of records are kept: keys are bytes, rows are not compressed, filters spare reads in vain, and a
    record is found without a search of its block.
    """
    options = rocks.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(rocks.DBCompressionType.none())
    options.set_max_open_files(-1)  # a reader keeps its files where a writer removes them
    options.set_keep_log_file_num(2)
    blocks = rocks.BlockBasedOptions()
    blocks.set_bloom_filter(_BITS_A_KEY, False)
    blocks.set_block_size(_BLOCK_BYTES)
    blocks.set_data_block_index_type(rocks.DataBlockIndexType.binary_and_hash())
    blocks.set_data_block_hash_ratio(_KEYS_A_BUCKET)
    options.set_block_based_table_factory(blocks)
    return options


class RocksRecords:
    """Records of one table in a folder of RocksDB; see `RecordStore`. One process has it open at a time.

    Writes outlive this process as soon as their call returns, however the process ends. `flush` makes them outlive a
    power cut; `sync` does so with every call.

    Args:
        table: its name.
        folder: made if need be; its parents too.
        record_bytes: of a record.
        sync: whether every write waits for the disk.
        retry: for reads and writes that fail, and where another process still has the folder.

    Raises:
        ConfigurationError: the package rocksdict is not installed, or the folder has something else; names it.
        StoreError: it cannot be opened.
    """

    def __init__(
        self, table: str, folder: Path, record_bytes: int, *, sync: bool = False, retry: Retry | None = None
    ) -> None:
        self._rocks = rocksdict()
        self.record_bytes, self._retry = record_bytes, retry or Retry()
        self._name = f"RocksDB {folder}"
        self._options = self._rocks.WriteOptions()
        self._options.sync = sync
        self._database: Any = None
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._database = self._call(lambda: self._rocks.Rdict(str(folder), options_of(self._rocks)))
        try:
            self._check(f"{table}\n{record_bytes}")
        except BaseException:
            self.close()
            raise

    def _check(self, about: str) -> None:
        written = self._call(lambda: self._database.get(_ABOUT))
        if written is None:
            self._write({_ABOUT: about.encode()})
        elif written.decode() != about:
            table, width = written.decode().split("\n")
            raise ConfigurationError(
                f"{self._name} has records of {width} bytes of table {table!r}; name another folder, or remove it"
            )

    def get(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> np.ndarray:
        """See `RecordStore.get`."""
        check_batch(self._name, shards, ids, records.shape, self.record_bytes)
        keys = keys_of(shards, ids)
        return fill(self._call(lambda: self._database.get(keys)) if keys else [], records, self._name)

    def put(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> None:
        """See `RecordStore.put`; all records of a call appear at once."""
        check_batch(self._name, shards, ids, records.shape, self.record_bytes)
        self._write(dict(zip(keys_of(shards, ids), rows_of(records), strict=True)))

    def delete(self, shards: np.ndarray, ids: np.ndarray) -> None:
        """See `RecordStore.delete`."""
        check_batch(self._name, shards, ids, None, 0)
        self._write(dict.fromkeys(keys_of(shards, ids)))

    def ids_in(self, shard: int) -> np.ndarray:
        """See `RecordStore.ids_in`."""
        return ids_of(self._call(lambda: self._keys(shard.to_bytes(4, "big"))))

    def _keys(self, prefix: bytes) -> list[bytes]:
        keys = takewhile(lambda key: key.startswith(prefix), self._database.keys(from_key=prefix))
        return [key for key in keys if key != _ABOUT]

    def clear(self, shards: range) -> None:
        """See `RecordStore.clear`."""
        self._write({key: None for key in self._call(lambda: list(self._database.keys())) if key != _ABOUT})

    def flush(self) -> None:
        """Waits for the disk."""
        self._call(lambda: self._database.flush_wal(True))

    def close(self) -> None:
        """See `RecordStore.close`."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _write(self, changes: dict[bytes, bytes | None]) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        for key, value in changes.items():
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        reach("stores.rocksdb.write")
        if changes:
            self._call(lambda: self._database.write(batch, self._options))

    def _call(self, operation: Any) -> Any:
        try:
            return self._retry(operation, _may_pass, self._name)
        except StoreError:
            raise
        except Exception as error:  # the package raises this base alone
            raise StoreError(f"{self._name} cannot be used: {error}") from error


def _may_pass(error: Exception) -> bool:
    return str(error).startswith(("IO error", "Busy", "Timed out"))

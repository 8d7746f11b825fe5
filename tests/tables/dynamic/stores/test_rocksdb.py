"""RocksDB: what was acknowledged is there after the process was killed."""

import subprocess
import sys

import numpy as np
import pytest

from rowmesh._support.faults import VARIABLE
from rowmesh.errors import ConfigurationError, StoreError
from rowmesh.tables.dynamic.stores import Retry
from rowmesh.tables.dynamic.stores.rocksdb import RocksRecords

pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")

WRITER = """
import sys
from pathlib import Path
import numpy as np
from rowmesh.tables.dynamic.stores.rocksdb import RocksRecords
store = RocksRecords("user", Path(sys.argv[1]), 2)
for step in range(100):
    ids = np.arange(step * 10, step * 10 + 10)
    store.put(ids % 3, ids, np.stack([ids, ids + step], axis=1).astype(np.uint8))
    print(step, flush=True)
"""


def test_what_was_acknowledged_is_there_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "stores.rocksdb.write@6=kill")  # the first write says what is there
    command = [sys.executable, "-c", WRITER, str(tmp_path / "records")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == -9
    assert done.stdout.split() == ["0", "1", "2", "3"]
    store = RocksRecords("user", tmp_path / "records", 2)
    ids, records = np.arange(50), np.zeros((50, 2), np.uint8)
    assert store.get(ids % 3, ids, records).tolist() == [i < 40 for i in range(50)]
    assert records[:40].tolist() == [[i, i + i // 10] for i in range(40)]
    store.close()


def test_a_folder_of_another_process_or_table_is_named(tmp_path):
    store = RocksRecords("user", tmp_path / "records", 2)
    with pytest.raises(StoreError, match=r"RocksDB .*records did not answer for 0\.1 s: .*lock"):
        RocksRecords("user", tmp_path / "records", 2, retry=Retry(for_s=0.1))
    store.close()
    with pytest.raises(ConfigurationError, match="has records of 2 bytes of table 'user'; name another folder"):
        RocksRecords("item", tmp_path / "records", 2)
    reopened = RocksRecords("user", tmp_path / "records", 2, sync=True)
    reopened.flush()
    reopened.close()
    reopened.close()

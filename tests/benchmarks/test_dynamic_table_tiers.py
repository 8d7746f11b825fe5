"""Stores below an index: what the benchmark counts, and what it refuses."""

import numpy as np
import pytest

from benchmarks.command import Report
from benchmarks.dynamic_table_tiers import measure, record_of, run
from rowmesh.tables.dynamic.stores import open_records


def test_records_come_back_as_they_left():
    numbers = measure(open_records("memory", "benchmark", 12, max_records=4000), 2000, 100, 12, 3)
    assert numbers["records_in_a_step"] == numbers["records_out_a_step"] > 0


def test_a_store_that_mixes_records_up_fails():
    store = open_records("memory", "benchmark", 12, max_records=4000)
    get = store.get

    def mixed_up(shards, ids, records):
        found = get(shards, ids, records)
        records[:] = records[::-1].copy()
        return found

    store.get = mixed_up
    with pytest.raises(AssertionError, match="the store has not what left for it"):
        measure(store, 2000, 100, 12, 3)


def test_records_differ():
    assert len(np.unique(record_of(np.arange(100), 12), axis=0)) == 100


def test_unknown_tiers_are_named():
    with pytest.raises(SystemExit, match=r"--tier takes memory, file, rocksdb, redis, .* got disk"):
        run(Report("dynamic_table", None), ["disk"], 1, 1, 1, 1)

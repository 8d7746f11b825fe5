"""Counters add up; what the exchange counts with them is tested in tests/test_collection.py."""

import numpy as np

from rowmesh.observe.exchange_counters import GroupCounters


def test_tables_are_counted_by_name():
    counters = GroupCounters("g", tables=("a", "b"))
    assert counters.table_accesses == counters.table_distinct == {"a": 0, "b": 0}
    counters.count_tables(np.array([5, 0]), np.array([0, 3, 3]))
    counters.count_tables(np.array([1, 2]), np.array([0, 1, 3]))
    assert counters.table_accesses == {"a": 6, "b": 2}
    assert counters.table_distinct == {"a": 4, "b": 2}

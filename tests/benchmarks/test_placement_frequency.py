"""Order of frequency: a counting sort that says where each id went."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.placement_frequency import order_by_frequency
from rowmesh.errors import ConfigurationError


@given(st.lists(st.one_of(st.integers(0, 5), st.integers(65_530, 65_540), st.integers(0, 2**31 - 1)), max_size=80))
def test_orders_like_a_stable_sort(counts):
    counts = np.array(counts, np.int32)
    rows, distinct, lengths = order_by_frequency(counts)
    order = np.argsort(-counts.astype(np.int64), kind="stable")
    assert rows[order].tolist() == list(range(len(counts)))
    assert np.repeat(distinct, lengths).tolist() == counts[order].tolist()
    assert np.all(np.diff(distinct) < 0)
    assert np.all(lengths > 0)


def test_writes_to_memory_mapped_rows(tmp_path):
    np.save(tmp_path / "counts.npy", np.array([1, 70_000, 0, 5, 70_000]))
    rows = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.uint32, (5,))
    order_by_frequency(np.load(tmp_path / "counts.npy", mmap_mode="r"), rows)
    rows.flush()
    assert np.load(tmp_path / "rows.npy").tolist() == [3, 0, 4, 2, 1]


def test_refuses_negative_counts():
    with pytest.raises(ConfigurationError, match="must not be negative"):
        order_by_frequency(np.array([1, -1]))

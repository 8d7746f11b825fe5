"""AccessSketch: sums are exact, heavy rows are bounded, memory is too."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.errors import ConfigurationError, IdRangeError
from rowmesh.placement.plan import TableShape
from rowmesh.placement.sketch import AccessSketch, range_edges


def shape(num_rows, name="item"):
    return TableShape(name, num_rows, value_bytes=64, gradient_bytes=64)


def sketched(batches, num_rows, capacity):
    sketch = AccessSketch([shape(num_rows)], capacity=capacity)
    for batch in batches:
        sketch.add({"item": np.asarray(batch, np.int64)}, num_samples=1)
    return sketch


def true_counts(batches, num_rows):
    accesses = np.bincount(np.concatenate([[], *batches]).astype(int), minlength=num_rows)
    contained = sum((np.bincount(np.unique(b).astype(int), minlength=num_rows) for b in batches), np.zeros(num_rows))
    return accesses, contained


# Few rows and a small capacity, so that rows come and go all the time.
streams = st.lists(
    st.one_of(
        st.lists(st.integers(0, 299), max_size=12),
        st.lists(st.integers(0, 9), max_size=12),
        st.integers(0, 299).map(lambda row: [row] * 5),
    ),
    min_size=1,
    max_size=60,
)


@given(streams, st.integers(1, 12))
def test_counts_are_within_their_bounds(batches, capacity):
    sketch, (accesses, contained) = sketched(batches, 300, capacity), true_counts(batches, 300)
    floor, heavy, total = sketch.floor("item"), sketch.heavy("item"), accesses.sum()
    assert floor <= total / (capacity + 1)
    assert np.all(heavy.accesses <= accesses[heavy.rows])
    assert np.all(accesses[heavy.rows] <= heavy.accesses + heavy.error)
    assert np.all(heavy.batches <= contained[heavy.rows])
    assert np.all(contained[heavy.rows] <= heavy.batches + heavy.error)
    assert np.all(heavy.error <= floor)
    exact = heavy.error == 0
    assert np.array_equal(heavy.accesses[exact], accesses[heavy.rows[exact]])
    assert np.array_equal(heavy.batches[exact], contained[heavy.rows[exact]])
    others = np.setdiff1d(np.arange(300), heavy.rows)
    assert accesses[others].max(initial=0) <= 2 * floor  # held but light, or not held at all


@given(streams, st.integers(1, 12))
def test_the_profile_loses_no_access(batches, capacity):
    table = sketched(batches, 300, capacity).profile().tables[0]
    accesses, contained = true_counts(batches, 300)
    assert table.total_accesses == pytest.approx(accesses.sum())
    assert table.batches is not None
    assert table.lengths @ table.batches <= contained.sum() + 1e-9
    first = range_edges(300)[:-1]
    by_range = np.add.reduceat(np.repeat(table.accesses, table.lengths), first)
    assert by_range.tolist() == pytest.approx(np.add.reduceat(accesses, first).tolist())


@given(streams)
def test_all_is_exact_while_it_fits(batches):
    sketch, (accesses, contained) = sketched(batches, 300, 300), true_counts(batches, 300)
    table = sketch.profile().tables[0]
    assert np.repeat(table.accesses, table.lengths).tolist() == accesses.tolist()
    assert np.repeat(table.batches, table.lengths).tolist() == contained.tolist()
    assert sketch.floor("item") == 0


def test_a_skewed_stream_keeps_its_heavy_rows_exact():
    rng = np.random.default_rng(0)
    weights = np.arange(1, 200_001) ** -1.1
    batches = rng.choice(200_000, (200, 2000), p=weights / weights.sum())
    sketch, (accesses, contained) = sketched(batches, 200_000, 2000), true_counts(batches, 200_000)
    heavy = sketch.heavy("item")
    threshold = batches.size / 2001
    above = np.flatnonzero(accesses > threshold)
    assert set(above) <= set(heavy.rows)
    assert len(above) > 100
    first = np.searchsorted(heavy.rows, above)
    assert np.mean(heavy.error[first] == 0) > 0.95
    assert np.all(heavy.error[first] <= 0.03 * accesses[above])
    table = sketch.profile().tables[0]
    assert table.lengths @ table.batches == pytest.approx(contained.sum())
    assert sketch.memory_bytes < 4000 * 160 + 40_000


def test_memory_is_bounded_and_grows_with_what_is_held():
    sketch = AccessSketch([shape(1 << 30)], capacity=1000)
    sketch.add({"item": np.arange(10)}, num_samples=500)
    assert sketch.memory_bytes < 60_000
    rng = np.random.default_rng(0)
    for _ in range(100):
        sketch.add({"item": rng.integers(0, 1 << 30, 500)}, num_samples=500)
        assert sketch.memory_bytes < 2000 * 160 + 50_000


def test_counts_batches_of_several_tables():
    sketch = AccessSketch([shape(10, "a"), shape(10, "b")])
    sketch.add({"a": np.array([1, 1, 2]), "b": np.array([3])}, num_samples=3)
    sketch.add({"a": np.array([1])}, num_samples=1)
    profile = sketch.profile()
    assert (sketch.num_samples, profile.num_samples, profile.batch_size, profile.num_batches) == (4, 4, 3, 2)
    assert profile.presence(0, 3).tolist() == [0.0, 1.0, 0.75, 0.0]  # the last is a third of a batch
    assert profile.presence(1, 3).tolist() == [0.0, 0.75, 0.0]


@given(st.integers(1, 1 << 33))
def test_ranges_are_narrow(num_rows):
    edges = range_edges(num_rows)
    assert edges[0] == 0
    assert edges[-1] == num_rows
    widths = np.diff(edges)
    assert np.all(widths >= 1)
    assert np.all(widths <= np.maximum(edges[:-1] / 64, 1))
    assert len(edges) < 2000


def test_errors():
    sketch = AccessSketch([shape(10)])
    with pytest.raises(ConfigurationError, match=r"no tables \['user'\]; it has \['item'\]"):
        sketch.add({"user": np.array([1])}, num_samples=1)
    with pytest.raises(IdRangeError, match=r"'item' has rows 0 to 9, but ids from 3 to 10 came"):
        sketch.add({"item": np.array([3, 10])}, num_samples=2)
    with pytest.raises(ConfigurationError, match="a batch of 0 samples"):
        sketch.add({}, num_samples=0)
    with pytest.raises(ConfigurationError, match="needs samples"):
        sketch.profile()
    sketch.add({"item": np.array([3, 9])}, num_samples=2)
    sketch.add({"item": np.array([3])}, num_samples=1)
    with pytest.raises(ConfigurationError, match="a batch of 2 samples came after one of 1; all but the last"):
        sketch.add({"item": np.array([3, 9])}, num_samples=2)
    with pytest.raises(ConfigurationError, match="capacity must be 1 or more, got 0"):
        AccessSketch([], capacity=0)

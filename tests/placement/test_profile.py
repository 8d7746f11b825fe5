"""Profile: runs of equal counts, chances that batches contain rows."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.data import Loader, Schema, prepare
from rowmesh.data.profile import profile_prepared
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.placement import profile as module
from rowmesh.placement.demand import Demand
from rowmesh.placement.plan import TableShape
from rowmesh.placement.profile import Profile, TableProfile
from rowmesh.placement.request import Request


def shape(num_rows, name="item"):
    return TableShape(name, num_rows, value_bytes=64, gradient_bytes=64, state_bytes=4)


def rows(table, values):
    """The value of every row."""
    return np.repeat(values, table.lengths)


counted = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=60)


@given(counted, st.integers(1, 7))
def test_runs_stand_for_every_row(pairs, chunk_rows):
    counts = np.array([count for count, _ in pairs], np.int32)
    batches = np.array([contained for _, contained in pairs])
    kept, module.CHUNK_ROWS = module.CHUNK_ROWS, chunk_rows
    try:
        table = TableProfile.of_counts(shape(len(pairs)), counts, batches)
    finally:
        module.CHUNK_ROWS = kept
    assert rows(table, table.accesses).tolist() == counts.tolist()
    assert np.all(np.diff(table.accesses) != 0)
    assert table.starts[-1] == len(pairs)
    assert table.batches is not None
    assert table.lengths @ table.batches == pytest.approx(batches.sum())
    for first, stop, mean in zip(table.starts[:-1], table.starts[1:], table.batches, strict=True):
        assert mean == pytest.approx(batches[first:stop].mean())


def test_memory_mapped_counts_are_not_copied_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ROWS", 1000)
    np.save(tmp_path / "counts.npy", np.repeat(np.arange(50, 0, -1), 100))
    table = TableProfile.of_counts(shape(5000), np.load(tmp_path / "counts.npy", mmap_mode="r"))
    assert table.lengths.tolist() == [100] * 50
    assert table.is_falling
    assert table.total_accesses == 100 * 50 * 51 / 2


def test_presence_of_independent_draws():
    one_hot = Profile.from_counts({"item": [5, 3, 0]}, [shape(3)], num_samples=8)
    assert one_hot.is_one_hot(0)
    assert one_hot.presence(0, 3).tolist() == pytest.approx([1 - (3 / 8) ** 3, 1 - (5 / 8) ** 3, 0.0])
    bags = Profile.from_counts({"item": [20, 3, 0]}, [shape(3)], num_samples=8)
    assert not bags.is_one_hot(0)
    assert bags.presence(0, 2).tolist() == pytest.approx([1 - np.exp(-5), 1 - np.exp(-0.75), 0.0])
    always = Profile.from_counts({"item": [8, 0]}, [shape(2)], num_samples=8)
    assert always.presence(0, 1).tolist() == [1.0, 0.0]


def test_presence_where_batches_were_counted():
    profile = Profile.from_counts(
        {"item": [70, 20, 10, 0]}, [shape(4)], num_samples=100, batches={"item": [10, 5, 1, 0]}, batch_size=10
    )
    assert profile.num_batches == 10
    assert profile.presence(0, 10).tolist() == pytest.approx([1.0, 0.5, 0.1, 0.0])
    assert profile.presence(0, 20).tolist() == pytest.approx([1.0, 0.75, 0.19, 0.0])
    # The first row was in every batch of 10: of smaller ones nothing is known but its rate.
    assert profile.presence(0, 1).tolist() == pytest.approx([0.7, 1 - 0.5**0.1, 1 - 0.9**0.1, 0.0])


def test_presence_of_what_a_step_reads_whatever_its_samples_are():
    """Draws that ranks share are the same for all of them; of a split table each rank reads its part."""
    counted = TableProfile.of_counts(shape(3), [5, 3, 0])
    drawn = Profile((replace(counted, drawn=np.array([0.5, 0.0, 0.1])),), num_samples=8)
    assert drawn.presence(0, 1).tolist() == pytest.approx([1 - 3 / 8 * 0.5, 3 / 8, 0.1])
    assert drawn.presence(0, 2).tolist() == pytest.approx([1 - (3 / 8) ** 2 * 0.5, 1 - (5 / 8) ** 2, 0.1])
    assert drawn.presence(0, 2, steps=2)[2] == pytest.approx(1 - 0.9**2)
    split = Profile((replace(counted, is_split=True),), num_samples=8)
    assert split.presence(0, 1, share=0.25).tolist() == pytest.approx([1 - 3 / 8 * 0.75, 1 - 5 / 8 * 0.75, 0.25])
    assert split.presence(0, 4).tolist() == [1.0, 1.0, 1.0]


def test_ranks_and_nodes_demand_the_parts_of_a_split_table():
    table = replace(TableProfile.of_counts(shape(3), [0, 0, 0]), is_split=True)
    demand = Demand.of(Profile((table,), num_samples=8), 4, 2, Request(batch_size=1))
    assert [each[0] for each in (demand.rank, demand.node, demand.world)] == [0.25, 0.5, 1.0]
    of_a_group = Demand.of(Profile((table,), num_samples=8), 4, 2, Request(batch_size=1), share=0.5)
    assert [each[0] for each in (of_a_group.rank, of_a_group.node, of_a_group.world)] == [0.125, 0.25, 0.5]


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 64))
def test_presence_equals_what_batches_hold_on_average(seed, batch_size):
    rng = np.random.default_rng(seed)
    drawn = rng.zipf(1.5, (20, batch_size)).clip(1, 30) - 1
    counts = np.bincount(drawn.ravel(), minlength=30)
    contained = sum(np.bincount(np.unique(batch), minlength=30) for batch in drawn)
    profile = Profile.from_counts(
        {"item": counts}, [shape(30)], drawn.size, batches={"item": contained}, batch_size=batch_size
    )
    assert profile.uniques(0, batch_size)[-1] == pytest.approx(np.mean([len(np.unique(batch)) for batch in drawn]))
    u = [profile.presence(0, samples) for samples in (1, batch_size, 4 * batch_size)]
    assert np.all(u[0] <= u[1] + 1e-12)
    assert np.all(u[1] <= u[2] + 1e-12)
    assert np.all((u[0] >= 0) & (u[2] <= 1))


def test_save_and_load(tmp_path):
    profile = Profile.from_counts(
        {"a": [4, 2, 2, 0], "b": [9, 1]}, [shape(4, "a"), shape(2, "b")], 8, batches={"a": [2, 1, 2, 0]}, batch_size=4
    )
    first, second = profile.tables
    first = replace(first, drawn=0.1 * first.lengths, num_features=3, num_jagged=2, weight_bytes=8)
    profile = replace(profile, tables=(first, replace(second, is_split=True, shape=replace(second.shape, send="auto"))))
    profile.save(tmp_path / "profile.npz")
    again = Profile.load(tmp_path / "profile.npz")
    assert (again.shapes, again.num_samples, again.batch_size) == (profile.shapes, 8, 4)
    for one, two in zip(again.tables, profile.tables, strict=True):
        for name in ("lengths", "accesses", "batches", "drawn"):
            assert np.array_equal(getattr(one, name), getattr(two, name)), name
    assert again.tables[1].batches is again.tables[1].drawn is None
    assert [table.is_split for table in again.tables] == [False, True]
    bags = [(table.num_features, table.num_jagged, table.weight_bytes) for table in again.tables]
    assert bags == [(3, 2, 8), (1, 1, 0)]
    assert [table.shape.send for table in again.tables] == ["rows", "auto"]


def test_bags_of_a_rank_are_counted():
    profile = Profile.from_counts({"a": [4, 2, 2, 0], "b": [9, 1]}, [shape(4, "a"), shape(2, "b")], 8)
    first, second = profile.tables
    tables = (replace(first, num_features=2, weight_bytes=4), replace(second, num_jagged=0))
    demand = Demand.of(replace(profile, tables=tables), 2, 2, Request(batch_size=16))
    assert demand.ids.tolist() == [16.0, 20.0]
    assert demand.bags.tolist() == [32.0, 16.0]
    assert demand.bags_bytes.tolist() == [16 * 8 + 4 * 16 + 2 * 8, 20 * 4 + 8]


def test_errors_name_the_table_and_the_values(tmp_path):
    with pytest.raises(ConfigurationError, match=r"'item' has 3 rows, but counts of shape \(2,\)"):
        Profile.from_counts({"item": [1, 2]}, [shape(3)], 4)
    with pytest.raises(ConfigurationError, match=r"without counts: \['item'\], counts without a table: \['user'\]"):
        Profile.from_counts({"user": [1]}, [shape(1)], 4)
    with pytest.raises(ConfigurationError, match=r"'item' has 3 rows, but the runs of its profile 2"):
        TableProfile(shape(3), np.array([2]), np.array([1.0]))
    with pytest.raises(ConfigurationError, match=r"accesses must be finite and 0 or more"):
        TableProfile(shape(2), np.array([2]), np.array([np.nan]))
    with pytest.raises(ConfigurationError, match=r"in 3 batches, but 4 samples make 2 batches of 2"):
        Profile.from_counts({"item": [1]}, [shape(1)], 4, batches={"item": [3]}, batch_size=2)
    with pytest.raises(ConfigurationError, match=r"batch_size is not given"):
        Profile.from_counts({"item": [1]}, [shape(1)], 4, batches={"item": [3]})
    with pytest.raises(ConfigurationError, match=r"needs samples, got 0"):
        Profile((), 0)
    with pytest.raises(ConfigurationError, match=r"\['item'\] are in the profile more than once"):
        Profile.from_counts({"item": [1]}, [shape(1)] * 2, 4)
    with pytest.raises(ConfigurationError, match=r"cannot read the profile .*none\.npz"):
        Profile.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(ConfigurationError, match=r"text\.npz: not a profile"):
        Profile.load(tmp_path / "text.npz")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """1,003 samples: one id a sample with a burst, and bags with repeats; ids met once share the last row."""
    path, rng = tmp_path_factory.mktemp("profile"), np.random.default_rng(3)
    user = rng.zipf(1.3, 1003) % 200
    user[500:550] = 777  # in a few batches only
    bags = [rng.integers(0, 20, n).tolist() for n in rng.integers(0, 4, 1003)]
    pq.write_table(
        pa.table({"y": user % 2, "user": user, "bag": pa.array(bags, pa.list_(pa.int64()))}), path / "train.parquet"
    )
    schema = Schema(format="parquet", label="y", dense=(), categorical=("user", "bag"))
    return prepare({"train": [path / "train.parquet"]}, path / "out", schema, min_count=2, block_samples=64)


def shapes(prepared, *names):
    return [shape(prepared.table(name).num_rows, name) for name in names]


def test_profile_prepared_reads_the_stored_counts(prepared):
    profile = profile_prepared(prepared.folder, shapes(prepared, "user", "bag"))
    assert (profile.num_samples, profile.batch_size) == (1003, None)
    assert profile.is_one_hot(0)
    assert not profile.is_one_hot(1)
    assert [(table.num_features, table.num_jagged) for table in profile.tables] == [(1, 0), (1, 1)]
    for table in profile.tables:
        assert rows(table, table.accesses).tolist() == prepared.counts(table.name).tolist()
    assert not profile.tables[0].is_falling  # rare ids stand last


@pytest.mark.parametrize("batch_size", [1, 37, 256, 1002, 1003])
def test_profile_prepared_counts_the_batches_that_contain_a_row(prepared, batch_size):
    """Whole ones: the last of 1,003 samples may be a small one, of which no step is."""
    profile = profile_prepared(prepared, shapes(prepared, "bag", "user"), batch_size=batch_size, shuffle=False)
    loader = Loader(prepared, "train", batch_size=batch_size, drop_last=True)
    for index, table in enumerate(profile.tables):
        contained = np.zeros(table.shape.num_rows)
        for batch in loader:
            contained[np.unique(batch.sparse.select([table.name]).ids.numpy())] += 1 / loader.num_batches
        assert profile.uniques(index, batch_size)[-1] == pytest.approx(contained.sum())
        for first, stop, chance in zip(
            table.starts[:-1], table.starts[1:], profile.presence(index, batch_size), strict=True
        ):
            assert chance == pytest.approx(contained[first:stop].mean())


def test_profile_prepared_counts_the_only_batch_though_it_is_small(prepared):
    profile = profile_prepared(prepared, shapes(prepared, "user"), batch_size=5000)
    assert profile.tables[0].batches is not None
    assert profile.tables[0].batches.tolist() == [1.0] * len(profile.tables[0].lengths)


def test_batches_are_those_of_the_seed(prepared):
    one, again, other = (
        profile_prepared(prepared, shapes(prepared, "user"), batch_size=37, seed=seed) for seed in (1, 1, 2)
    )
    assert np.array_equal(one.presence(0, 37), again.presence(0, 37))
    assert not np.array_equal(one.presence(0, 37), other.presence(0, 37))


def test_a_small_last_batch_counts_as_the_part_that_it_is():
    profile = Profile.from_counts({"item": [3]}, [shape(1)], 1001, batches={"item": [3]}, batch_size=100)
    assert profile.num_batches == 11
    assert profile.presence(0, 100).tolist() == pytest.approx([3 / 10.01])


def test_shuffled_batches_spread_a_burst(prepared):
    plain, shuffled = (
        profile_prepared(prepared, shapes(prepared, "user"), batch_size=32, shuffle=shuffle)
        for shuffle in (False, True)
    )
    assert shuffled.uniques(0, 32)[-1] > plain.uniques(0, 32)[-1]
    assert shuffled.uniques(0, 32)[-1] == pytest.approx(
        profile_prepared(prepared, shapes(prepared, "user")).uniques(0, 32)[-1], rel=0.03
    )


def test_profile_prepared_refuses_other_tables(prepared):
    with pytest.raises(ConfigurationError, match=r"'user' has 5 rows, but counts of shape"):
        profile_prepared(prepared, [shape(5, "user")])
    with pytest.raises(DataError, match="has no feature 'users'"):
        profile_prepared(prepared, [shape(5, "users")])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(0, 60), st.integers(0, 60), st.integers(1, 7))
def test_unordered_rows_are_few_runs(counts, first, size, most):
    unordered = range(min(first, len(counts)), min(first + size, len(counts)))
    kept, module.MAX_BANDS = module.MAX_BANDS, most
    try:
        table = TableProfile.of_counts(shape(len(counts)), counts, unordered=unordered)
    finally:
        module.MAX_BANDS = kept
    inside = (table.starts[:-1] >= unordered.start) & (table.starts[:-1] < unordered.stop)
    assert inside.sum() <= most
    assert table.starts[-1] == len(counts)
    assert table.total_accesses == pytest.approx(sum(counts))
    for start, stop, mean in zip(table.starts[:-1], table.starts[1:], table.accesses, strict=True):
        assert mean == pytest.approx(np.mean(counts[start:stop]))
        assert (start in unordered) == (stop - 1 in unordered)
        assert start in unordered or len(set(counts[start:stop])) == 1

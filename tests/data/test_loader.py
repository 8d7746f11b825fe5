"""The loader: the same global batches for any world size, in a reproducible order, from any position."""

import threading
import time
import weakref
from dataclasses import replace
from itertools import chain

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rowmesh.data import Loader, Prepared, Schema, prepare
from rowmesh.data.prepared import Split
from rowmesh.data.window import SplitFile
from rowmesh.errors import ConfigurationError, DataError

NUM_SAMPLES = 103
SCHEMA = Schema(format="parquet", label="y", dense=("row",), dense_transform="none", categorical=("a", "b"))
MULTI_HOT = Schema(format="parquet", label="y", dense=("row",), dense_transform="none", categorical=("a", "bag", "b"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """103 samples in blocks of 8; the dense value is the sample's number, a = number % 10."""
    path = tmp_path_factory.mktemp("loader")
    numbers = np.arange(NUM_SAMPLES)
    table = pa.table(
        {
            "y": numbers % 2,
            "row": numbers.astype(np.float32),
            "a": numbers % 10,
            "b": numbers % 7,
            "bag": pa.array([[int(n)] * (n % 3) for n in numbers], pa.list_(pa.int64())),
        }
    )
    pq.write_table(table, path / "train.parquet")
    prepare({"train": [path / "train.parquet"]}, path / "one_hot", SCHEMA, min_count=1, block_samples=8)
    prepare({"train": [path / "train.parquet"]}, path / "multi_hot", MULTI_HOT, min_count=1, block_samples=8)
    return path


def rows(batch):
    return batch.dense[:, 0].int().tolist()


@hypothesis.given(
    batch_size=st.integers(1, 120),
    world_size=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    window_blocks=st.integers(1, 20),
    seed=st.integers(0, 5),
    prefetch=st.sampled_from([0, 0, 2]),
)
@hypothesis.settings(deadline=None, max_examples=40)
def test_any_world_size_yields_the_same_global_batches(
    folder, batch_size, world_size, shuffle, drop_last, window_blocks, seed, prefetch
):
    def loader(rank, world_size):
        return Loader(
            folder / "one_hot",
            "train",
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            window_blocks=window_blocks,
            prefetch=prefetch,
        )

    whole = [rows(batch) for batch in loader(0, 1)]
    parts = [[rows(batch) for batch in loader(rank, world_size)] for rank in range(world_size)]
    assert [list(chain(*step)) for step in zip(*parts, strict=True)] == whole
    for step in zip(*parts, strict=True):
        sizes = [len(part) for part in step]
        assert max(sizes) - min(sizes) <= 1
    visited = list(chain(*whole))
    assert len(visited) == (NUM_SAMPLES // batch_size * batch_size if drop_last else NUM_SAMPLES)
    assert len(set(visited)) == len(visited)
    assert shuffle or visited == sorted(visited)


def test_columns_of_a_sample_stay_together(folder):
    prepared = Loader(folder / "multi_hot", "train", batch_size=10).prepared
    values = {name: prepared.vocabulary(name).to_pylist() for name in prepared.features}
    for batch in Loader(folder / "multi_hot", "train", batch_size=10, shuffle=True, window_blocks=2):
        offsets = batch.sparse.offsets.tolist()
        for sample, number in enumerate(rows(batch)):
            assert batch.labels[sample] == number % 2
            for feature, name in enumerate(batch.sparse.features):
                bag = feature * batch.sparse.batch_size + sample
                ids = batch.sparse.ids[offsets[bag] : offsets[bag + 1]].tolist()
                expected = {"a": [number % 10], "b": [number % 7], "bag": [number] * (number % 3)}[name]
                assert [values[name][i] for i in ids] == expected


def test_one_hot_batches_have_bags_of_one(folder):
    batch = next(iter(Loader(folder / "one_hot", "train", batch_size=10)))
    assert batch.sparse.bag_size == 1
    assert batch.sparse.ids.dtype == torch.int64
    assert batch.dense.dtype == batch.labels.dtype == torch.float32


@pytest.mark.parametrize("name", ["one_hot", "multi_hot"])
def test_ranks_may_have_no_samples(folder, name):
    for rank in range(8):
        batches = list(Loader(folder / name, "train", batch_size=20, rank=rank, world_size=8))
        assert len(batches) == 6
        assert batches[-1].labels.numel() == batches[-1].sparse.batch_size == (3 * (rank + 1) // 8) - 3 * rank // 8


def test_every_epoch_has_an_order_of_its_own(folder):
    loader = Loader(folder / "one_hot", "train", batch_size=NUM_SAMPLES, shuffle=True, seed=1)
    first, second = ([rows(batch) for batch in loader] for _ in range(2))
    loader.reset()
    again = [rows(batch) for batch in loader]
    assert first != second
    assert first == again


@pytest.mark.parametrize("stop", [0, 1, 5, 10, 11])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_position_is_restored_under_another_world_size(folder, stop, prefetch):
    options = {"batch_size": 10, "shuffle": True, "seed": 4, "prefetch": prefetch, "window_blocks": 3}
    whole = Loader(folder / "one_hot", "train", **options)
    epochs = [rows(batch) for _ in range(2) for batch in whole]
    first = Loader(folder / "one_hot", "train", **options)
    for number, _ in enumerate(first):
        if number + 1 >= stop > 0:
            break
    state = first.state_dict() if stop else Loader(folder / "one_hot", "train", **options).state_dict()
    resumed = [Loader(folder / "one_hot", "train", rank=r, world_size=2, **options) for r in (0, 1)]
    for loader in resumed:
        loader.load_state_dict(state)
    rest = []
    while len(rest) < len(epochs) - stop:
        rest += [list(chain(*(rows(part) for part in step))) for step in zip(*resumed, strict=True)]
    assert rest == epochs[stop:]


@pytest.mark.parametrize("steps", [0, 3, 10, 23])
def test_the_position_of_steps_is_not_that_of_a_reader_ahead(folder, steps):
    options = {"batch_size": 10, "shuffle": True, "seed": 4}
    whole = Loader(folder / "one_hot", "train", **options)
    epochs = [rows(batch) for _ in range(3) for batch in whole]
    resumed = Loader(folder / "one_hot", "train", **options)
    resumed.load_state_dict(whole.state_after(steps))
    assert [rows(batch) for batch in resumed] == epochs[steps : (steps // len(whole) + 1) * len(whole)]


def test_a_loader_of_no_whole_batch_has_a_position(folder):
    loader = Loader(folder / "one_hot", "train", batch_size=NUM_SAMPLES + 1, drop_last=True)
    assert (len(loader), list(loader)) == (0, [])
    loader.load_state_dict(loader.state_after(0))
    assert list(loader) == []


def test_leaving_a_loop_keeps_the_position_and_leaves_no_thread(folder):
    loader = Loader(folder / "one_hot", "train", batch_size=10)
    for _ in loader:
        break
    assert not [t for t in threading.enumerate() if t.name == "rowmesh-prefetch"]
    assert rows(next(iter(loader)))[0] == 10


def test_the_next_window_is_read_before_it_is_needed_and_no_more_than_two_are_held(folder, monkeypatch):
    read, alive, most = [], weakref.WeakSet(), 0
    real = SplitFile.window

    def window(self, blocks):
        read.append(len(read))
        alive.add(made := real(self, blocks))
        nonlocal most
        most = max(most, len(alive))
        return made

    monkeypatch.setattr(SplitFile, "window", window)
    loader = Loader(folder / "one_hot", "train", batch_size=2, shuffle=True, window_blocks=2)  # 7 windows of 8 batches
    for number, _ in enumerate(loader):
        if number == 2:
            deadline = time.monotonic() + 10
            while len(read) < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            assert len(read) == 2
    assert len(read) == 7
    assert most == 2


def test_a_slow_read_is_not_what_a_step_waits_for(folder, monkeypatch):
    """Each window takes 50 ms to read and 80 ms to train on: only the first is waited for."""
    real = SplitFile.window
    monkeypatch.setattr(SplitFile, "window", lambda self, blocks: time.sleep(0.05) or real(self, blocks))
    loader = Loader(folder / "one_hot", "train", batch_size=2, window_blocks=2)
    for number, _ in enumerate(loader):
        if number == 0:
            first_s = loader.waited_s
        time.sleep(0.01)
    assert loader.waited_s - first_s < 0.15  # seven reads take 350 ms


def test_a_broken_read_is_raised_and_leaves_no_thread(folder, monkeypatch):
    loader = Loader(folder / "one_hot", "train", batch_size=10, window_blocks=2)
    real = SplitFile.window

    def window(self, blocks):
        if 2 in blocks:
            raise OSError("the disk is gone")
        return real(self, blocks)

    monkeypatch.setattr(SplitFile, "window", window)
    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(rows(batch) for batch in loader)
    assert list(chain(*seen)) == list(range(10))
    assert not [t for t in threading.enumerate() if t.name == "rowmesh-prefetch"]


def test_ranks_read_only_the_windows_of_their_part(folder, monkeypatch):
    read, real = [], SplitFile.window
    monkeypatch.setattr(SplitFile, "window", lambda self, blocks: read.append(list(blocks)) or real(self, blocks))
    list(Loader(folder / "one_hot", "train", batch_size=104, rank=1, world_size=4, window_blocks=1))
    assert read == [[3], [4], [5], [6]]  # positions 25 to 51


def test_a_split_without_samples_is_refused(folder):
    prepared = Prepared.open(folder / "one_hot")
    empty = replace(prepared, splits={"train": Split(samples=0, positive_rate=0.0)})
    with pytest.raises(DataError, match="split 'train' has no samples"):
        Loader(empty, "train", batch_size=1)


def test_position_of_another_order_is_refused(folder):
    state = Loader(folder / "one_hot", "train", batch_size=10, shuffle=True).state_dict()
    with pytest.raises(ConfigurationError, match=r"batch_size = 10, this run has 20"):
        Loader(folder / "one_hot", "train", batch_size=20, shuffle=True).load_state_dict(state)


def test_arguments_are_checked(folder, tmp_path):
    with pytest.raises(DataError, match="no split 'test', only: train"):
        Loader(folder / "one_hot", "test", batch_size=1)
    with pytest.raises(DataError, match=r"metadata.json is missing"):
        Loader(tmp_path, "train", batch_size=1)
    with pytest.raises(ConfigurationError, match="batch_size"):
        Loader(folder / "one_hot", "train", batch_size=0)
    with pytest.raises(ConfigurationError, match="rank 2 is not below world size 2"):
        Loader(folder / "one_hot", "train", batch_size=1, rank=2, world_size=2)
    with pytest.raises(ConfigurationError, match="prefetch"):
        Loader(folder / "one_hot", "train", batch_size=1, prefetch=-1)


@hypothesis.given(
    bounds=st.tuples(st.integers(0, NUM_SAMPLES), st.integers(0, NUM_SAMPLES))
    .map(sorted)
    .filter(lambda b: b[0] < b[1]),
    shuffle=st.booleans(),
    world_size=st.integers(1, 3),
    window_blocks=st.integers(1, 20),
    kind=st.sampled_from(["one_hot", "multi_hot"]),
)
@hypothesis.settings(deadline=None, max_examples=40)
def test_a_span_is_visited_once_and_nothing_else(folder, bounds, shuffle, world_size, window_blocks, kind):
    span, batches = range(*bounds), []
    for rank in range(world_size):
        loader = Loader(
            folder / kind,
            "train",
            batch_size=10,
            span=span,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            window_blocks=window_blocks,
            prefetch=0,
        )
        batches.append(list(loader))
        assert loader.num_batches == len(batches[-1]) == -(-len(span) // 10)
    seen = [row for parts in zip(*batches, strict=True) for part in parts for row in rows(part)]
    assert (sorted(seen) if shuffle else seen) == list(span)
    if kind == "multi_hot":
        lengths = [batch.sparse.ids.numel() for parts in batches for batch in parts]
        assert sum(lengths) == sum(2 + number % 3 for number in span)


@pytest.mark.parametrize("span", [range(-1, 4), range(NUM_SAMPLES + 1), range(0, 8, 2)])
def test_a_span_outside_the_split_is_refused(folder, span):
    with pytest.raises(ConfigurationError, match="is no run of the 103 samples"):
        Loader(folder / "one_hot", "train", batch_size=4, span=span)

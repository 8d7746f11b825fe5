"""Batches: every event once, the same global batches for any world size, an exact position."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from rowmesh.data.events import EventSchema, SequenceLoader, prepare_events
from rowmesh.data.events.balance import balance
from rowmesh.errors import ConfigurationError


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("events")
    generator = np.random.default_rng(0)
    lines = [f"{generator.integers(40)},{generator.integers(30)},{time}" for time in range(600)]
    (folder / "e.csv").write_text("\n".join(["u,i,t", *lines]) + "\n")
    return prepare_events([folder / "e.csv"], folder / "out", EventSchema(user="u", item="i", time="t"))


def seen(batch):
    """user → (items, times, request times, targets)."""
    bounds = batch.offsets.tolist()
    columns = (batch.items, batch.times, batch.request_times, batch.targets)
    return {
        user: tuple(column[low:high].tolist() for column in columns)
        for user, low, high in zip(batch.users.tolist(), bounds, bounds[1:], strict=False)
    }


def test_training_predicts_what_follows_and_never_what_is_held_out(data):
    (batch,) = SequenceLoader(data, "train", batch_size=100, max_length=5)
    for user, (items, times, request_times, targets) in seen(batch).items():
        low, end = data.offsets[user], data.train_ends[user]
        history, moments = data.items[low:end].tolist(), data.times[low:end].tolist()
        assert (items, targets) == (history[:-1][-5:], history[1:][-5:])
        assert (times, request_times) == (moments[:-1][-5:], moments[1:][-5:])


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_items_are_predicted_from_all_before(data, split):
    (batch,) = SequenceLoader(data, split, batch_size=100, max_length=7)
    assert sorted(batch.users.tolist()) == data.users(split).tolist()
    for user, (items, _, request_times, targets) in seen(batch).items():
        target = (data.train_ends if split == "validation" else data.validation_ends)[user]
        assert items == data.items[max(data.offsets[user], target - 7) : target].tolist()
        assert targets == [-1] * (len(items) - 1) + [data.items[target]]
        assert request_times[-1] == data.times[target]


def test_what_is_cut_is_counted(data):
    whole = SequenceLoader(data, "train", batch_size=100, max_length=1000)
    cut = SequenceLoader(data, "train", batch_size=100, max_length=3)
    assert whole.num_cut_events == 0
    assert cut.num_cut_events == sum(b.num_ids for b in whole) - sum(b.num_ids for b in cut) > 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_global_batches_are_those_of_one_rank_and_ids_are_balanced(data, world_size):
    options = {"batch_size": 16, "max_length": 20, "shuffle": True, "seed": 3}
    alone = SequenceLoader(data, "train", **options)
    ranks = [SequenceLoader(data, "train", **options, rank=r, world_size=world_size) for r in range(world_size)]
    for _ in range(2):
        for whole, *parts in zip(alone, *ranks, strict=True):
            joined = {}
            for part in parts:
                joined |= seen(part)
            assert joined == seen(whole)
            sizes = [part.num_ids for part in parts]
            assert max(sizes) - min(sizes) <= whole.offsets.diff().max()
            micro = whole.split(4)
            assert {user: events for part in micro for user, events in seen(part).items()} == seen(whole)
    assert alone.epoch == 2


def test_a_position_continues_exactly_also_on_more_ranks(data):
    options = {"batch_size": 8, "max_length": 20, "shuffle": True, "seed": 1}
    loader = SequenceLoader(data, "train", **options)
    batches = [seen(batch) for _ in range(2) for batch in loader]
    for done in (0, 3, loader.num_batches, loader.num_batches + 2):
        first = SequenceLoader(data, "train", **options)
        left = done
        while left:
            for _ in first:
                left -= 1
                if not left:
                    break
        state = first.state_dict()
        assert state == loader.state_after(done)
        two = [SequenceLoader(data, "train", **options, rank=r, world_size=2) for r in range(2)]
        for each in two:
            each.load_state_dict(state)
        rest = [seen(a) | seen(b) for a, b in zip(*two, strict=True)]
        assert rest == batches[done : (done // loader.num_batches + 1) * loader.num_batches]
    with pytest.raises(ConfigurationError, match="max_length = 20"):
        SequenceLoader(data, "train", **options | {"max_length": 9}).load_state_dict(state)


def test_sizes_that_cannot_work_are_refused(data):
    with pytest.raises(ConfigurationError, match="max_length must be 1 or more"):
        SequenceLoader(data, "train", batch_size=1, max_length=0)
    with pytest.raises(ConfigurationError, match="rank 2 is not below"):
        SequenceLoader(data, "train", batch_size=1, max_length=1, rank=2, world_size=2)


@hypothesis.given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 8))
def test_no_part_has_more_than_another_by_a_whole_sequence(lengths, num_parts):
    parts = balance(np.array(lengths, np.int64), num_parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(lengths, default=0)

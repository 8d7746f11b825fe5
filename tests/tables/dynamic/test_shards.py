"""Dynamic shards against the rules in plain Python, over random streams on tiny shards; and local traps."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rowmesh.errors import DataError, NoRoomError
from rowmesh.tables.dynamic.hashing import shard_of
from rowmesh.tables.dynamic.reference import ReferenceShards
from rowmesh.tables.dynamic.shards import DynamicShards
from rowmesh.tables.dynamic.spec import Dynamic

INT64 = np.iinfo(np.int64)
IDS = st.one_of(st.integers(0, 30), st.sampled_from([0, -1, INT64.min, INT64.max, 2**31, 2**32, -(2**31)]))
BATCHES = st.lists(
    st.tuples(
        st.dictionaries(IDS, st.tuples(st.sampled_from([1, 1, 2, 3, 2**62]), st.integers(-4, 4)), max_size=9),
        st.integers(1, 3),
        st.booleans(),
    ),
    max_size=25,
)
RULES = [
    {},
    {"shards": 3},
    {"eviction": "lfu"},
    {"eviction": "lfu", "decay_steps": 3},
    {"eviction": "lru_lfu", "decay_steps": 2, "admit_after": 2},
    {"eviction": "score", "shards": 2},
    {"eviction": "ttl", "ttl_steps": 4},
    {"ttl_steps": 3, "shards": 2},
    {"eviction": "lfu", "ttl_steps": 3},
    {"eviction": "ttl", "ttl_seconds": 25},
    {"ttl_seconds": 15, "ttl_steps": 5, "shards": 2},
    {"admit_after": 3, "window_steps": 5, "shards": 2},
    {"admit_after": 3, "sketch_width": 4, "sketch_depth": 2, "window_steps": 4},
]
MARGIN = 24


def both(rules, margin=MARGIN, kind=DynamicShards):
    num_frames = rules.capacity + margin
    return [each("t", rules, range(rules.num_shards), num_frames) for each in (kind, ReferenceShards)]


def result(shards, arguments):
    """What was opened, or None where there was no room."""
    try:
        return shards.open(*arguments)
    except NoRoomError:
        return None


def canonical(opened):
    order = np.argsort(opened.evicted_ids)
    numbers = (opened.num_admitted, opened.num_evicted, opened.num_hits, opened.num_dropped)
    return opened.fresh.tolist(), opened.guest.tolist(), opened.evicted_ids[order].tolist(), numbers


def state(shards):
    states = [shards.state_of(shard) for shard in shards.shards]
    names = ("ids", "counts", "last_steps", "scores", "sketch", "candidate_ids", "candidate_counts", "step", "window")
    names += ("last_times", "now")
    return [{n: np.asarray(getattr(s, n)).ravel().tolist() for n in names} for s in states]


def reload(shards, margin=MARGIN):
    """The same in a new object, with other frames."""
    new = type(shards)("t", shards.rules, shards.shards, shards.rules.capacity + margin)
    first = shards.rules.capacity + margin
    for shard in shards.shards:
        old = shards.state_of(shard)
        first -= len(old.ids)
        new.load(shard, old, np.arange(first, first + len(old.ids)))
    return new


@pytest.mark.parametrize("options", RULES, ids=str)
@settings(max_examples=35)
@given(batches=BATCHES, capacity=st.integers(3, 20))
def test_decides_as_the_rules_say(options, batches, capacity):
    check(options, batches, capacity)


@pytest.mark.slow
@pytest.mark.parametrize("options", RULES, ids=str)
@settings(max_examples=300)
@given(batches=BATCHES, capacity=st.integers(3, 20))
def test_decides_as_the_rules_say_over_many_streams(options, batches, capacity):
    check(options, batches, capacity)


@pytest.mark.parametrize(
    "options",
    [{}, {"eviction": "lfu"}, {"eviction": "lfu", "decay_steps": 4}, {"eviction": "lru_lfu"}, {"eviction": "score"}],
    ids=str,
)
def test_decides_as_the_rules_say_in_large_shards(options):
    rng = np.random.default_rng(0)
    batches = []
    for step in range(90):  # small batches when it is full: later keys have room for a dozen ids
        ids = rng.choice(2500, 60 if step < 12 else 6, replace=False).tolist()
        batches.append(({i: (int(rng.integers(1, 3)), int(rng.integers(-40, 40))) for i in ids}, 1, step == 70))
    check(options, batches, 500, margin=300)


def check(options, batches, capacity, margin=MARGIN, kind=DynamicShards):
    """Opens, releases and reloads as the batches say, with both, which stay alike."""
    mine, theirs = both(Dynamic(capacity=capacity, **{"shards": 1, **options}), margin, kind)
    step, pins = 0, []
    every = np.array(sorted({*range(31), -1, INT64.min, INT64.max}), np.int64)
    for batch, ahead, again in batches:
        step += ahead
        ids = np.array(sorted(batch), np.int64)
        counts, scores = (np.array([batch[i][k] for i in sorted(batch)], np.int64) for k in range(2))
        time = 1000 + 7 * step - 20 * again  # which runs backwards now and then
        arguments = (ids, counts, step, scores if mine.rules.eviction == "score" else None, time)
        results = [result(shards, arguments) for shards in (mine, theirs)]
        done = [opened for opened in results if opened is not None]
        assert len(done) in (0, 2)
        if done:
            assert canonical(done[0]) == canonical(done[1])
            pins.append([np.concatenate([opened.frames[opened.guest], opened.evicted_frames]) for opened in done])
        assert state(mine) == state(theirs)
        for field in ("known", "count", "last_step", "score"):
            assert (getattr(mine.statistics(every), field) == getattr(theirs.statistics(every), field)).all()
        assert ((mine.find(every) >= 0) == (theirs.find(every) >= 0)).all()
        if len(pins) > 1:
            for shards, frames in zip((mine, theirs), pins.pop(0), strict=True):
                shards.release(frames)
        if again:
            mine, theirs, pins = reload(mine, margin), reload(theirs, margin), []


def opened(shards, ids, step, counts=None):
    ids = np.array(sorted(ids), np.int64)
    return shards.open(ids, np.ones(len(ids), np.int64) if counts is None else np.array(counts, np.int64), step)


def test_counts_are_of_occurrences_not_batches():
    shards = both(Dynamic(capacity=4, shards=1, admit_after=3))[0]
    assert opened(shards, [5], 0, [2]).guest.tolist() == [True]
    assert opened(shards, [5], 1, [1]).guest.tolist() == [False]
    assert shards.statistics(np.array([5])).count.tolist() == [3]


def test_an_id_that_returns_is_as_new():
    shards = both(Dynamic(capacity=1, shards=1, eviction="lfu"))[0]
    opened(shards, [5], 0, [1000])
    opened(shards, [6], 1)
    back = opened(shards, [5], 2)
    assert back.fresh.tolist() == [True]
    assert shards.statistics(np.array([5])).count.tolist() == [1]
    assert shards.statistics(np.array([5])).score.tolist() == [1 << 16]


def test_growth_keeps_the_frame_of_every_id():
    shards = both(Dynamic(capacity=5000, shards=3))[0]
    frames = {}
    for step in range(20):
        ids = np.arange(step * 100, step * 100 + 100)
        frames |= dict(zip(ids.tolist(), opened(shards, ids, step).frames.tolist(), strict=True))
        known = np.array(list(frames))
        assert shards.find(known).tolist() == list(frames.values())
    assert len(set(frames.values())) == len(frames)


def test_steps_counts_and_ids_have_64_bits():
    shards = both(Dynamic(capacity=4, shards=1))[0]
    for i, step in ((2**32 + 5, 2**40), (5, 2**40 + 1)):
        assert opened(shards, [i], step, [2**40]).fresh.tolist() == [True]
    statistics = shards.statistics(np.array([5, 2**32 + 5]))
    assert statistics.last_step.tolist() == [2**40 + 1, 2**40]
    assert statistics.count.tolist() == [2**40, 2**40]


def test_the_number_of_ranks_does_not_matter():
    rules = Dynamic(capacity=40, shards=8, eviction="lru_lfu")
    whole = both(rules)[0]
    halves = [DynamicShards("t", rules, shards, 60) for shards in (range(3), range(3, 8))]
    random = np.random.default_rng(0)
    for step in range(40):
        ids = np.unique(random.integers(-60, 60, 9))
        home = shard_of("t", ids, 8)
        all_at_once = opened(whole, ids, step)
        parts = [opened(half, ids[np.isin(home, half.shards)], step) for half in halves]
        gone = sorted(i for part in parts for i in part.evicted_ids.tolist())
        assert gone == sorted(all_at_once.evicted_ids.tolist())
        for shards, result in zip([whole, *halves], [all_at_once, *parts], strict=True):
            shards.release(result.evicted_frames)
    assert state(whole) == state(halves[0]) + state(halves[1])


def test_a_batch_too_large_is_named_and_changes_nothing():
    shards = both(Dynamic(capacity=3, shards=1))[0]
    opened(shards, [1], 0)
    before = state(shards)
    with pytest.raises(NoRoomError, match=r"4 distinct ids of shard 0 of dynamic table 't'.*to 4 or more"):
        opened(shards, [1, 2, 3, 4], 1)
    assert state(shards) == before


def test_pins_that_hold_all_frames_are_named():
    shards = DynamicShards("t", Dynamic(capacity=1, shards=1), range(1), 2)
    opened(shards, [1], 0)
    victims = opened(shards, [2], 1).evicted_frames
    with pytest.raises(NoRoomError, match="pins"):
        opened(shards, [3], 2)
    shards.release(victims)
    assert opened(shards, [3], 2).evicted_ids.tolist() == [2]


def test_frames_are_released_once():
    shards = both(Dynamic(capacity=1, shards=1))[0]
    frames = opened(shards, [1], 0).frames
    with pytest.raises(DataError, match="pinned"):
        shards.release(frames)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "lru_lfu"])
def test_a_shard_that_stays_full_evicts_the_smallest_for_a_long_time(eviction):
    mine, theirs = both(Dynamic(capacity=300, shards=1, eviction=eviction))
    random = np.random.default_rng(1)
    for step in range(120):
        ids = np.unique(random.zipf(1.2, 12) % 900)
        results = [opened(shards, ids, step) for shards in (mine, theirs)]
        assert canonical(results[0]) == canonical(results[1])
        for shards, result in zip((mine, theirs), results, strict=True):
            shards.release(result.evicted_frames)
    assert state(mine) == state(theirs)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "lru_lfu"])
def test_a_step_that_evicts_more_than_a_run_takes_none_twice(eviction):
    """It selects anew amid the step: what it evicted before is not there any more."""
    mine, theirs = both(Dynamic(capacity=48, shards=2, eviction=eviction))
    random = np.random.default_rng(2)
    for step in range(60):
        ids = np.unique(random.integers(0, 900, int(random.integers(1, 22))))
        results = [opened(shards, ids, step) for shards in (mine, theirs)]
        assert canonical(results[0]) == canonical(results[1])
        for shards, result in zip((mine, theirs), results, strict=True):
            shards.release(result.evicted_frames)
    assert state(mine) == state(theirs)


def test_a_time_without_ids_is_loaded():
    """The latest event was in a step whose ids are gone; a later one of an earlier time is at that time."""
    rules, none = Dynamic(capacity=3, shards=1, ttl_seconds=60), np.empty(0, np.int64)
    for shards in both(rules):
        shards.open(none, none, 1, time=1000)
        again = reload(shards)
        again.open(np.array([5]), np.array([1]), 2, time=990)
        assert again.state_of(0).last_times.tolist() == [1000]
        assert again.open(none, none, 3, time=1059).evicted_ids.tolist() == []
        assert again.open(none, none, 4, time=1060).evicted_ids.tolist() == [5]

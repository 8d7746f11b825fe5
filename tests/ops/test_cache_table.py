"""The cache table does what its model in plain Python does, operation by operation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.ops.cache_table import MISSING, CacheTable
from rowmesh.ops.cache_table.reference import CacheTable as Reference

PIN = st.tuples(st.just("pin"), st.lists(st.integers(0, 30), max_size=8))
UNPIN = st.tuples(st.just("unpin_some"), st.tuples(st.integers(0, 9), st.booleans()))
WRITE = st.tuples(st.just("write"), st.tuples(st.integers(0, 6), st.booleans()))
WRITTEN = st.tuples(st.just("written"), st.booleans())


def u32(values):
    return np.array(values, np.uint32)


class Pair:
    """Both tables, driven alike."""

    def __init__(self, num_cache_slots, retain):
        self.ours, self.reference, self.retain = CacheTable(num_cache_slots), Reference(num_cache_slots), retain
        self.pinned, self.writing = [], []

    def pin(self, slots):
        cache_slots = np.empty(len(slots), np.uint32)
        missing = self.ours.pin(u32(slots), cache_slots)
        expected = self.reference.pin(slots)
        assert cache_slots.tolist() == expected
        assert missing == expected.count(MISSING)
        if missing > self.ours.num_available:
            held = [cache_slot for cache_slot in expected if cache_slot != MISSING]
            self.unpin(held, False)
            return
        taken = self.ours.assign(u32(slots), cache_slots).tolist()
        assert taken == self.reference.assign(slots, expected)
        assert cache_slots.tolist() == expected
        self.pinned.append(expected)

    def unpin(self, cache_slots, changed):
        freed = self.ours.unpin(u32(cache_slots), changed, self.retain)
        assert freed.tolist() == self.reference.unpin(cache_slots, changed, self.retain)

    def unpin_some(self, which):
        number, changed = which
        if self.pinned:
            self.unpin(self.pinned.pop(number % len(self.pinned)), changed)

    def write(self, how):
        limit, pinned = how
        out = np.empty(limit, np.uint32)
        count = self.ours.oldest_dirty(out, pinned)
        expected = self.reference.oldest_dirty(limit, pinned)
        assert out[:count].tolist() == expected
        self.writing += expected

    def written(self, ok):
        freed = self.ours.written(u32(self.writing), ok, self.retain)
        assert freed.tolist() == self.reference.written(self.writing, ok, self.retain)
        self.writing = []

    def check(self):
        ours, reference = self.ours, self.reference
        assert ours.num_pinned == reference.num_pinned
        assert ours.num_available == len(reference.free) + len(reference.clean)
        assert (ours.num_clean, ours.num_dirty) == (len(reference.clean), len(reference.changed))
        slots = u32(range(31))
        cache_slots = np.empty(31, np.uint32)
        ours.find(slots, cache_slots)
        assert cache_slots.tolist() == [reference.cache_slot_of.get(slot, MISSING) for slot in range(31)]


@given(st.integers(1, 12), st.booleans(), st.lists(st.one_of(PIN, UNPIN, WRITE, WRITTEN), max_size=40))
def test_like_the_model(num_cache_slots, retain, operations):
    pair = Pair(num_cache_slots, retain)
    for name, argument in operations:
        getattr(pair, name)(argument)
        pair.check()


def test_slots_of_all_sizes_are_found_again():
    rng = np.random.default_rng(0)
    table, count = CacheTable(1000), 300
    expected = {}
    for _ in range(50):
        slots = u32(rng.choice(2**32, count, replace=False))
        slots[0] = 2**32 - 1
        cache_slots = np.empty(count, np.uint32)
        table.pin(slots, cache_slots)
        table.assign(slots, cache_slots)
        assert len(set(cache_slots.tolist())) == count
        assert (table.slots[cache_slots] == slots).all()
        table.unpin(cache_slots, changed=False, retain=True)
        expected = dict(zip(slots.tolist(), cache_slots.tolist(), strict=True))
    for slot, cache_slot in expected.items():
        found = np.empty(1, np.uint32)
        assert table.find(u32([slot]), found) == 0
        assert found[0] == cache_slot


@pytest.mark.parametrize("retain", [True, False])
def test_the_cache_slot_used_longest_ago_is_taken_first(retain):
    table = CacheTable(3)
    cache_slots = np.empty(3, np.uint32)
    table.pin(u32([1, 2, 3]), cache_slots)
    table.assign(u32([1, 2, 3]), cache_slots)
    table.unpin(cache_slots, changed=False, retain=retain)
    found = np.empty(1, np.uint32)
    assert table.pin(u32([1]), found) == (0 if retain else 1)
    table.assign(u32([1]), found)
    table.unpin(found, changed=False, retain=retain)  # now 1 was used last
    for slot in (4, 5):
        table.pin(u32([slot]), found)
        table.assign(u32([slot]), found)
    left = np.empty(3, np.uint32)
    table.find(u32([1, 2, 3]), left)
    assert (left != MISSING).tolist() == [retain, False, False]

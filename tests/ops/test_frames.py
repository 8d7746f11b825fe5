"""The frame table does what its model in plain Python does, operation by operation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.ops.frames import MISSING, FrameTable
from rowmesh.ops.frames.reference import FrameTable as Reference

LEASE = st.tuples(st.just("lease"), st.lists(st.integers(0, 30), max_size=8))
RELEASE = st.tuples(st.just("release"), st.tuples(st.integers(0, 9), st.booleans()))
WRITE = st.tuples(st.just("write"), st.tuples(st.integers(0, 6), st.booleans()))
WRITTEN = st.tuples(st.just("written"), st.booleans())


def u32(values):
    return np.array(values, np.uint32)


class Pair:
    """Both tables, driven alike."""

    def __init__(self, num_frames, retain):
        self.ours, self.reference, self.retain = FrameTable(num_frames), Reference(num_frames), retain
        self.leases, self.writing = [], []

    def lease(self, slots):
        frames = np.empty(len(slots), np.uint32)
        missing = self.ours.find(u32(slots), frames)
        expected = self.reference.find(slots)
        assert frames.tolist() == expected
        assert missing == expected.count(MISSING)
        if missing > self.ours.num_available:
            held = [frame for frame in expected if frame != MISSING]
            self.unpin(held, False)
            return
        taken = self.ours.take(u32(slots), frames).tolist()
        assert taken == self.reference.take(slots, expected)
        assert frames.tolist() == expected
        self.leases.append(expected)

    def unpin(self, frames, changed):
        freed = self.ours.release(u32(frames), changed, self.retain)
        assert freed.tolist() == self.reference.release(frames, changed, self.retain)

    def release(self, which):
        number, changed = which
        if self.leases:
            self.unpin(self.leases.pop(number % len(self.leases)), changed)

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
        frames = np.empty(31, np.uint32)
        ours.look(slots, frames)
        assert frames.tolist() == [reference.frame_of.get(slot, MISSING) for slot in range(31)]


@given(st.integers(1, 12), st.booleans(), st.lists(st.one_of(LEASE, RELEASE, WRITE, WRITTEN), max_size=40))
def test_like_the_model(num_frames, retain, operations):
    pair = Pair(num_frames, retain)
    for name, argument in operations:
        getattr(pair, name)(argument)
        pair.check()


def test_slots_of_all_sizes_are_found_again():
    rng = np.random.default_rng(0)
    table, count = FrameTable(1000), 300
    expected = {}
    for _ in range(50):
        slots = u32(rng.choice(2**32, count, replace=False))
        slots[0] = 2**32 - 1
        frames = np.empty(count, np.uint32)
        table.find(slots, frames)
        table.take(slots, frames)
        assert len(set(frames.tolist())) == count
        assert (table.slots[frames] == slots).all()
        table.release(frames, changed=False, retain=True)
        expected = dict(zip(slots.tolist(), frames.tolist(), strict=True))
    for slot, frame in expected.items():
        found = np.empty(1, np.uint32)
        assert table.look(u32([slot]), found) == 0
        assert found[0] == frame


@pytest.mark.parametrize("retain", [True, False])
def test_the_frame_used_longest_ago_is_taken_first(retain):
    table = FrameTable(3)
    frames = np.empty(3, np.uint32)
    table.find(u32([1, 2, 3]), frames)
    table.take(u32([1, 2, 3]), frames)
    table.release(frames, changed=False, retain=retain)
    found = np.empty(1, np.uint32)
    assert table.find(u32([1]), found) == (0 if retain else 1)
    table.take(u32([1]), found)
    table.release(found, changed=False, retain=retain)  # now 1 was used last
    for slot in (4, 5):
        table.find(u32([slot]), found)
        table.take(u32([slot]), found)
    left = np.empty(3, np.uint32)
    table.look(u32([1, 2, 3]), left)
    assert (left != MISSING).tolist() == [retain, False, False]

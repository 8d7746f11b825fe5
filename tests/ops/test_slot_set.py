"""A SlotSet is a set."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.ops.slot_set import SlotSet

SLOTS = st.lists(st.integers(0, 70))


@given(st.lists(SLOTS, max_size=5), SLOTS)
def test_like_a_set(added, asked):
    ours, expected = SlotSet(71), set()
    for slots in added:
        ours.add(np.array(slots, np.uint32))
        expected |= set(slots)
    assert ours.contains(np.array(asked, np.uint32)).tolist() == [slot in expected for slot in asked]


def test_the_largest_slot():
    ours = SlotSet(2**32)
    slots = np.array([2**32 - 1, 2**31, 0], np.uint32)
    ours.add(slots[:2])
    assert ours.contains(slots).tolist() == [True, True, False]

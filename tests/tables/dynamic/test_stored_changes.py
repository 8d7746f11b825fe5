"""What changed in a store is what a dictionary of its records says."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rowmesh.tables.dynamic import stored_changes
from rowmesh.tables.dynamic.stored_changes import StoredChanges, by_shard

IDS = st.lists(st.integers(-5, 5), min_size=1, max_size=4, unique=True)


@pytest.mark.parametrize("room", [1, 1 << 16])
@given(before=IDS, events=st.lists(st.tuples(st.booleans(), IDS), max_size=12))
def test_as_a_dictionary_says(room, before, events):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_changes, "MIN_EVENTS", room)
        listeners = []
        changes = StoredChanges(listeners)
        now = dict.fromkeys(before, 0)
        for step, (is_put, ids) in enumerate(events, start=1):
            was_there = np.array([i in now for i in ids])
            changes.note(np.array(ids), is_there=is_put, was_there=was_there)
            for i in ids:
                now.pop(i, None)
                if is_put:
                    now[i] = step
    assert changes.put.tolist() == [i for i, step in now.items() if step > 0]
    assert set(changes.gone.tolist()) == set(before) - set(now)
    assert listeners == [changes]
    changes.close()
    changes.close()
    assert listeners == []


@given(ids=IDS)
def test_ids_of_a_shard_keep_their_order(ids):
    shards = np.array(ids) % 3
    assert [each.tolist() for each in by_shard(np.array(ids), shards, 3)] == [
        [i for i in ids if i % 3 == shard] for shard in range(3)
    ]

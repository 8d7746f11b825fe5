"""What was frozen stays what it was, whatever is written and removed meanwhile, and wherever the reading thread is."""

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rowmesh.errors import RowmeshError
from rowmesh.tables.dynamic.stores import SharedStore
from rowmesh.tables.dynamic.stores.slots import memory_records

SHARDS, IDS = 3, 12
CHANGES = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(-IDS, IDS), unique=True, max_size=5)), min_size=1, max_size=8
)


def arrays(ids):
    ids = np.array(ids, np.int64)
    return ids % SHARDS, ids


def change(store, expected, number, is_put, ids):
    shards, ids = arrays(ids)
    if is_put:
        store.put(shards, ids, np.full((len(ids), 2), number, np.uint8))
        expected |= dict.fromkeys(ids.tolist(), number)
    else:
        store.delete(shards, ids)
        for i in ids.tolist():
            expected.pop(i, None)


def found_in(store):
    """By id, of all ids that were ever there; and what the shards say that there is."""
    shards, ids = arrays(range(-IDS, IDS + 1))
    records = np.zeros((len(ids), 2), np.uint8)
    found = store.get(shards, ids, records)
    assert (records[:, 0] == records[:, 1]).all()
    known = {int(i): int(record[0]) for i, record, is_there in zip(ids, records, found, strict=True) if is_there}
    by_shard = [store.ids_in(shard).tolist() for shard in range(SHARDS)]
    assert by_shard == [sorted(i for i in known if i % SHARDS == shard) for shard in range(SHARDS)]
    return known


@given(before=CHANGES, after=CHANGES, num_read=st.integers(0, SHARDS))
def test_what_was_frozen_stays(before, after, num_read):
    store, expected = SharedStore(memory_records("user", None, 2)), {}
    for number, (is_put, ids) in enumerate(before):
        change(store, expected, number, is_put, ids)
    frozen, then = store.freeze(), dict(expected)
    for shard in range(num_read):
        frozen.ids_in(shard)
    for number, (is_put, ids) in enumerate(after, start=100):
        change(store, expected, number, is_put, ids)
        assert found_in(frozen) == then
        assert found_in(store) == expected
    frozen.close()
    frozen.close()
    again = store.freeze()
    assert found_in(again) == expected
    store.close()


def test_many_records_are_read_a_few_at_a_time():
    store = SharedStore(memory_records("user", None, 2))
    ids = np.arange(3000)
    store.put(ids % SHARDS, ids, np.repeat(ids.astype(np.uint8)[:, None], 2, axis=1))
    frozen, records = store.freeze(), np.zeros((3000, 2), np.uint8)
    store.delete(ids[::2] % SHARDS, ids[::2])
    assert frozen.get(ids % SHARDS, ids, records).all()
    assert (records[:, 0] == ids.astype(np.uint8)).all()
    store.close()


def test_two_threads_share_it():
    store, wrong = SharedStore(memory_records("user", None, 2)), []
    shards, ids = arrays(range(200))
    store.put(shards, ids, np.full((200, 2), 7, np.uint8))
    frozen = store.freeze()

    def read():
        for _ in range(30):
            records = np.zeros((200, 2), np.uint8)
            if not frozen.get(shards, ids, records).all() or (records != 7).any():
                wrong.append(records)

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(50):
        store.delete(shards[number::3], ids[number::3])
        store.put(shards[::2], ids[::2], np.full((100, 2), number, np.uint8))
    thread.join()
    assert not wrong
    store.close()


@pytest.mark.parametrize("end", ["clear", "close"])
def test_what_is_read_after_the_end_is_an_error(end):
    store = SharedStore(memory_records("user", None, 2))
    frozen = store.freeze()
    getattr(store, end)(*[range(SHARDS)] * (end == "clear"))
    with pytest.raises(RowmeshError, match="cleared or closed while what it had was being saved"):
        frozen.ids_in(0)

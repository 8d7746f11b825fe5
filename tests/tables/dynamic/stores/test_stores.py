"""Every store of records against a dictionary, over random calls."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from rowmesh.errors import ConfigurationError, DataError, NoRoomError, RowmeshError, StoreError
from rowmesh.tables.dynamic.stores import RecordStore, Retry, open_records
from tests.support.redis_server import redis_server as redis_server

WIDTH, SHARDS = 5, 4
EDGES = [-(2**63), 2**63 - 1, -1, 0, 1, 255, 256, -256]
ids = st.lists(st.sampled_from(EDGES) | st.integers(-40, 40), unique=True, max_size=12)


def shards_of(batch):
    return np.array([i % SHARDS for i in batch], np.int64)


def arrays(batch):
    return shards_of(batch), np.array(batch, np.int64)


class Machine(RuleBasedStateMachine):
    def open(self) -> RecordStore:
        raise NotImplementedError

    def __init__(self):
        super().__init__()
        self.store = self.open()
        self.expected = {}

    @rule(batch=ids, seed=st.integers(0, 1000))
    def put(self, batch, seed):
        records = np.random.default_rng(seed).integers(0, 256, (len(batch), WIDTH), np.uint8)
        self.store.put(*arrays(batch), records)
        self.expected |= dict(zip(batch, records.tolist(), strict=True))

    @rule(batch=ids)
    def delete(self, batch):
        self.store.delete(*arrays(batch))
        for i in batch:
            self.expected.pop(i, None)

    @rule(batch=ids)
    def get(self, batch):
        records = np.full((len(batch), WIDTH), 9, np.uint8)
        found = self.store.get(*arrays(batch), records)
        assert found.tolist() == [i in self.expected for i in batch]
        assert records.tolist() == [self.expected.get(i, [9] * WIDTH) for i in batch]

    @rule(shard=st.integers(0, SHARDS - 1))
    def ids_in(self, shard):
        assert self.store.ids_in(shard).tolist() == sorted(i for i in self.expected if i % SHARDS == shard)

    @rule()
    def flush(self):
        self.store.flush()

    @rule()
    def clear(self):
        self.store.clear(range(SHARDS))
        self.expected = {}

    def teardown(self):
        self.store.clear(range(SHARDS))
        self.store.close()


def opened(url, **options):
    return open_records(url, "user id", WIDTH, max_records=200, retry=Retry(for_s=20, longest_s=0.05), **options)


@pytest.fixture(params=["memory", "file", "rocksdb", "redis"])
def url(request, tmp_path):
    if request.param == "redis":
        return request.getfixturevalue("redis_server").url
    if request.param == "rocksdb":
        pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    return request.param if request.param == "memory" else f"{request.param}:{tmp_path}"


def test_every_store_is_a_dictionary(url):
    class Own(Machine):
        def open(self):
            base = url if "/" not in url or url.startswith("redis") else f"{url}/{Path(tempfile.mktemp()).name}"
            return opened(base)

    limits = settings(max_examples=8, stateful_step_count=12, deadline=None, database=None)
    run_state_machine_as_test(Own, settings=limits)


def test_many_records_and_tables(url):
    """More than a pipeline has, and a second table in the same place."""
    batch = np.arange(-5000, 5000) * 2**40
    shards, records = batch % 7, np.arange(10_000 * WIDTH).astype(np.uint8).reshape(-1, WIDTH)
    first, second = (open_records(url, name, WIDTH, max_records=20_000) for name in ("a", "a:b*"))
    first.put(shards, batch, records)
    second.put(shards[:3], batch[:3], records[:3])
    got = np.zeros_like(records)
    assert first.get(shards, batch, got).all()
    assert (got == records).all()
    first.delete(shards[10:], batch[10:])
    assert sum(len(first.ids_in(shard)) for shard in range(7)) == 10
    first.clear(range(7))
    assert sum(len(second.ids_in(shard)) for shard in range(7)) == 3
    first.close()
    second.close()


def test_wrong_arrays_are_named(url):
    store = opened(url)
    one, two = np.array([1]), np.array([1, 1])
    with pytest.raises(DataError, match=r"records must be uint8 \[1, 5\], got \[1, 4\]"):
        store.put(one, one, np.zeros((1, 4), np.uint8))
    with pytest.raises(DataError, match="ids must be distinct"):
        store.delete(two, two)
    with pytest.raises(DataError, match=r"int64 \[N\], got int32"):
        store.delete(one.astype(np.int32), one)
    store.close()


def test_memory_without_a_limit_grows():
    store = open_records("memory", "user", 3, max_records=None)
    ids = np.arange(150_000) - 70_000
    records = (ids[:, None] * [1, 7, 11]).astype(np.uint8)
    for first in range(0, len(ids), 50_000):
        part = slice(first, first + 50_000)
        store.put(ids[part] % 2, ids[part], records[part])
    store.delete(ids[::3] % 2, ids[::3])
    store.put(ids[::6] % 2, ids[::6], records[::6])
    left = np.sort(np.concatenate([ids[1::3], ids[2::3], ids[::6]]))
    found = np.zeros((len(left), 3), np.uint8)
    assert store.get(left % 2, left, found).all()
    assert (found == records[left + 70_000]).all()
    store.close()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_full_store_says_so_and_keeps_what_it_has(kind, tmp_path):
    store = open_records(kind if kind == "memory" else f"file:{tmp_path}", "user", 1, max_records=2)
    zeros = np.zeros(2, np.int64)
    store.put(zeros, np.array([4, 5]), np.array([[4], [5]], np.uint8))
    with pytest.raises(NoRoomError, match=r"records of table 'user' in .* room for 2, of which 0 are free"):
        store.put(zeros[:1], np.array([6]), np.array([[6]], np.uint8))
    records = np.zeros((2, 1), np.uint8)
    assert store.get(zeros, store.ids_in(0), records).all()
    assert records.tolist() == [[4], [5]]
    store.close()


def test_unknown_urls_and_settings_are_named():
    with pytest.raises(ConfigurationError, match="'host/x' is no store of records; there are memory, file:FOLDER"):
        open_records("http://user:secret@host/x", "user", 4, max_records=1)
    with pytest.raises(ConfigurationError, match="need 1 byte or more"):
        open_records("memory", "user", 0, max_records=1)
    with pytest.raises(ConfigurationError, match="for 0 seconds or more"):
        Retry(for_s=-1)


def test_an_error_that_cannot_pass_is_not_retried():
    calls = []

    def fail():
        calls.append(1)
        raise RowmeshError("no")

    with pytest.raises(RowmeshError, match="no"):
        Retry()(fail, lambda error: False, "a store")
    with pytest.raises(StoreError, match="a store did not answer for 0 s: no; start it again"):
        Retry(for_s=0)(fail, lambda error: True, "a store")
    assert len(calls) == 2

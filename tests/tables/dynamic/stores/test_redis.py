"""A real server that is killed, comes back, or comes back without its data."""

import subprocess
import sys
import threading
from unittest import mock

import numpy as np
import pytest

from rowmesh.errors import ConfigurationError, StoreError
from rowmesh.tables.dynamic.stores import Retry, lease, open_records
from rowmesh.tables.dynamic.stores.redis_connection import RedisConnection
from tests.support.redis_server import redis_server as redis_server

SHORT, LONG = Retry(for_s=0.1), Retry(for_s=60, longest_s=0.05)


def opened(server, retry=SHORT):
    return open_records(server.url, "user", 2, max_records=1, retry=retry)


def batch(*ids):
    own = np.array(ids)
    return own % 3, own, np.stack([own, own + 1], axis=1).astype(np.uint8)


def test_what_was_acknowledged_is_there_after_a_crash(redis_server):
    store = opened(redis_server, LONG)
    shards, ids, records = batch(*range(100))
    store.put(shards, ids, records)
    redis_server.kill()
    back = threading.Thread(target=redis_server.start)
    back.start()
    store.put(*batch(100))  # waits for it
    back.join()
    got = np.zeros_like(records)
    assert store.get(shards, ids, got).all()
    assert (got == records).all()
    assert store.get(np.array([100 % 3]), np.array([100]), got[:1]).all()
    store.close()


def test_a_server_that_stays_away_is_named_without_its_password(redis_server):
    with redis_server.client() as client:
        client.config_set("requirepass", "secret")
    url = redis_server.url.replace("redis://", "redis://:secret@")
    store = open_records(url, "user", 2, max_records=1, retry=SHORT)
    store.put(*batch(1))
    with pytest.raises(StoreError, match=r"Redis 127\.0\.0\.1:\d+/0 refused: .*[Aa]uthenticat"):
        opened(redis_server)
    redis_server.kill()
    with pytest.raises(StoreError, match=r"Redis 127\.0\.0\.1:\d+/0 did not answer for 0\.1 s: .*refused") as caught:
        store.put(*batch(2))
    assert "secret" not in str(caught.value)
    store.close()


def test_a_server_that_lost_its_data_is_an_error_and_not_an_empty_table(redis_server):
    store = opened(redis_server)
    store.put(*batch(1))
    with redis_server.client() as client:
        client.flushall()
    with pytest.raises(StoreError, match=r"keys rowmesh:\w+:user: the server answers and has lost its records"):
        store.get(*batch(1))
    store.close()


def test_servers_that_forget_are_refused(redis_server):
    with redis_server.client() as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigurationError, match=r"throws keys away .* full .maxmemory-policy allkeys"):
        opened(redis_server)


def test_urls_are_checked():
    pytest.importorskip("redis", reason="the package redis is not installed")
    with pytest.raises(ConfigurationError, match="URL of a Redis server cannot be used"):
        RedisConnection("localhost:6379")


def got(store, *ids):
    records = np.zeros((len(ids), 2), np.uint8)
    return store.get(np.array(ids) % 3, np.array(ids), records).tolist(), records.tolist()


def test_two_runs_on_one_server_have_records_of_their_own(redis_server):
    first, second = opened(redis_server), opened(redis_server)
    first.put(*batch(1, 2))
    second.clear(range(3))
    second.put(np.array([1]), np.array([1]), np.array([[7, 7]], np.uint8))
    assert got(first, 1, 2) == ([True, True], [[1, 2], [2, 3]])
    assert got(second, 1, 2) == ([True, False], [[7, 7], [0, 0]])
    second.close()
    assert got(first, 1, 2)[0] == [True, True]
    first.close()
    with redis_server.client() as client:
        assert client.keys("*") == []


KILLED = """
import os, sys, numpy as np
from rowmesh.tables.dynamic.stores import open_records
open_records(sys.argv[1], "user", 2, max_records=1).put(np.zeros(1, int), np.ones(1, int), np.ones((1, 2), np.uint8))
os._exit(9)
"""


def test_what_a_killed_process_left_goes_when_the_next_store_is_opened(redis_server):
    living = opened(redis_server)
    living.put(*batch(1))
    assert subprocess.run([sys.executable, "-c", KILLED, redis_server.url], timeout=60, check=False).returncode == 9
    with redis_server.client() as client:
        before = set(client.keys("*"))
        opened(redis_server).close()
        gone = before - set(client.keys("*"))
    assert len(gone) == 3, "its lease, its list of keys, its shard"
    assert got(living, 1)[0] == [True]
    living.close()


def test_a_lease_of_another_host_ends_when_it_has_run_out(redis_server):
    with mock.patch.object(lease, "_host", return_value="elsewhere"):
        far = opened(redis_server)
    far.put(*batch(1))
    opened(redis_server).close()
    assert got(far, 1)[0] == [True]
    with redis_server.client() as client:
        [key] = [key for key in client.keys("rowmesh:*") if client.type(key) == b"string"]
        assert client.ttl(key) > lease.LEASE_S - 60
        client.expire(key, 100)
        with mock.patch.object(lease, "_RENEW_S", 0.0):
            got(far, 1)
        assert client.ttl(key) > lease.LEASE_S - 60
        client.delete(key)
        opened(redis_server).close()
        assert client.keys("*") == []
    with pytest.raises(StoreError, match="its lease has run out"):
        got(far, 1)
    far.close()


def test_a_damaged_record_is_named_and_never_read(redis_server):
    store, draw = opened(redis_server), np.random.default_rng(0)
    shards, ids, records = batch(*range(30))
    store.put(shards, ids, records)
    with redis_server.client() as client:
        hashes = [key for key in client.keys("rowmesh:*") if client.type(key) == b"hash"]
        for _ in range(30):
            key = hashes[draw.integers(len(hashes))]
            fields = list(client.hkeys(key))
            field = fields[draw.integers(len(fields))]
            whole = client.hget(key, field)
            bits = bytearray(whole)
            bits[draw.integers(len(bits))] ^= 1 << draw.integers(8)
            other = client.hget(key, fields[fields.index(field) - 1])
            for damage in (bytes(bits), other, whole[:-1], b""):
                client.hset(key, field, damage)
                with pytest.raises(StoreError, match=r"is not what was written; resume from a checkpoint"):
                    got(store, int.from_bytes(field, "big"))
            client.hset(key, field, whole)
    assert got(store, *range(30)) == ([True] * 30, records.tolist())
    store.close()

"""A real server that is killed, comes back, or comes back without its data."""

import threading

import numpy as np
import pytest

from rowmesh.dynamic.stores import Retry, open_records
from rowmesh.dynamic.stores.redis import RedisConnection
from rowmesh.errors import ConfigurationError, StoreError
from tests.support.redis_server import redis_server as redis_server

SHORT, LONG = Retry(for_s=0.1), Retry(for_s=60, longest_s=0.05)


def opened(server, retry=SHORT, width=2):
    return open_records(server.url, "user", width, max_records=1, retry=retry)


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
    with pytest.raises(StoreError, match=r"keys rowmesh:user: the server answers and has lost its records"):
        store.get(*batch(1))
    store.close()


def test_records_of_another_size_and_servers_that_forget_are_refused(redis_server):
    opened(redis_server).close()
    with pytest.raises(ConfigurationError, match="has records of 2 bytes, not 3; take another prefix"):
        opened(redis_server, width=3)
    with redis_server.client() as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigurationError, match=r"throws keys away .* full .maxmemory-policy allkeys"):
        opened(redis_server)


def test_urls_are_checked():
    pytest.importorskip("redis", reason="the package redis is not installed")
    with pytest.raises(ConfigurationError, match="URL of a Redis server cannot be used"):
        RedisConnection("localhost:6379")

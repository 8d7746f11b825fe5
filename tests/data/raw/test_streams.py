"""Rows of a stream of Redis, from a real server."""

import json

import pytest

from rowmesh.data.quarantine import NoBadRows
from rowmesh.data.raw import RawLoader, RedisStream
from rowmesh.data.schema import Schema
from rowmesh.errors import ConfigurationError, DataError
from tests.support.redis_server import redis_server as redis_server

SCHEMA = Schema(label="click", dense=("price",), dense_transform="none", categorical=["user"])
KEY = "clicks"


def add(server, first, count):
    with server.client() as client:
        for n in range(first, first + count):
            client.xadd(KEY, {"click": n % 2, "price": n / 4, "user": f"user {n}", "other": "not read"})


def loader(server, follow=False, **options):
    source = RedisStream(server.url, KEY, SCHEMA, follow=follow)
    return RawLoader(source, SCHEMA, batch_size=4, quarantine=NoBadRows(), prefetch=0, **options)


def prices(batches):
    return [4 * price for batch in batches for price in batch.dense[:, 0].tolist()]


def test_entries_are_read_once_from_any_place(redis_server):
    add(redis_server, 0, 10)
    first = loader(redis_server)
    batches = iter(first)
    assert prices([next(batches)]) == [0, 1, 2, 3]
    state = json.loads(json.dumps(first.state_dict()))
    found = []
    for rank in range(2):
        second = loader(redis_server, rank=rank, world_size=2)
        second.load_state_dict(state)
        found.append(prices(second))
    assert found == [[4, 5, 8], [6, 7, 9]]


def test_a_stream_is_followed(redis_server):
    add(redis_server, 0, 2)
    looks = []

    class OverError(Exception):
        pass

    def wait():
        looks.append(len(looks))
        if len(looks) > 2:
            raise OverError
        add(redis_server, 2 * len(looks), 2)

    found = []

    def read():
        for batch in loader(redis_server, follow=True, wait=wait):
            found.extend(prices([batch]))

    with pytest.raises(OverError):
        read()
    assert found == [0, 1, 2, 3]


def test_entries_that_are_trimmed_while_a_stream_is_read_are_missed(redis_server):
    add(redis_server, 0, 4)
    batches = iter(loader(redis_server, follow=True))
    next(batches)
    add(redis_server, 4, 8)
    with redis_server.client() as client:
        client.xtrim(KEY, maxlen=4, approximate=False)
    with pytest.raises(DataError, match=r"is after entry \d+-\d+ of stream 'clicks', which is not there any more"):
        next(batches)


def test_urls_are_checked():
    pytest.importorskip("redis", reason="the package redis is not installed")
    with pytest.raises(ConfigurationError, match=r"the URL of stream 'clicks' cannot be used: .*redis://"):
        RedisStream("localhost:6379", KEY, SCHEMA)


def test_what_is_wrong_is_named(redis_server):
    add(redis_server, 0, 5)
    first = loader(redis_server)
    next(iter(first))
    with redis_server.client() as client:
        client.xtrim(KEY, maxlen=1, approximate=False)
    second = loader(redis_server)
    second.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match=r"the position is after entry \d+-\d+ of stream 'clicks', which is not there"):
        list(second)
    with redis_server.client() as client:
        client.xadd(KEY, {"click": 2})
    with pytest.raises(DataError, match=r"stream clicks: row 1: click is '2', not 0 or 1"):
        list(loader(redis_server))
    redis_server.kill()
    with pytest.raises(DataError, match=r"stream 'clicks' cannot be read: .*refused"):
        list(loader(redis_server))

"""Threads that read what is published, while others refresh and close: each reads one generation, whole."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rowmesh.errors import StoreError
from rowmesh.publish import Changes, PublishedReader, PublishedTable, Publisher, open_target
from rowmesh.publish.chain import read_chain
from rowmesh.publish.generation import Generation
from rowmesh.tables import Constant
from tests.publish.test_publisher import url as url
from tests.support.redis_server import redis_server as redis_server

TABLES = {name: PublishedTable(dim=2, initializer=Constant(value=-1)) for name in ("user", "item")}
IDS = np.array([7, 8])  # 7 is published, 8 is not


def nothing(*_):
    pass


class Watched:
    """A target whose rows call `on_look_up` before each look-up, and `on_open` when they are opened.

    Attributes:
        closed: numbers of the generations whose rows were closed, in order.
    """

    def __init__(self, target):
        self._target, self.name = target, target.name
        self.on_look_up = self.on_open = nothing
        self.closed = []

    def __getattr__(self, name):
        return getattr(self._target, name)

    def open_rows(self, chain):
        self.on_open()
        return WatchedRows(self, self._target.open_rows(chain), chain[0].number)


class WatchedRows:
    def __init__(self, watched, rows, number):
        self._watched, self._rows, self._number = watched, rows, number

    def look_up(self, table, ids, vectors):
        self._watched.on_look_up()
        return self._rows.look_up(table, ids, vectors)

    def close(self):
        self._watched.closed.append(self._number)
        self._rows.close()


class Published:
    """Generations, all of whose rows and whose network say their number."""

    def __init__(self, url):
        target = open_target(url)
        self.target: Any = Watched(target)
        self._publisher = Publisher(target, TABLES, whole_every=2)
        self.number = 0

    def publish(self):
        self.number += 1
        rows = [(IDS[:1], np.full((1, 2), self.number, np.float32))]
        network = {"number": torch.tensor(self.number)}
        self._publisher.publish(self.number, {name: Changes(rows=rows) for name in TABLES}, network)

    def rows(self):
        """The newest ones, without a reader."""
        return self.target.open_rows(read_chain(self.target, Generation.read(self.target.newest(), self.target.name)))


@pytest.fixture
def published(url):
    published = Published(url)
    published.publish()
    yield published
    published.target.close()


@pytest.fixture
def reader(published):
    return PublishedReader(published.target)


def in_thread(call):
    """Another thread's turn: it ends before this one goes on, so the two do not wait for each other."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert len(answers) == 1, "the call raised"
    return answers[0]


class LookUp(threading.Thread):
    """A look-up in a thread of its own, which stops in the middle until it is told to go on."""

    def __init__(self, published, reader):
        super().__init__(daemon=True)
        self._target, self._reader, self.answer = published.target, reader, None
        self._is_there, self._may_go = threading.Event(), threading.Event()
        self._target.on_look_up = self._pause
        self.start()
        assert self._is_there.wait(60)
        self._target.on_look_up = nothing

    def _pause(self):
        self._is_there.set()
        assert self._may_go.wait(60)

    def run(self):
        self.answer = self._reader.look_up("user", IDS).tolist()

    def end(self):
        self._may_go.set()
        self.join(60)
        assert not self.is_alive()
        return self.answer


def values(number):
    return [[number, number], [-1.0, -1.0]]


def read(pinned):
    """Numbers that a pinned generation gives itself, its network and the rows of its tables."""
    rows = [pinned.look_up(name, IDS).tolist() for name in TABLES]
    assert all(row == values(row[0][0]) for row in rows)
    return [pinned.generation.number, pinned.network()["number"].item(), *(int(row[0][0]) for row in rows)]


def test_a_look_up_reads_the_rows_that_it_began_with(published, reader):
    published.publish()

    def refresh():
        published.target.on_look_up = nothing
        assert in_thread(reader.refresh)
        assert published.target.closed == []

    published.target.on_look_up = refresh
    assert reader.look_up("user", IDS).tolist() == values(1)
    assert published.target.closed == [1]
    assert reader.look_up("user", IDS).tolist() == values(2)


def test_the_last_of_several_look_ups_closes_the_rows(published, reader):
    first, second = LookUp(published, reader), LookUp(published, reader)
    published.publish()
    assert reader.refresh()
    third = LookUp(published, reader)
    published.publish()
    assert reader.refresh()
    assert second.end() == values(1)
    assert published.target.closed == []
    assert third.end() == values(2)
    assert published.target.closed == [2]
    assert first.end() == values(1)
    assert published.target.closed == [2, 1]
    reader.close()
    assert published.target.closed == [2, 1, 3]


def test_a_look_up_that_fails_lets_go_of_the_rows(published, reader):
    def fail():
        raise StoreError("away")

    published.target.on_look_up = fail
    with pytest.raises(StoreError, match="away"):
        reader.look_up("user", IDS)
    reader.close()
    assert published.target.closed == [1]


def test_a_pinned_generation_stays_while_others_refresh(published, reader):
    with reader.pin() as pinned:
        rows = pinned.look_up("user", IDS).tolist()
        published.publish()
        assert in_thread(reader.refresh)
        assert rows == values(1)
        assert read(pinned) == [1] * 4
        with reader.pin() as newer:
            assert read(newer) == [2] * 4
        assert (reader.generation.number, read(reader)) == (2, [2] * 4)
        assert published.target.closed == []
    assert published.target.closed == [1]
    with pytest.raises(StoreError, match=r"was closed; .* within its `with reader\.pin\(\)`"):
        pinned.look_up("user", IDS)


def test_a_pinned_generation_outlives_the_reader(published, reader):
    with reader.pin() as pinned:
        in_thread(reader.close)
        assert published.target.closed == []
        assert read(pinned) == [1] * 4
    assert published.target.closed == [1]


def test_a_look_up_ends_that_began_before_the_reader_was_closed(published, reader):
    look_up = LookUp(published, reader)
    reader.close()
    with pytest.raises(StoreError, match="was closed"):
        reader.look_up("user", IDS)
    assert look_up.end() == values(1)
    assert published.target.closed == [1]


@pytest.mark.parametrize(
    "damage", [lambda state: state[: len(state) // 2], lambda state: b"", lambda state: b"\0" * 40]
)
def test_a_network_that_is_cut_says_so(published, reader, damage):
    with reader.pin() as pinned:
        damaged = replace(pinned, state=damage(pinned.state))
        with pytest.raises(StoreError, match=r"the published network in .*network.* cannot be read"):
            damaged.network()


def test_a_closed_reader_says_so(published, reader):
    reader.close()
    reader.close()
    published.publish()
    uses = [
        lambda: reader.look_up("user", IDS),
        lambda: reader.look_up("user", IDS[:0]),
        lambda: reader.network(),
        lambda: reader.refresh(),
        lambda: reader.generation,
        lambda: reader.pin().__enter__(),
    ]
    for use in uses:
        with pytest.raises(StoreError, match=r"the reader of .*published.* was closed; make another PublishedReader"):
            use()
    assert published.target.closed == [1]


def test_closed_rows_say_so(published):
    published.publish()
    rows = published.rows()
    vectors = np.zeros((2, 2), np.float32)
    assert rows.look_up("user", IDS, vectors).tolist() == [True, False]
    rows.close()
    rows.close()
    vectors[:] = 0
    for table in TABLES:
        for ids in (IDS, IDS[:0]):
            with pytest.raises(StoreError, match=r".* was closed; look up before its reader is closed"):
                rows.look_up(table, ids, vectors[: len(ids)])
    assert not vectors.any()


def test_closed_rows_of_a_table_without_rows_say_so(url):
    target = open_target(url)
    Publisher(target, TABLES).publish(1, {}, {})
    rows = target.open_rows([Generation.read(target.newest() or b"", target.name)])
    assert not rows.look_up("user", IDS, np.zeros((2, 2), np.float32)).any()
    rows.close()
    with pytest.raises(StoreError, match="was closed"):
        rows.look_up("user", IDS, np.zeros((2, 2), np.float32))
    target.close()


def test_a_reader_that_is_closed_while_it_refreshes_keeps_nothing(published, reader):
    published.publish()
    published.target.on_open = lambda: in_thread(reader.close)
    with pytest.raises(StoreError, match="was closed; make another"):
        reader.refresh()
    assert sorted(published.target.closed) == [1, 2]


def test_a_refresh_that_fails_leaves_the_reader_as_it_was(published, reader):
    published.publish()

    def fail():
        raise StoreError("away")

    published.target.on_open = fail
    with pytest.raises(StoreError, match="away"):
        reader.refresh()
    published.target.on_open = nothing
    assert published.target.closed == []
    assert read(reader) == [1] * 4
    assert reader.refresh()
    assert read(reader) == [2] * 4


def test_of_two_refreshes_the_second_waits_and_goes_not_back(published, reader):
    """The second asks what is newest when the first has ended: else the older one could be taken last."""
    published.publish()
    answers = []
    second = threading.Thread(target=lambda: answers.append(reader.refresh()), daemon=True)

    def opening():
        published.target.on_open = nothing
        published.publish()
        second.start()

    published.target.on_open = opening
    assert reader.refresh()
    second.join(60)
    assert answers == [True]
    assert read(reader) == [3] * 4
    assert published.target.closed == [1, 2]

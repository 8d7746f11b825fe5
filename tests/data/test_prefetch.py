"""prefetch: the same items, ahead of time, with no thread left behind."""

import threading
import time

import pytest

from rowmesh.data.prefetch import prefetch


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "rowmesh-prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_items_come_in_order(depth):
    assert list(prefetch(iter(range(20)), depth)) == list(range(20))
    assert not threads()


def test_errors_come_after_the_items_before_them():
    def items():
        yield 1
        raise ValueError("broken block")

    ahead = prefetch(items(), 3)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="broken block"):
        next(ahead)
    assert not threads()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_as_many_items_are_made_ahead_as_asked_for(depth):
    made = []
    ahead = prefetch((made.append(i) or i for i in range(10)), depth)
    next(ahead)
    deadline = time.monotonic() + 10
    while len(made) < 1 + depth and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)
    assert len(made) == 1 + depth
    ahead.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_what_it_iterates_over_is_closed(depth):
    closed = []

    def items():
        try:
            yield from range(1000)
        finally:
            closed.append(threading.current_thread().name)

    ahead = prefetch(items(), depth)
    next(ahead)
    ahead.close()
    assert closed == ["MainThread"]


def test_threads_of_nested_iterators_end():
    ahead = prefetch(prefetch(iter(range(1000)), 1), 2)
    assert next(ahead) == 0
    assert len(threads()) == 2
    ahead.close()
    assert not threads()


@pytest.mark.parametrize("leave", ["close", "delete"])
def test_leaving_early_ends_the_thread(leave):
    ahead = prefetch(iter(range(1000)), 2)
    next(ahead)
    assert threads()
    start = time.monotonic()
    if leave == "close":
        ahead.close()
    else:
        del ahead
    assert not threads()
    assert time.monotonic() - start < 5

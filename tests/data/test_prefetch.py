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


def test_items_are_made_ahead():
    made = []
    ahead = prefetch((made.append(i) or i for i in range(10)), 2)
    next(ahead)
    deadline = time.monotonic() + 10
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)
    assert len(made) == 4  # one taken, two waiting, one in hand
    ahead.close()


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

"""A thread that reads ahead never fails a checkpoint, and never takes more than there is."""

import threading
from unittest import mock

import pytest

from rowmesh.checkpoint.ahead import ReadAhead
from rowmesh.checkpoint.room import CopyBuffers


class Shard:
    """Notes what it was read into."""

    def __init__(self, num_bytes, *, is_read=False, error=None):
        self.num_bytes, self.is_read, self.error, self.release = num_bytes, is_read, error, None

    def read_ahead(self, buffer, release):
        if self.error is not None:
            raise self.error
        if self.is_read:
            return False
        self.is_read, self.release = True, lambda: release(buffer)
        return True


def copies_of(limit_bytes):
    copies = CopyBuffers()
    copies.reset(limit_bytes)
    return copies


def test_all_are_read_that_there_is_memory_for():
    shards, copies = [Shard(64) for _ in range(5)], copies_of(3 * 64)
    ahead = ReadAhead(shards, copies)
    ahead.wait()
    assert [each.is_read for each in shards] == [True, True, True, False, False]
    for each in shards:  # in the order in which they are written
        while each.release is None:
            pass
        each.release()
    ahead.close()
    assert copies.held_bytes == 3 * 64
    assert ahead.failure is None


def test_one_that_is_too_big_and_one_that_is_read_are_left_out():
    shards, copies = [Shard(65), Shard(64, is_read=True), Shard(64)], copies_of(64)
    ReadAhead(shards, copies).wait()
    assert [each.is_read for each in shards] == [False, True, True]


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_after_a_failure_the_rest_is_left_to_others(error):
    shards = [Shard(64), Shard(64, error=error), Shard(64)]
    ahead = ReadAhead(shards, copies_of(999))
    ahead.wait()
    ahead.close()
    assert ahead.failure is error
    assert [each.is_read for each in shards] == [True, False, False]


def test_without_a_thread_nothing_is_read():
    shards = [Shard(64)]
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        ahead = ReadAhead(shards, copies_of(999))
    ahead.wait()
    ahead.close()
    assert isinstance(ahead.failure, RuntimeError)
    assert not shards[0].is_read


def test_it_ends_where_it_waits_for_memory():
    shards, copies = [Shard(64), Shard(64)], copies_of(64)
    ahead = ReadAhead(iter(shards), copies)
    ahead.wait()
    ahead.close()
    ahead.close()
    assert [each.is_read for each in shards] == [True, False]
    assert not any(thread.name == "rowmesh checkpoint, reading" for thread in threading.enumerate())

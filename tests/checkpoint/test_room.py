"""Memory of snapshots: what was used once is used again, and limits are kept."""

import itertools
import threading
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rowmesh.checkpoint import room as module
from rowmesh.checkpoint.room import SLAB_BYTES, CopyBuffers, Room


def copies_of(limit_bytes):
    copies = CopyBuffers()
    copies.reset(limit_bytes)
    return copies


@given(sizes=st.lists(st.integers(1, 3 * SLAB_BYTES // 2), max_size=6))
def test_tensors_do_not_overlap_and_come_again(sizes):
    room, before = Room(copy_bytes=0), None
    for _ in range(2):
        room.reset()
        tensors = [room.tensor(torch.uint8, size) for size in sizes]
        spans = sorted((each.data_ptr(), each.data_ptr() + len(each)) for each in tensors)
        assert all(stop <= begin for (_, stop), (begin, _) in itertools.pairwise(spans))
        assert [len(each) for each in tensors] == sizes
        assert before is None or spans == before
        before = spans


@pytest.mark.parametrize("num_bytes, num_slabs", [(0, 1), (1, 2), (1 << 40, 5)])
def test_no_more_is_made_ready_than_may_be_needed(num_bytes, num_slabs):
    room = Room(copy_bytes=0)
    room.tensor(torch.uint8, 1)
    with mock.patch.object(module, "_fresh", side_effect=module._fresh) as fresh:
        room.prepare(num_bytes)
        assert fresh.call_count == min(num_slabs - 1, 1)
        room.prepare(num_bytes, 99)
        assert fresh.call_count == num_slabs - 1


@given(sizes=st.lists(st.integers(1, 600), max_size=12), limit_bytes=st.integers(0, 1000))
def test_the_limit_is_kept(sizes, limit_bytes):
    copies = copies_of(limit_bytes)
    for size in sizes:
        buffer = copies.take(size)
        assert (buffer is None) == (size > limit_bytes)
        assert copies.held_bytes <= limit_bytes
        if buffer is not None:
            assert len(buffer) >= size
            copies.give(buffer)


def test_a_lower_limit_frees_memory():
    copies = copies_of(300)
    taken = [copies.take(100) for _ in range(3)]
    copies.reset(150)  # those that were not given back too
    assert copies.held_bytes == 100
    assert any(copies.take(100) is each for each in taken)


def test_one_waits_for_a_buffer_and_for_the_end():
    copies = copies_of(64)
    first, found = copies.take(64), []
    assert not copies.has_ended.is_set()
    thread = threading.Thread(target=lambda: found.extend([copies.take(48), copies.take(48)]))
    thread.start()
    assert copies.has_ended.wait(60), "it waits"
    copies.give(first)
    copies.close()
    thread.join(60)
    assert found[1] is None
    assert copies.take(1) is None
    copies.reset(64)
    assert not copies.has_ended.is_set()
    assert copies.take(64) is first


@pytest.mark.parametrize("sharers", [1, 4])
def test_by_default_it_is_a_quarter_of_what_is_available(sharers):
    room = Room(sharers=sharers)
    with mock.patch.object(module, "available_bytes", return_value=4096):
        room.reset()
        assert room.copies.limit_bytes == 1024 // sharers
    room.copies.take(256)
    with mock.patch.object(module, "available_bytes", return_value=4096 - 256 * sharers):
        room.reset()
        assert room.copies.limit_bytes == 1024 // sharers, "what it holds already counts as available"

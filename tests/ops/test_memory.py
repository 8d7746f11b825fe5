"""Buffers: alignment, views, growth."""

import gc

import numpy as np
import pytest
import torch

from rowmesh.ops.memory import HUGE_PAGE, Buffer, Scratch


@pytest.mark.parametrize("num_bytes", [0, 1, 64, 4097, HUGE_PAGE, 3 * HUGE_PAGE + 1])
def test_buffers_are_aligned_and_zero(num_bytes):
    buffer = Buffer(num_bytes)
    assert buffer.address % (HUGE_PAGE if num_bytes >= HUGE_PAGE else 64) == 0
    assert buffer.num_bytes >= max(num_bytes, 64)
    assert not buffer.bytes.any()
    buffer.bytes[:] = 1


def test_views_share_the_buffer():
    buffer = Buffer(128)
    buffer.array(np.int64, 2, 2, offset=32)[:] = 3
    assert buffer.tensor(torch.int64, 2, 2, offset=32).tolist() == [[3, 3], [3, 3]]
    view = buffer.tensor(torch.int64, 2, 2, offset=32)
    del buffer
    gc.collect()
    assert view.sum() == 12


def test_scratch_grows_and_stays():
    scratch = Scratch()
    address = scratch.reserve(1000)
    assert scratch.reserve(500) == address
    scratch.reserve(10**6)
    assert scratch.num_bytes >= 10**6

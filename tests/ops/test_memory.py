"""Buffers: alignment, growth, and tensors that stay intact as long as somebody holds them."""

import gc

import numpy as np
import pytest
import torch

from rowmesh.ops.memory import HUGE_PAGE, Buffer, Scratch, TensorPool


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


def test_pool_reuses_memory_only_when_nobody_holds_it():
    pool = TensorPool()
    first = pool.take(torch.float32, 100, 10)
    first.fill_(1.0)
    view = first[3:5].t()
    address = first.data_ptr()
    del first
    second = pool.take(torch.float32, 100, 10)
    second.fill_(2.0)
    assert bool((view == 1.0).all())
    assert second.data_ptr() != address
    del view, second
    assert pool.take(torch.float32, 100, 10).data_ptr() == address or pool._idle


def test_pool_keeps_a_tensor_that_only_a_graph_holds():
    pool = TensorPool()
    values = pool.take(torch.float32, 50).fill_(3.0)
    weight = torch.ones(50, requires_grad=True)
    loss = (weight * values).sum()
    del values
    pool.take(torch.float32, 50).fill_(9.0)
    loss.backward()
    assert bool((weight.grad == 3.0).all())


def test_pool_does_not_hoard():
    pool = TensorPool(max_idle=2)
    tensors = [pool.take(torch.float32, 1000) for _ in range(10)]
    del tensors
    assert len(pool._idle) == 2

"""Tensor pool: memory is reused when no tensor holds it, and is never too small."""

import gc

import torch

from rowmesh.ops.memory import HUGE_PAGE
from rowmesh.ops.tensor_pool import TensorPool
from tests.support.threads import in_threads


def test_memory_is_reused_only_when_nobody_holds_it():
    pool = TensorPool()
    first = pool.take(torch.float32, 100, 10)
    first.fill_(1.0)
    view, address = first[3:5].t(), first.data_ptr()
    del first
    second = pool.take(torch.float32, 100, 10)
    second.fill_(2.0)
    assert bool((view == 1.0).all())
    assert second.data_ptr() != address
    del view
    assert pool.take(torch.float32, 100, 10).data_ptr() == address


def test_a_tensor_that_only_a_graph_holds_stays():
    pool = TensorPool()
    values = pool.take(torch.float32, 50).fill_(3.0)
    weight = torch.ones(50, requires_grad=True)
    loss = (weight * values).sum()
    del values
    pool.take(torch.float32, 50).fill_(9.0)
    loss.backward()
    assert bool((weight.grad == 3.0).all())


def test_it_counts_what_is_lent_and_what_is_idle_and_does_not_hoard():
    pool = TensorPool(max_idle=2)
    tensors = [pool.take(torch.float32, 1000) for _ in range(10)]
    assert 10 * 4000 <= pool.num_bytes <= 10 * 5000
    del tensors
    gc.collect()
    assert 2 * 4000 <= pool.num_bytes <= 2 * 5000


def test_what_does_not_fit_stays_idle():
    pool = TensorPool()
    sizes = (100, 4 * HUGE_PAGE, 40 * HUGE_PAGE)
    addresses = {size: pool.take(torch.uint8, size).data_ptr() for size in sizes}
    for size in (4 * HUGE_PAGE, 40 * HUGE_PAGE, 100):
        assert pool.take(torch.uint8, size).data_ptr() == addresses[size]
    assert pool.take(torch.uint8, 0).numel() == 0


def test_memory_that_returns_while_the_pool_looks_for_some():
    """Finalizers run in the midst of everything: here, each look at an idle buffer brings another one back."""
    pool = TensorPool(max_idle=8)
    lent = [pool.take(torch.uint8, size) for size in (10, 10, 10, 10)]

    class Idle(type(pool._idle)):
        def pop(self):
            if lent:
                lent.pop()
            return super().pop()

    pool._idle = Idle(maxlen=8)
    for tensor in (pool.take(torch.uint8, HUGE_PAGE), pool.take(torch.uint8, 10)):
        tensor.fill_(1)
    assert len(lent) < 4


def test_threads_never_share_memory():
    pool, wrong = TensorPool(), []

    def work(number):
        for step in range(300):
            tensor = pool.take(torch.int64, 100 + step % 7).fill_(number)
            if bool((tensor != number).any()):
                wrong.append(step)

    in_threads(work, 4)
    assert not wrong

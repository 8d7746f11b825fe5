"""Gradients of weights against their reference: every storage, every shape of bag."""

import pytest
import torch
from hypothesis import given, settings

from rowmesh.ops import weigh
from rowmesh.ops.simd import STORAGE
from rowmesh.ops.weigh import reference
from tests.ops.test_pool import Job, jobs
from tests.support.memory import Poisoned


def check(job):
    kernels = weigh.kernels(job.dim, STORAGE[job.dtype])
    kept = Poisoned(job.dtype, len(job.rows), job.dim)
    kernels.copy_rows(job.addresses.data_ptr(), len(job.rows), kept.address)
    assert torch.equal(kept.result(), job.rows)
    grad = torch.randn(job.num_bags, job.width, dtype=job.compute)
    out = Poisoned(job.compute, job.num_ids)
    features = job.features.ctypes.data, len(job.features)
    kernels.weight_gradients(*features, kept.address, job.inverse.data_ptr(), grad.data_ptr(), out.address)
    by_bag = grad.view(job.num_bags, len(job.lengths), job.dim).transpose(0, 1).reshape(-1, job.dim)
    expected = reference.weight_gradients(job.rows, job.inverse, job.offsets, by_bag, is_mean=job.is_mean)
    torch.testing.assert_close(out.result(), expected)


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 17, 64])
def test_every_dim_and_storage(dim, dtype):
    for is_mean in (False, True):
        check(Job(dim, dtype, [[0, 1, 5, 0], [2, 0, 30, 1]], is_fixed=False, is_mean=is_mean))
        check(Job(dim, dtype, [[3] * 20, [3] * 20], is_fixed=True, is_mean=is_mean))


@settings(max_examples=40)
@given(job=jobs())
def test_any_bags(job):
    check(job)


def test_the_reference_is_the_gradient_that_autograd_finds():
    generator = torch.Generator().manual_seed(0)
    rows, grad = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    inverse, offsets = torch.tensor([0, 2, 2, 1]), torch.tensor([0, 3, 3, 4])
    weights = torch.rand(4, generator=generator, dtype=torch.float64).requires_grad_()
    bags = torch.nn.functional.embedding_bag(
        inverse, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
    bags.backward(grad)
    torch.testing.assert_close(reference.weight_gradients(rows, inverse, offsets, grad), weights.grad)

"""Gradients of weights on a GPU, or as Triton interprets it, against their reference."""

import pytest
import torch

from rowmesh.ops.weigh import reference
from tests.ops.test_pool_cuda import DTYPES, Job
from tests.support.memory import Poisoned
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda = kernels_of("weigh")


def check(job):
    grad = torch.randn(job.num_bags, job.width, dtype=job.compute, generator=torch.Generator().manual_seed(1))
    out = Poisoned(job.compute, job.num_ids, device=job.device)
    rows, inverse = job.rows.to(job.device), job.inverse.to(job.device)
    cuda.weight_gradients(rows, inverse, job.bags, grad.to(job.device), out.tensor)
    expected = reference.weight_gradients(job.rows, job.inverse, job.offsets, job.by_bag(grad), is_mean=job.is_mean)
    torch.testing.assert_close(out.result().cpu(), expected)


@pytest.mark.parametrize("dim", [1, 20, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_mean", [False, True])
def test_any_bags(device, dim, dtype, is_mean):
    check(Job(device, dim, dtype, [[0, 1, 5, 0], [2, 0, 9, 1]], is_mean=is_mean))
    check(Job(device, dim, dtype, [[2] * 9, [2] * 9], is_fixed=True, is_mean=is_mean))


@pytest.mark.parametrize("lengths", [[[]], [[0, 0]], [[1] * 70]])
def test_no_ids_and_one_id_a_bag(device, lengths):
    check(Job(device, 4, torch.float32, lengths, is_fixed=lengths == [[1] * 70]))


def test_refuses_what_does_not_fit(device):
    job = Job(device, 3, torch.float32, [[1, 1]])
    rows, inverse, grad = job.rows.to(device), job.inverse.to(device), torch.zeros(2, 3, device=device)
    with pytest.raises(ValueError, match="2 ids need as many gradients, out has 3"):
        cuda.weight_gradients(rows, inverse, job.bags, grad, torch.empty(3, device=device))
    with pytest.raises(TypeError, match="grad must be float32, got float64"):
        cuda.weight_gradients(rows, inverse, job.bags, grad.double(), torch.empty(2, device=device))

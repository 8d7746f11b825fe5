"""Bounding ids on a GPU, or as Triton interprets it, against its reference."""

import pytest
import torch

from rowmesh.ops.bound_ids import reference
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda = kernels_of("bound_ids")


@pytest.mark.parametrize("sizes", [[5], [0, 3, 0], [1100, 7, 0, 1], [0]])
def test_equals_the_reference(device, sizes):
    generator = torch.Generator().manual_seed(len(sizes))
    ids = torch.randint(-3, 12, (sum(sizes),), generator=generator)
    ids[::5] += 2**40
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    limits, substitutes = torch.arange(len(sizes)) + 5, torch.arange(len(sizes))
    expected, counts = reference.bound_ids(ids, offsets, limits, substitutes)
    outside = torch.ones(len(sizes), dtype=torch.int64, device=device)  # is added to
    own = ids.to(device)
    tables = [part.to(device) for part in (offsets, limits, substitutes)]
    assert cuda.bound_ids(own, *tables, own, outside) is own
    assert torch.equal(own.cpu(), expected)
    assert torch.equal(outside.cpu() - 1, counts)


def test_refuses_tensors_that_do_not_fit(device):
    three, two = (torch.zeros(n, dtype=torch.int64, device=device) for n in (3, 2))
    with pytest.raises(ValueError, match="outside must have 2 elements, got 3"):
        cuda.bound_ids(three, three, two, two, three, three)

"""Initial values on a GPU, or as Triton interprets it, against the CPU's, to the bit."""

import pytest
import torch

from rowmesh.ops.initialize import initialize
from tests.support.memory import Poisoned
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda = kernels_of("initialize")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("distribution", ["uniform", "constant"])
@pytest.mark.parametrize(
    ("shape", "key", "first", "stride"),
    [((0, 4), 7, 0, 1), ((1, 3), 2**64 - 1, 5, 1), ((400, 5), 2**63, 3, 7), ((20, 64), 12345, 2**40, 2**30)],
)
def test_equals_the_cpu(device, dtype, distribution, shape, key, first, stride):
    rule = {"first": first, "stride": stride, "distribution": distribution, "a": -1 / 3, "b": 0.7}
    expected = torch.empty(shape, dtype=dtype)
    initialize(expected, key, **rule)
    out = Poisoned(dtype, *shape, device=device)
    cuda.initialize(out.tensor, key, **rule)
    assert torch.equal(out.result().cpu(), expected)


def test_other_distributions_are_refused(device):
    with pytest.raises(ValueError, match="must be one of uniform, constant, got 'normal'"):
        cuda.initialize(torch.empty(1, 2, device=device), 1, first=0, stride=1, distribution="normal", a=0.0, b=1.0)

"""Dot interactions on a GPU, or as Triton interprets them, against their reference."""

import pytest
import torch

from rowmesh.ops.interaction import reference
from tests.support.memory import Poisoned
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda = kernels_of("interaction")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("sizes", [(3, 1, 1), (2, 7, 5), (2, 26, 16), (1, 33, 70), (0, 2, 3)])
def test_equals_the_reference(device, sizes, dtype, tolerance):
    samples, features, dim = sizes
    generator = torch.Generator().manual_seed(features)
    shapes = ((samples, dim), (samples, features, dim), (samples, dim + features * (features + 1) // 2))
    base, embeddings, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    out, of_base, of_embeddings = (Poisoned(dtype, *shape, device=device) for shape in (shapes[2], *shapes[:2]))
    cuda.forward(base, embeddings, out.tensor)
    cuda.backward(base, embeddings, grad, of_base.tensor, of_embeddings.tensor)
    double = [each.double() for each in (base, embeddings)]
    expected = (reference.interact(*double), *reference.gradients(*double, grad.double()))
    for poisoned, theirs in zip((out, of_base, of_embeddings), expected, strict=True):
        ours = poisoned.result().double()
        assert ours.shape == theirs.shape
        assert bool(((ours - theirs).abs() <= tolerance * theirs.abs().max() if samples else ours == ours).all())


def test_refuses_what_does_not_fit(device):
    base, embeddings = torch.zeros(2, 3, device=device), torch.zeros(2, 4, 3, device=device)
    with pytest.raises(TypeError, match="base must be float32 or float64, got bfloat16"):
        cuda.forward(base.bfloat16(), embeddings, torch.zeros(2, 13, device=device))
    with pytest.raises(TypeError, match="embeddings must be float32, got float64"):
        cuda.forward(base, embeddings.double(), torch.zeros(2, 13, device=device))
    with pytest.raises(ValueError, match="the products must be contiguous"):
        cuda.forward(base, embeddings, torch.zeros(13, 2, device=device).t())

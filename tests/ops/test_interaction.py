"""Dot interactions against plain torch, and against the formula."""

import pytest
import torch

from rowmesh import DotInteraction
from rowmesh.ops.interaction import cpu, interact, reference
from tests.support.memory import Poisoned

# Each is two kernels to compile: one vector and more, of features and of columns, full and not.
SIZES = [(3, 1, 1), (3, 7, 5), (2, 15, 16), (2, 16, 17), (2, 70, 33)]
MORE_SIZES = [(2, 2, 3), (3, 26, 16), (2, 26, 64), (1, 33, 40)]


def draw(samples, features, dim, dtype):
    generator = torch.Generator().manual_seed(features)
    sizes = ((samples, dim), (samples, features, dim), (samples, dim + features * (features + 1) // 2))
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def test_the_reference_is_the_formula():
    base, embeddings, _ = draw(2, 3, 4, torch.float64)
    for sample, line in enumerate(reference.interact(base, embeddings)):
        vectors = [base[sample], *embeddings[sample]]
        products = [torch.dot(vectors[i], vectors[j]) for i in range(4) for j in range(i)]
        torch.testing.assert_close(line, torch.cat([base[sample], torch.stack(products)]))


@pytest.mark.parametrize(
    ("sizes", "dtype", "tolerance"),
    [
        *((sizes, torch.float32, 1e-6) for sizes in SIZES),
        *((sizes, torch.float64, 1e-14) for sizes in (SIZES[1], SIZES[3])),
        *(pytest.param(sizes, torch.float32, 1e-6, marks=pytest.mark.slow) for sizes in MORE_SIZES),
        *(pytest.param(sizes, torch.float64, 1e-14, marks=pytest.mark.slow) for sizes in (MORE_SIZES[0], SIZES[2])),
    ],
)
def test_equals_the_reference(sizes, dtype, tolerance):
    base, embeddings, grad = draw(*sizes, dtype)
    double = [each.double().requires_grad_() for each in (base, embeddings)]
    expected = reference.interact(*double)
    gradients = torch.autograd.grad(expected, double, grad.double())
    for ours, theirs in zip(reference.gradients(*double, grad.double()), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    out, of_base, of_embeddings = (Poisoned(dtype, *each.shape) for each in (grad, base, embeddings))
    cpu.forward(base, embeddings, out.tensor)
    cpu.backward(base, embeddings, grad, of_base.tensor, of_embeddings.tensor)
    found = (out.result(), of_base.result(), of_embeddings.result())
    for ours, theirs in zip(found, (expected, *gradients), strict=True):
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_threads_compute_the_same_bits(monkeypatch):
    base, embeddings, grad = draw(4 * cpu.SAMPLES_OF_A_THREAD + 3, 5, 8, torch.float32)
    results = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        out, of_base, of_embeddings = grad.clone(), base.clone(), embeddings.clone()
        cpu.forward(base, embeddings, out)
        cpu.backward(base, embeddings, grad, of_base, of_embeddings)
        results.append((out, of_base, of_embeddings))
    assert all(one.equal(other) for one, other in zip(*results, strict=True))


def test_layouts_and_dtypes():
    base, embeddings, grad = draw(4, 3, 4, torch.float32)
    one = base[0].expand(4, -1).requires_grad_()
    turned = embeddings.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    y = interact(one, turned)
    torch.testing.assert_close(y, reference.interact(one, turned))
    for ours, theirs in zip(
        torch.autograd.grad(y.sum(), (one, turned)), reference.gradients(one, turned, torch.ones_like(y)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    assert interact(base.bfloat16(), embeddings).dtype == torch.float32
    assert interact(base.half(), embeddings.half()).dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert interact(base, embeddings).equal(interact(base, embeddings.clone()))
        assert interact(base, embeddings).dtype == torch.float32
    assert interact(base[:0], embeddings[:0]).shape == (0, 10)
    assert grad.shape == (4, 10)


def test_gradients_of_one_input_and_of_gradients():
    base, embeddings, _ = (each.requires_grad_() for each in draw(3, 3, 4, torch.float64))
    for frozen, asked in ((base, embeddings), (embeddings, base)):
        frozen.requires_grad_(False)
        (grad,) = torch.autograd.grad(interact(base, embeddings).pow(2).sum(), asked)
        assert grad.shape == asked.shape
        frozen.requires_grad_(True)
    assert torch.autograd.gradcheck(interact, (base, embeddings))
    assert torch.autograd.gradgradcheck(interact, (base, embeddings))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_what_kernels_cannot_do_is_plain_torch():
    base, embeddings, _ = draw(3, 3, 4, torch.float32)
    exported = torch.export.export(DotInteraction(), (base, embeddings))
    assert "aten.bmm.default" in {str(node.target) for node in exported.graph.nodes}
    torch.testing.assert_close(exported.module()(base, embeddings), interact(base, embeddings))
    torch.func.jvp(lambda b: interact(b, embeddings), (base,), (base,))
    torch.func.grad(lambda b: interact(b, embeddings).sum())(base)
    with pytest.raises(ValueError, match=r"base must be \[B, D\].*got \[3, 4\] and \[3, 4\]"):
        interact(base, base)

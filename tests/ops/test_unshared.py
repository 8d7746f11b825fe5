"""Unshared gradients: nothing else can change what a backward keeps."""

import pytest
import torch

from rowmesh.ops import unshared as module
from rowmesh.ops.unshared import are_unshared


class Asked(torch.autograd.Function):
    """Asks of the gradients that its backward is given."""

    @staticmethod
    def forward(ctx, anchor, answers):
        ctx.answers = answers
        return torch.zeros(3, 4), torch.zeros(3, 4)

    @staticmethod
    def backward(ctx, *grads):
        ctx.answers.append(are_unshared(grads))
        return None, None


def answer(loss_of, prepare=lambda vectors: None):
    """Whether the gradients were sole, given what makes a loss of the vectors."""
    answers = []
    vectors, _ = Asked.apply(torch.zeros((), requires_grad=True), answers)
    prepare(vectors)
    loss_of(vectors)
    return answers[0]


WEIGHT = torch.ones(4, 5)
HELD = torch.ones(3, 4)
SOLE = {
    "product": lambda vectors: (vectors * 2).sum().backward(),
    "linear": lambda vectors: (vectors @ WEIGHT).relu().sum().backward(),
    "expanded, which is copied": lambda vectors: vectors.sum().backward(),
    "view": lambda vectors: (vectors.view(3, 2, 2) * 2).sum().backward(),
    "two uses": lambda vectors: ((vectors * 2).sum() + (vectors * 3).sum()).backward(),
}
SHARED = {
    "given": lambda vectors: vectors.backward(HELD),
    "a view of what is given": lambda vectors: vectors.view(-1).backward(HELD.view(-1)),
    "passed on": lambda vectors: (vectors + 1).backward(HELD),
}
HOOKS = {"tensor": lambda grad: grad, "view": lambda grad: grad.view(-1), "array": lambda grad: grad.numpy()}


@pytest.mark.parametrize("name", SOLE)
def test_what_nothing_refers_to(name):
    assert answer(SOLE[name])


@pytest.mark.parametrize("name", SHARED)
def test_what_the_program_or_the_graph_refers_to(name):
    assert not answer(SHARED[name])


@pytest.mark.parametrize("name", HOOKS)
def test_what_a_hook_keeps(name):
    kept = []

    def keep(grad):
        kept.append(HOOKS[name](grad))

    assert not answer(SOLE["product"], lambda vectors: vectors.register_hook(keep) and None)


@pytest.mark.parametrize("name", HOOKS)
def test_what_a_hook_keeps_of_what_the_gradient_is_a_view_of(name):
    kept = []

    def loss_of(vectors):
        view = vectors.view(3, 2, 2)
        view.register_hook(lambda grad: kept.append(HOOKS[name](grad)))
        (view * 2).sum().backward()

    assert not answer(loss_of)


@pytest.mark.parametrize("leaf_is_first", [False, True])
def test_a_gradient_that_a_leaf_gets_too_is_not_shared_with_it(leaf_is_first):
    """Whichever backward runs first: the one that keeps the gradient refers to it, and the other copies it."""
    kept = []

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor):
            return (torch.zeros(3, 4),)

        @staticmethod
        def backward(ctx, *grads):
            kept.append(grads[0] if are_unshared(grads) else grads[0].clone())

    leaf = torch.zeros(3, 4, requires_grad=True)
    (vectors,) = Keeping.apply(torch.zeros((), requires_grad=True))
    total = leaf + vectors if leaf_is_first else vectors + leaf
    (total * 2).sum().backward()
    assert leaf.grad is not None
    leaf.grad.zero_()
    assert torch.equal(kept[0], torch.full((3, 4), 2.0))


def test_a_torch_that_cannot_count_has_no_sole_gradients(monkeypatch):
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    module._only_references.cache_clear()
    try:
        assert not module.are_unshared((torch.ones(2),))
    finally:
        module._only_references.cache_clear()

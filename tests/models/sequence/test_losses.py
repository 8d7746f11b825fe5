"""Losses against their formulas, written out in float64."""

import pytest
import torch

from rowmesh.models.sequence.losses import (
    CHUNK,
    binary_cross_entropy,
    cosine,
    full_softmax,
    sampled_softmax,
    score_shape,
)
from rowmesh.ops.linear import ALL, Choices, chosen, obstacle, using

P, M, S, D = 11, 23, 7, 5


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(loss, *inputs):
    weights = drawn(*loss.shape, seed=9)
    return [loss, *torch.autograd.grad((weights * loss).sum(), inputs)]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 8, 23, 100])
def test_full_softmax_in_chunks(chunk_size):
    queries, items = drawn(P, D).requires_grad_(), drawn(M, D, seed=1).requires_grad_()
    targets = torch.arange(P) * 2 % 9  # some twice
    expected = torch.stack(
        [(q @ items.T).exp().sum().log() - q @ items[t] for q, t in zip(queries, targets, strict=True)]
    )
    found = full_softmax(queries, targets, items, chunk_size)
    assert_same(gradients(found, queries, items), gradients(expected, queries, items))


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_full_softmax_by_onednn():
    """Chosen where the forward pass is; the backward pass comes after the block."""
    items, queries = drawn(2 * CHUNK + 3, 16).float().requires_grad_(), drawn(P, 16, seed=1).float().requires_grad_()
    targets = torch.arange(P) * 50 % len(items)
    expected = full_softmax(queries.double(), targets, items.double())
    with using(Choices.everything([score_shape(16)])):
        assert chosen(score_shape(16), queries.detach(), items.detach()) == ALL
        found = full_softmax(queries, targets, items)
    for one, other in zip(gradients(found.double(), queries, items), gradients(expected, queries, items), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-6)
    assert not any(chosen(score_shape(16), queries.detach(), items.detach()))


def test_large_scores_do_not_overflow():
    queries, items = 100 * torch.eye(2), 100 * torch.eye(2)
    torch.testing.assert_close(full_softmax(queries, torch.tensor([0, 0]), items, 1), torch.tensor([0.0, 1e4]))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
def test_sampled_softmax(shared, corrected):
    shape = (S,) if shared else (P, S)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(M, shape, generator=generator)
    targets = torch.arange(P) % 5
    ids[..., 0] = 2  # which is the target of some
    log_q = drawn(*shape, seed=4) if corrected else None
    queries, items = drawn(P, D).requires_grad_(), drawn(M, D, seed=1).requires_grad_()
    expected = []
    for p in range(P):
        row = ids if shared else ids[p]
        total = (queries[p] @ items[targets[p]]).exp()
        for s, item in enumerate(row.tolist()):
            if item != targets[p]:
                weight = 1.0 if log_q is None else 1 / (S * (log_q if shared else log_q[p])[s].exp())
                total = total + weight * (queries[p] @ items[item]).exp()
        expected.append(total.log() - queries[p] @ items[targets[p]])
    found = sampled_softmax(queries, items[targets], items[ids], targets, ids, log_q)
    assert_same(gradients(found, queries, items), gradients(torch.stack(expected), queries, items))


def test_corrected_samples_stand_for_all_items():
    """The mean of `exp(loss)` over draws is that of the full softmax."""
    queries, items, target = drawn(1, D), drawn(M, D, seed=1), torch.tensor([4])
    shares = torch.linspace(1, 2, M, dtype=torch.float64)
    shares /= shares.sum()
    ids = torch.multinomial(shares, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    loss = sampled_softmax(queries, items[target], items[ids], target, ids, shares.log()[ids])
    torch.testing.assert_close(loss, full_softmax(queries, target, items), rtol=0.01, atol=0)


def test_only_collisions_leave_nothing_to_learn():
    loss = sampled_softmax(drawn(1, D), drawn(1, D), drawn(2, D), torch.tensor([1]), torch.tensor([1, 1]))
    assert loss.item() == 0


@pytest.mark.parametrize("shared", [True, False])
def test_binary_cross_entropy(shared):
    ids = torch.arange(S) if shared else torch.arange(P * S).view(P, S) % M
    targets = torch.arange(P) % 5
    queries, items = drawn(P, D).requires_grad_(), drawn(M, D, seed=1).requires_grad_()
    expected = []
    for p in range(P):
        loss = -torch.sigmoid(queries[p] @ items[targets[p]]).log()
        for item in (ids if shared else ids[p]).tolist():
            if item != targets[p]:
                loss = loss - (1 - torch.sigmoid(queries[p] @ items[item])).log()
        expected.append(loss)
    found = binary_cross_entropy(queries, items[targets], items[ids], targets, ids)
    assert_same(gradients(found, queries, items), gradients(torch.stack(expected), queries, items))


def test_cosine():
    queries, items = drawn(P, D), drawn(M, D, seed=1)
    scaled, normalized = cosine(queries, items, 0.05)
    expected = torch.cosine_similarity(queries[:, None], items, dim=-1) / 0.05
    torch.testing.assert_close(scaled @ normalized.T, expected)

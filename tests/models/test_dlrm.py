import math

import pytest
import torch
from torch.nn import functional as F

from rowmesh.errors import ConfigurationError
from rowmesh.models import DLRM


def by_hand(model: DLRM, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """The formula, sample by sample and pair by pair."""
    logits = []
    for sample in range(dense.shape[0]):
        base = dense[sample]
        for layer in model.bottom[::2]:
            base = F.relu(F.linear(base, layer.weight, layer.bias))
        vectors = [base, *embeddings[sample]]
        dots = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        hidden = torch.cat([base, torch.stack(dots)])
        linears = list(model.top[::2])
        for layer in linears[:-1]:
            hidden = F.relu(F.linear(hidden, layer.weight, layer.bias))
        logits.append(F.linear(hidden, linears[-1].weight, linears[-1].bias))
    return torch.cat(logits)


@pytest.mark.parametrize("num_features", [1, 2, 7])
def test_matches_the_formula(num_features):
    torch.manual_seed(0)
    model = DLRM(num_dense=3, num_features=num_features, dim=5, bottom=[4], top=[6, 3]).double()
    dense = torch.randn(4, 3, dtype=torch.float64)
    embeddings = torch.randn(4, num_features, 5, dtype=torch.float64)
    torch.testing.assert_close(model(dense, embeddings), by_hand(model, dense, embeddings))


def test_gradients_reach_everything():
    model = DLRM(num_dense=3, num_features=4, dim=5, bottom=[8], top=[8]).double()
    embeddings = torch.randn(6, 4, 5, dtype=torch.float64, requires_grad=True)
    model(torch.randn(6, 3, dtype=torch.float64), embeddings).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert embeddings.grad is not None
    assert (embeddings.grad != 0).any(dim=2).all()


def test_starts_as_the_reference_implementation():
    torch.manual_seed(0)
    model = DLRM(num_dense=400, num_features=2, dim=600, bottom=[], top=[])
    linear = model.bottom[0]
    assert linear.weight.std().item() == pytest.approx(math.sqrt(2 / 1000), rel=0.02)
    assert linear.bias.std().item() == pytest.approx(math.sqrt(1 / 600), rel=0.1)


def test_without_dense_features():
    model = DLRM(num_dense=0, num_features=3, dim=4, top=[8])
    logits = model(torch.zeros(5, 0), torch.randn(5, 3, 4))
    logits.sum().backward()
    assert logits.shape == (5,)
    assert model.stand_in.grad.abs().sum() > 0


def test_an_empty_batch_has_zero_gradients():
    model = DLRM(num_dense=2, num_features=3, dim=4, bottom=[4], top=[4])
    model(torch.zeros(0, 2), torch.zeros(0, 3, 4)).sum().backward()
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


@pytest.mark.parametrize(
    "wrong", [{"dim": 0}, {"num_features": 0}, {"num_dense": -1}, {"bottom": [8, 0]}, {"top": [-1]}]
)
def test_sizes_that_cannot_work(wrong):
    sizes = {"num_dense": 2, "num_features": 3, "dim": 4, "bottom": [4], "top": [4]} | wrong
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        DLRM(**sizes)


@pytest.mark.parametrize("num_dense", [0, 13])
def test_widths_are_those_of_the_layers(num_dense):
    model = DLRM(num_dense=num_dense, num_features=3, dim=4, bottom=[8], top=[16, 5])
    layers = [part for part in model.top if isinstance(part, torch.nn.Linear)]
    assert model.top_widths == (layers[0].in_features, *(layer.out_features for layer in layers))
    assert model.bottom_widths == ((13, 8, 4) if num_dense else (4,))

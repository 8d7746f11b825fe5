"""First values: the moments of a dense table, and a function of seed and name alone."""

import pytest
import torch

from rowmesh.errors import ConfigurationError
from rowmesh.ops.tensor_train.reference import dense
from rowmesh.tables import Constant, Normal, Uniform
from rowmesh.tables.cores import draw_cores
from rowmesh.tensor_train import TensorTrainShape

SHAPE = TensorTrainShape.choose(8000, 16, rank=16)


@pytest.mark.parametrize(
    "initializer, std", [(Normal(std=0.5), 0.5), (Uniform(bound=0.3), 0.3 / 3**0.5), (Uniform(), 8000**-0.5 / 3**0.5)]
)
def test_rows_have_the_moments_of_a_dense_table(initializer, std):
    """Over ten draws: rows of one draw share cores, so one draw's own moments spread by a few percent."""
    draws = torch.stack([dense(draw_cores(SHAPE, initializer, seed, "item", torch.float64)) for seed in range(10)])
    assert float(draws.square().mean().sqrt()) == pytest.approx(std, rel=0.03)
    assert abs(float(draws.mean())) < 0.01 * std
    assert float(draws.square().mean(dim=(1, 2)).sqrt().std()) < 0.1 * std


def test_rows_are_uncorrelated():
    rows = dense(draw_cores(SHAPE, Normal(std=1.0), 0, "item", torch.float64))
    neighbours = torch.corrcoef(torch.stack([rows[:-1].flatten(), rows[1:].flatten()]))[0, 1]
    columns = torch.corrcoef(rows.t()) - torch.eye(16)
    assert abs(float(neighbours)) < 0.05
    assert float(columns.abs().mean()) < 0.05


def test_values_depend_on_seed_and_name_alone():
    def draw(seed, name):
        return draw_cores(SHAPE, Normal(std=1.0), seed, name, torch.float32)

    torch.manual_seed(5)
    first = draw(3, "item")
    torch.manual_seed(6)
    assert all(torch.equal(a, b) for a, b in zip(first, draw(3, "item"), strict=True))
    for other in (draw(4, "item"), draw(3, "user")):
        assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0].flatten()[:50], first[1].flatten()[:50])


@pytest.mark.parametrize("initializer", [Constant(value=0.0), Constant(value=1.0), Normal(mean=1.0), Normal(std=0.0)])
def test_distributions_that_products_cannot_have(initializer):
    with pytest.raises(ConfigurationError, match="rows of mean 0 and a standard deviation above 0"):
        draw_cores(SHAPE, initializer, 0, "item", torch.float32)

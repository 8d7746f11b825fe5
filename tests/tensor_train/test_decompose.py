"""TT-SVD: exact at full rank, near the best below it."""

import pytest
import torch

from rowmesh.errors import ConfigurationError
from rowmesh.ops.tensor_train.reference import dense
from rowmesh.tensor_train import TensorTrainShape, tt_svd


def random_table(num_rows, dim, seed=0):
    return torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("num_rows, dim", [(1, 1), (7, 5), (60, 8), (101, 12), (30, 64), (500, 1)])
def test_full_rank_returns_the_table(num_rows, dim):
    table = random_table(num_rows, dim)
    full = TensorTrainShape.choose(num_rows, dim).full_ranks
    shape = TensorTrainShape.choose(num_rows, dim, rank=full)
    cores = tt_svd(table, shape)
    assert [tuple(core.shape) for core in cores] == list(shape.core_shapes)
    assert float((dense(cores)[:num_rows] - table).abs().max()) < 1e-12


def test_a_table_of_low_rank_is_found():
    shape = TensorTrainShape.choose(1000, 8, rank=3)
    generator = torch.Generator().manual_seed(1)
    made = dense([torch.randn(core, generator=generator, dtype=torch.float64) for core in shape.core_shapes])
    assert torch.allclose(dense(tt_svd(made, shape)), made, atol=1e-10)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_truncation_is_near_the_best(rank):
    """Within √2 of the larger of the two unfoldings' own truncation errors, which no table of this rank can beat."""
    table, shape = random_table(216, 8), TensorTrainShape.choose(216, 8, rank=rank)
    error = float((dense(tt_svd(table, shape)) - table).norm())
    (p1, p2, p3), (q1, q2, q3) = shape.row_factors, shape.dim_factors
    cube = table.view(p1, p2, p3, q1, q2, q3).permute(0, 3, 1, 4, 2, 5)
    tails = [torch.linalg.svdvals(cube.reshape(size, -1))[rank:].norm() for size in (p1 * q1, p1 * q1 * p2 * q2)]
    assert float(max(tails)) * 0.999 <= error <= 2**0.5 * float(max(tails)) * 1.001


def test_cores_are_balanced():
    cores = tt_svd(100 * random_table(216, 8), TensorTrainShape.choose(216, 8, rank=5))
    sizes = [float(core.square().mean().sqrt()) for core in cores]
    assert max(sizes) / min(sizes) < 1 + 1e-9


def test_a_table_of_zeros():
    shape = TensorTrainShape.choose(50, 4, rank=2)
    assert not dense(tt_svd(torch.zeros(50, 4), shape)).any()


def test_what_it_refuses():
    shape = TensorTrainShape.choose(50, 4, rank=2)
    with pytest.raises(ConfigurationError, match=r"the table is \(4, 50\), its shape says \(50, 4\)"):
        tt_svd(torch.zeros(4, 50), shape)
    with pytest.raises(ConfigurationError, match="not finite"):
        tt_svd(torch.full((50, 4), float("inf")), shape)

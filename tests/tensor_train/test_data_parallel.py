"""DistributedDataParallel: by autograd as any module, refused with the fused optimizer, which it cannot sum."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from rowmesh.errors import ConfigurationError
from rowmesh.tables.update_rules import SGD
from rowmesh.tensor_train import TensorTrainEmbeddingBag, TensorTrainOptimizer
from tests.support.ranks import RankPool


def make(**options):
    return TensorTrainEmbeddingBag(101, 12, mode="sum", rank=(5, 7), dtype=torch.float64, seed=2, **options)


def draw_ids(step):
    return torch.randint(101, (8, 2), generator=torch.Generator().manual_seed(step))


def train(bag, model, num_ranks=1, rank=0):
    optimizer = torch.optim.Adam(bag.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(draw_ids(step)[rank::num_ranks]).square().mean().backward()
        optimizer.step()
    return bag.dense().detach()


def in_parallel(mesh):
    bag = make()
    return train(bag, DistributedDataParallel(bag, process_group=mesh.group), mesh.world_size, mesh.rank)


def fused_in_parallel(mesh):
    bag = make()
    model = DistributedDataParallel(bag, process_group=mesh.group, find_unused_parameters=True)
    TensorTrainOptimizer(bag, SGD())
    with torch.no_grad():
        model(draw_ids(0))
    with pytest.raises(ConfigurationError, match=r"'tensor_train' .* DistributedDataParallel.* drift apart"):
        model(draw_ids(0))


def sparse_in_parallel(mesh):
    model = DistributedDataParallel(make(sparse=True), process_group=mesh.group)
    with pytest.raises(ConfigurationError, match=r"'tensor_train' has sparse = True.* make it with sparse = False"):
        model(draw_ids(0))


def test_autograd_equals_one_process(ranks: RankPool):
    expected = train(bag := make(), bag)
    for found in ranks.run(in_parallel):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("refused", [fused_in_parallel, sparse_in_parallel])
def test_what_is_refused(ranks: RankPool, refused):
    ranks.run(refused)

"""A softmax over parts of the items is the one over all of them, with all gradients."""

import pytest
import torch

from rowmesh.mesh import Mesh
from rowmesh.models.sequence.losses import full_softmax
from rowmesh.run.sequence.sharded_softmax import item_range, sharded_softmax

D = 4


def whole(num_items, num_queries):
    generator = torch.Generator().manual_seed(num_items)
    items = torch.randn(num_items, D, generator=generator, dtype=torch.float64)
    queries = torch.randn(num_queries, D, generator=generator, dtype=torch.float64)
    return items, queries, torch.randint(num_items, (num_queries,), generator=generator)


def one_part(mesh, num_items, bounds):
    items, queries, targets = whole(num_items, bounds[-1])
    mine = item_range(num_items, mesh.rank, mesh.world_size)
    low, high = bounds[mesh.rank : mesh.rank + 2]
    part = items[mine.start : mine.stop].requires_grad_()
    own = queries[low:high].requires_grad_()
    loss = sharded_softmax(mesh, own, targets[low:high], part, mine.start, chunk_size=3)
    (loss * torch.arange(low, high)).sum().backward()
    return loss.detach(), own.grad, part.grad


def expected(num_items, num_queries):
    items, queries, targets = whole(num_items, num_queries)
    items.requires_grad_()
    queries.requires_grad_()
    loss = full_softmax(queries, targets, items)
    (loss * torch.arange(num_queries)).sum().backward()
    return loss.detach(), queries.grad, items.grad


@pytest.mark.parametrize("num_items, bounds", [(17, [0, 5, 5, 12]), (2, [0, 1, 2, 3])])
def test_three_ranks(ranks, num_items, bounds):
    """Ranks without a query, and without an item, too."""
    found = ranks.run(one_part, num_items, bounds, world_size=3)
    for parts, all_of_it in zip(zip(*found, strict=True), expected(num_items, bounds[-1]), strict=True):
        torch.testing.assert_close(torch.cat(parts), all_of_it, rtol=1e-11, atol=1e-12)


def test_one_rank():
    for mine, all_of_it in zip(one_part(Mesh(), 9, [0, 6]), expected(9, 6), strict=True):
        torch.testing.assert_close(mine, all_of_it, rtol=1e-11, atol=1e-12)

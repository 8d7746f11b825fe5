"""Rows go from any ranges to any others, in windows of any size."""

from unittest.mock import patch

import pytest
import torch

from rowmesh.mesh import Mesh
from rowmesh.mesh.reshard import Block, block, reshard
from tests.support.ranks import RankPool

NUM_ROWS = 41


def cyclic(rank, world_size):
    return [range(rank, 20, world_size), range(20 + (rank + 1) % world_size, NUM_ROWS, world_size)]


def blocks(rank, world_size):
    return [block(NUM_ROWS, rank, world_size)]


def on_the_last(rank, world_size):
    return [range(NUM_ROWS)] if rank == world_size - 1 else []


def all_of_them(rank, world_size):
    return [range(7, NUM_ROWS), range(7)]


def go(mesh, have, want, shape, chunk_bytes):
    expected = torch.arange(NUM_ROWS * 6).view(NUM_ROWS, 6)[:, : shape[0] if shape else None]
    expected = (expected if shape else expected[:, 0]).double()
    sources = [Block(rows, expected[rows.start : rows.stop : rows.step]) for rows in have(mesh.rank, mesh.world_size)]
    targets = [Block(rows, torch.full((len(rows), *shape), -1.0).double()) for rows in want(mesh.rank, mesh.world_size)]
    with patch("rowmesh.mesh.reshard.CHUNK_BYTES", chunk_bytes):
        reshard(mesh, sources, targets, NUM_ROWS, 8 * (shape[0] if shape else 1), "testing")
    for rows, values in targets:
        assert values.equal(expected[rows.start : rows.stop : rows.step])


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize(
    "have, want",
    [(cyclic, blocks), (blocks, cyclic), (on_the_last, blocks), (cyclic, on_the_last), (blocks, all_of_them)],
)
def test_every_row_comes_to_where_it_is_wanted(ranks: RankPool, have, want, chunk_bytes, shape):
    go(Mesh(), have, want, shape, chunk_bytes)
    ranks.run(go, have, want, shape, chunk_bytes, world_size=3)

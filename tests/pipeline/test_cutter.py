"""Cutter: orders and sizes of micro-batches."""

import pytest
import torch

from rowmesh import SparseBatch, TableSpec
from rowmesh.errors import ConfigurationError
from rowmesh.pipeline.cutter import Cutter

TABLES = [TableSpec(name="item", num_rows=50, dim=4)]


def batch(size):
    generator = torch.Generator().manual_seed(size)
    return SparseBatch.from_dense(["item"], torch.randint(50, (1, size), generator=generator))


@pytest.mark.parametrize("sizes", ["even", "light_ends"])
@pytest.mark.parametrize("clustering", ["off", "greedy", "light_ends"])
@pytest.mark.parametrize("size", [0, 1, 3, 64])
def test_every_sample_is_in_one_micro_batch(sizes, clustering, size):
    order, parts = Cutter(TABLES, 4, sizes=sizes, clustering=clustering)(batch(size))
    assert sum(parts) == size
    assert len(parts) == 4
    if clustering == "off" or size == 0:
        assert order is None
    else:
        assert order is not None
        assert order.sort().values.tolist() == list(range(size))


def test_light_ends_are_smaller():
    _, parts = Cutter(TABLES, 4, sizes="light_ends")(batch(64))
    assert parts[0] < parts[1]
    assert parts[-1] < parts[-2]


def test_unknown_ways_are_refused():
    with pytest.raises(ConfigurationError, match=r"sizes must be one of \['even', 'light_ends'\], got 'odd'"):
        Cutter(TABLES, 2, sizes="odd")  # pyright: ignore[reportArgumentType]

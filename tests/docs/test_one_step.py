"""The picture of one step shows what a step does; `test_drawings.py` compares the file with its script."""

import torch

from rowmesh import Plan
from rowmesh.ops.segment_unique import segment_unique
from rowmesh.placement import TableShape
from tests.support.drawings import load


def test_owners_and_distinct_ids_are_those_of_rowmesh():
    drawing = load("one_step")
    world_size = len(drawing.BAGS)
    shape = TableShape("item", drawing.NUM_ROWS, value_bytes=16, gradient_bytes=16, state_bytes=0)
    (table,) = Plan.cyclic([shape], world_size).tables
    (rows,) = table.ranges
    assert [drawing.owner(row) for row in range(drawing.NUM_ROWS)] == [
        rows.owner(row, world_size) for row in range(drawing.NUM_ROWS)
    ]
    for bags in drawing.BAGS:
        ids = torch.tensor(bags).flatten()
        unique, *_ = segment_unique(ids, torch.tensor([0, len(ids)]))
        assert drawing.distinct(bags) == unique.tolist()
        assert drawing.routed(bags) == sorted(unique.tolist(), key=drawing.owner)

"""Groups and held out batches of a column."""

import numpy as np
import pytest

from rowmesh.data.reorder import groups as module
from rowmesh.data.reorder.groups import Column
from tests.support.cooccurrence import BATCH, draw_batches, prepare_batches


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("batch_size", [BATCH, 100, 5000])
def test_every_id_is_in_a_group_or_held_out(tmp_path, bags, batch_size):
    prepared = prepare_batches(tmp_path, draw_batches(70), bags=bags)
    column = Column(prepared, prepared.table("item"), batch_size)
    found, last = [], 0
    for number, ids, starts, ends in column.groups():
        assert number == last
        last += len(range(0, min(prepared.block_samples, 10**9), batch_size))
        found += [ids[start:end] for start, end in zip(starts, ends, strict=True)]
    held_out = column.held_out()
    assert len(held_out) == column.num_batches // 10
    assert all(len(group) == 4 for group in found) or not bags
    counts = np.bincount(np.concatenate([*found, *held_out]), minlength=prepared.table("item").num_rows)
    assert (counts == prepared.counts("item")).all()


def test_few_of_many_batches_are_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_HELD_OUT", 3)
    prepared = prepare_batches(tmp_path, draw_batches(70))
    assert len(Column(prepared, prepared.table("item"), BATCH).held_out()) == 2

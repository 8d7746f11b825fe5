"""The workload is the one peers are measured on elsewhere: the same batches to the bit."""

import argparse
import importlib.util
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.workload import CRITEO_KAGGLE, Workload, make_batches

SHARED = Path(__file__).parents[3] / "shared" / "peers" / "workload.py"
SMALL = Workload(max_rows=5000, global_batch=12, pooling=3, seed=4)


def test_ranks_take_parts_of_one_global_batch():
    whole = make_batches(SMALL, 0, 1, 2)[1]
    parts = [make_batches(SMALL, rank, 3, 2)[1] for rank in range(3)]
    assert torch.equal(torch.cat([part.ids for part in parts], dim=1), whole.ids)
    assert torch.equal(torch.cat([part.dense for part in parts]), whole.dense)
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)


def test_ids_are_rows_of_their_tables():
    (batch,) = make_batches(SMALL, 0, 1, 1)
    for ids, rows in zip(batch.ids, SMALL.table_rows, strict=True):
        assert int(ids.min()) >= 0
        assert int(ids.max()) < rows
    assert Workload(max_rows=0).table_rows == list(CRITEO_KAGGLE)


@pytest.mark.skipif(not SHARED.exists(), reason="the shared workload is not here")
@pytest.mark.parametrize("workload", [SMALL, Workload(max_rows=90_000, global_batch=64, zipf=0.9)])
def test_batches_equal_those_of_the_shared_workload(workload):
    spec = importlib.util.spec_from_file_location("shared_workload", SHARED)
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)
    expected = shared.make_batches(argparse.Namespace(**asdict(workload)), 1, 2, 3)
    for ours, (dense, ids, labels) in zip(make_batches(workload, 1, 2, 3), expected, strict=True):
        assert torch.equal(ours.dense, dense)
        assert torch.equal(ours.ids, ids)
        assert torch.equal(ours.labels, labels)

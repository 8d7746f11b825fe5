"""The workload is the one peers are measured on elsewhere: the same batches to the bit."""

import argparse
import importlib.util
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.command import parse
from benchmarks.ranks.setup import sparse_batch, table_specs
from benchmarks.workload import CRITEO_KAGGLE, MLPERF, Workload, make_batches, read_bags

SHARED = Path(__file__).parents[3] / "shared" / "peers" / "workload.py"
SMALL = Workload(max_rows=5000, global_batch=12, pooling=3, seed=4)
BAGS = Workload(max_rows=5000, global_batch=12, seed=4, **read_bags("mlperf"))


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


@pytest.mark.parametrize("construction", ["drawn", "mlperf"])
def test_every_table_has_bags_of_its_size(construction):
    workload = replace(BAGS, construction=construction)
    whole = make_batches(workload, 0, 1, 2)[1]
    parts = [make_batches(workload, rank, 3, 2)[1] for rank in range(3)]
    assert [bags.shape for bags in whole.bags] == [(12, size) for size in MLPERF["multi_hot_sizes"]]
    for table, (bags, rows) in enumerate(zip(whole.bags, workload.table_rows, strict=True)):
        assert torch.equal(bags, torch.cat([part.bags[table] for part in parts]))
        assert 0 <= int(bags.min()) <= int(bags.max()) < rows
    batch = sparse_batch(table_specs(workload), whole)
    assert batch.offsets.diff().tolist() == [size for size in MLPERF["multi_hot_sizes"] for _ in range(12)]
    assert torch.equal(batch.ids, torch.cat([bags.flatten() for bags in whole.bags]))


def test_the_first_id_of_a_bag_decides_the_others():
    """In all batches and on all ranks, and in each table other ones, which are even over the table."""
    workload = replace(BAGS, construction="mlperf", global_batch=2000)
    bags = torch.cat([batch.bags[20] for batch in make_batches(workload, 1, 2, 3)])
    first, numbers = bags[:, 0].unique(return_inverse=True)
    assert len(bags.unique(dim=0)) == len(first) < len(bags)
    distinct = bags[[int((numbers == number).nonzero()[0]) for number in range(len(first))]]
    others = np.bincount(distinct[:, 1:].flatten() // 500, minlength=10)
    assert others == pytest.approx(np.full(10, others.mean()), rel=0.05)
    other_table = make_batches(replace(workload, multi_hot_sizes=[100] * 26), 1, 2, 1)[0]
    assert not torch.equal(other_table.bags[20][:, 1:], other_table.bags[21][:, 1:])


def test_bags_come_from_a_file(tmp_path):
    path = tmp_path / "three.json"
    tables = {"num_embeddings_per_feature": [5, 2_000_000, 3], "multi_hot_sizes": [4, 1, 2]}
    path.write_text(json.dumps(tables))
    (workload,) = parse("", ["--bags", str(path)], bags="", construction="drawn").workloads
    assert workload.table_rows == [5, 1_000_000, 3]
    assert workload.bag_sizes == [4, 1, 2]
    assert workload.name == "dim16_batch4096_three"
    assert make_batches(replace(workload, global_batch=8), 0, 1, 1)[0].ids.shape == (8 * 7,)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--bags", "nothing.json"], "--bags nothing.json: neither mlperf nor a JSON file with num_embeddings_per_fe"),
        (["--bags", "FILE"], "2 tables of rows \\(5, 6\\) and 1 sizes of bags \\(4,\\); give as many of each"),
        (["--bags", "mlperf", "--pooling", "3"], "--pooling says how many ids a bag has, and so does --bags; give eit"),
        (["--construction", "none"], "--construction none: there are drawn, mlperf"),
    ],
)
def test_bags_that_cannot_be_are_refused(arguments, message, tmp_path, capsys):
    path = tmp_path / "uneven.json"
    path.write_text('{"num_embeddings_per_feature": [5, 6], "multi_hot_sizes": [4]}')
    with pytest.raises(SystemExit):
        parse("", [str(path) if each == "FILE" else each for each in arguments], bags="", construction="drawn")
    assert re.search(message, capsys.readouterr().err)


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

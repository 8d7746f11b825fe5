"""What `sample_clustering` counts and compares; nothing here is timed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import sample_clustering
from benchmarks.sample_clustering_data import read
from benchmarks.sample_clustering_peers import minhash, sort_by_column
from benchmarks.sample_clustering_window import count_window
from benchmarks.workload import Workload
from rowmesh.pipeline.cutter import BatchRows

DATA = Path("../shared/data")
SMALL = Workload(max_rows=5000, global_batch=512, warmup=1, steps=2)


@pytest.mark.parametrize("method", sample_clustering.METHODS.values(), ids=list(sample_clustering.METHODS))
def test_methods_bring_samples_of_one_kind_together(method):
    """Four kinds of samples that share nothing, interleaved."""
    kinds = torch.arange(4).repeat(16)
    keys = torch.stack([kinds, 4 + kinds]).flatten().int()
    rows = BatchRows(keys, keys.bincount().int(), 1, 64)
    order = method(rows, [16] * 4)
    assert order.sort().values.tolist() == list(range(64))
    assert count_window(rows, [16] * 4, order).own == (2, 2, 2, 2)


@pytest.mark.parametrize("source, pooling", [("zipf", 1), ("zipf", 3), ("planted", 1)])
def test_synthetic_batches_have_ids_of_their_tables(source, pooling):
    batch, numbering = read(source, Workload(max_rows=5000, global_batch=64, pooling=pooling), DATA)
    rows = numbering(batch)
    assert (batch.batch_size, batch.num_features, batch.bag_size) == (64, 26, pooling)
    assert 0 <= int(batch.ids.min()) <= int(batch.ids.max()) < 5000
    assert rows.num_rows == sum(len(part.unique()) for part in batch.ids.view(26, -1))


@pytest.mark.parametrize("source, num_features", [("criteo", 26), ("avazu", 23)])
@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_real_batches_keep_every_id(source, num_features):
    batch, numbering = read(source, SMALL, DATA)
    assert (batch.batch_size, batch.num_features) == (512, num_features)
    rows = numbering(batch)
    singles = int((rows.counts == 1).sum())
    assert 0.3 < singles / rows.num_rows < 1  # they would be one row a table if rare ids shared one


def test_equal_samples_sort_stably():
    rows = BatchRows(torch.zeros(8, dtype=torch.int32), torch.tensor([8]).int(), 1, 8)
    for method in (sort_by_column, minhash):
        assert np.array_equal(method(rows, [4, 4]), np.arange(8))


def test_every_exchange_is_reported(capsys, tmp_path):
    sample_clustering.main(
        [
            "--quick",
            "--max-rows",
            "5000",
            "--global-batch",
            "512",
            "--steps",
            "2",
            "--warmup",
            "1",
            "--sources",
            "zipf,criteo",
            "--pooling",
            "1,2",
            "--micro-batches",
            "2,8",
            "--data",
            str(tmp_path),
        ]
    )
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "test.tsv.gz: no such file" in lines.pop()["unavailable"]
    assert {line["case"].split(",")[0] for line in lines} == {"zipf 512", "zipf 512x2", "criteo"}
    zipf = [line for line in lines if line["case"] == "zipf 512, N=8"]
    by_name = {line["contestant"]: line for line in zipf if "closed" in line}
    assert set(by_name) == {"unsplit", "naive", "delta", *sample_clustering.METHODS}
    rows = {name: line["rows"] for name, line in by_name.items()}
    assert rows["delta"] == rows["unsplit"] < rows["rowmesh cluster"] < rows["naive"]
    assert by_name["rowmesh cluster"]["per_8192_ms"] > 0
    shares = {(line["sizes_are"], line["order"]): line["first_fetch_share"] for line in zipf if "order" in line}
    assert shares["chosen", "light ends"] < shares["chosen", "as it comes"] < shares["even", "as it comes"]
    assert last["summary"]["zipf 512, N=8: delta closes"] == 1.0

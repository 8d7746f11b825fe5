"""What the benchmark compares computes the same, and its lengths are those of the data sets."""

import gzip
import json

import pytest
import torch

from benchmarks import sequence_step


def test_lengths_are_drawn_from_the_quantiles():
    data = sequence_step.DATA_SETS["beauty"]
    batch = sequence_step.draw(data, 4000, None, torch.Generator().manual_seed(0))
    assert batch.lengths.float().mean().item() == pytest.approx(7.71, rel=0.05)  # as counted: 8.88, less one, cut at 50
    assert batch.lengths.max() == 50
    assert int(batch.offsets[-1]) == len(batch.items) == len(batch.times)


def test_lengths_are_counted_in_the_data(tmp_path):
    with gzip.open(tmp_path / "events.tsv.gz", "wt") as file:
        file.write("user_id\titem_id\n7\t1\n8\t1\n7\t2\n")
    assert sequence_step.read_lengths(tmp_path / "events.tsv.gz") == [2, 1]


def test_packed_and_padded_are_compared(capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    sequence_step.main(["--quick", "--lengths", "beauty", "--dim", "50"])
    line, summary = (json.loads(each) for each in capsys.readouterr().out.splitlines())
    assert line["ratio"] == summary["summary"]["beauty_2x50"] > 0
    assert 0 < line["embedding_tax"] < 1

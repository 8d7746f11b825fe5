"""`embedding_step` between two hosts, with bags of a file; nothing here is timed."""

import json
import sys

import pytest

from benchmarks import embedding_step
from tests.benchmarks.test_hosts import can_make_hosts

__all__ = ["can_make_hosts"]


@pytest.mark.slow
@pytest.mark.usefixtures("can_make_hosts")
def test_two_hosts(tmp_path, monkeypatch, capsys):
    (tmp_path / "three.json").write_text('{"num_embeddings_per_feature": [500, 90, 4], "multi_hot_sizes": [9, 1, 2]}')
    arguments = ["--bags", str(tmp_path / "three.json"), "--construction", "mlperf", "--hosts", "2"]
    arguments += ["--rate", "100mbit", "--quick", "--steps", "3", "--output", str(tmp_path / "lines")]
    monkeypatch.setattr(sys, "argv", ["embedding_step", *arguments])
    embedding_step.main()
    _, line, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["summary"] == {"dim16_batch1024_three_decided_2_100mbit_collective": None}
    assert line["contestant"] == "rowmesh collective"
    assert line["cable_bytes"] > line["received_bytes"] > 0
    assert line["times_floor"] > 0

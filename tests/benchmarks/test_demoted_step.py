"""Steps above a store: what the ranks count, and what the benchmark says of the store alone."""

import json

import pytest

from benchmarks.command import Report
from benchmarks.demoted_step import _report_alone
from benchmarks.ranks.demoted_step import Commands
from benchmarks.workload import Workload
from rowmesh.mesh import Mesh

SMALL = Workload(max_rows=3000, dim=4, global_batch=64)


@pytest.mark.parametrize("store, moves", [("memory", True), ("", False)])
def test_ids_come_back_and_leave_where_there_is_a_store(store, moves):
    commands = Commands(SMALL, Mesh(), store=store, share=0.25, least_rows=2000, depth=2)
    found = commands.round(1, 4)
    assert (found["promoted"] > 0) == moves
    assert found["promoted"] == found["demoted"], "all ids are known from the start"
    assert found["seconds"]["step"][0] > 0
    commands.close()


def test_a_store_alone_has_a_line(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.demoted_step._ALONE", 2000)
    _report_alone(Report("demoted_step", None), SMALL, "memory", "memory", 2, 30, 20)
    line = json.loads(capsys.readouterr().out)
    assert line["contestant"] == "memory alone"
    assert line["store_ms"] > 0

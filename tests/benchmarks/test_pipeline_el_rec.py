"""What `pipeline --el-rec` makes of what ranks answer, and tables of every storage on a rank; nothing is timed."""

import json

import pytest

from benchmarks import pipeline
from benchmarks.pipeline_el_rec import LOOP, describe, storages_of
from benchmarks.ranks.pipeline import Commands
from benchmarks.workload import CRITEO_KAGGLE, Workload
from rowmesh import Mesh

WORKLOAD = Workload(max_rows=300, dim=4, global_batch=32)


def rounds(*steps_ms):
    """Rounds of one rank, half of whose step is computed."""
    return [
        [
            {
                "seconds": {"step": [ms / 1e3]},
                "parts": {
                    "computed": ms / 2e3,
                    "communication": 0.004,
                    "exposed_communication": 0.003,
                    "retrieval": 0.02,
                    "exposed_retrieval": 0.001 * number,
                },
                "cpu_s": 0.05,
                "tasks": {"rows.0": 0.001, "update.0": 0.003},
                "memory": {"rows": 10},
                "disk": {"rows_read": 7.0},
            }
        ]
        for number, ms in enumerate(steps_ms)
    ]


def test_a_line_has_medians_and_ratios():
    line = describe(rounds(50.0, 90.0, 60.0), rounds(80.0, 78.0, 300.0), rounds(150.0, 150.0, 10.0))
    assert (line["step_ms"], line["over_in_turn"], line["over_server"]) == (60.0, 1.333, 2.5)
    assert (line["computed_ms"], line["loop_ms"], line["exposed_loop_ms"]) == (30.0, 4.0, 3.0)
    assert (line["exposed_loop_share"], line["retrieval_ms"], line["exposed_retrieval_ms"]) == (0.05, 20.0, 1.0)
    assert line["tasks_ms"] == {"rows": 1.0, "update": 3.0}
    assert (line["cpu_ms"], line["memory_bytes"], line["disk"]) == (50.0, {"rows": 10}, {"rows_read": 7.0})


def test_the_largest_tables_are_cores_whatever_the_cap():
    storages = storages_of(Workload(max_rows=20_000), cored=5, dense_rows=10_000)
    cored = [rows for rows, name in zip(CRITEO_KAGGLE, storages, strict=True) if name == "tensor_train"]
    tiered = [rows for rows, name in zip(CRITEO_KAGGLE, storages, strict=True) if name == "tiered"]
    assert min(cored) == 2_202_608
    assert (min(tiered), max(tiered)) == (12_517, 286_181)
    assert "tensor_train" not in storages_of(Workload(), cored=0, dense_rows=0)


def test_a_rank_has_tables_of_every_storage(tmp_path):
    tiers = {"folder": str(tmp_path), "fast_share": 0.5, "fast_rows": 1}
    storages = storages_of(WORKLOAD, cored=2, dense_rows=200)
    commands = Commands(WORKLOAD, Mesh(), tiers, num_batches=4, storages={"tables": storages, "rank": 2})
    for name, options in {"in turn": {"depth": 0, "overlap": False}, "ahead": {"depth": 2}}.items():
        commands.make(name, 4, **options)
        answer = commands.round(name, 1, 3, messages=LOOP)
        parts = answer["parts"]
        assert 0 < parts["exposed_communication"] <= parts["communication"] <= answer["seconds"]["step"][0]
        assert answer["disk"]["pins"] == pytest.approx(1.0, abs=0.7)
        commands.drop(name)
    commands.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command(capsys):
    pipeline.main(["--el-rec", "--quick"])
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["contestant"] for line in lines] == ["parameter server", "in turn", "K=1", "K=2"]
    assert lines[0]["tables"] == {"tiered": 26}
    assert {name for line in lines[1:] for name in line["tables"]} == {"tensor_train", "tiered", "dense"}
    assert len(last["summary"]) == 4

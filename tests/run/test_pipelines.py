"""Runs through a pipeline, and runs whose tables are in tiers."""

import json

import pytest

from rowmesh.pipeline.recorder import Totals
from rowmesh.run import steps
from rowmesh.run.commands import run_evaluation

COLLECTIVE = ["parallel.transport=collective", "tables.dtype=float64"]


def test_a_pipeline_trains_the_same_model(train, tmp_path):
    plain = train("plain", *COLLECTIVE)
    ahead = train("ahead", *COLLECTIVE, "pipeline.depth=2", "pipeline.verify=true", "train.eval_every=3")
    assert ahead.metrics == plain.metrics  # to the bit
    assert "pipeline  rows and gradients travel by micro-batch (delta)" in ahead.out
    parts = train("parts", *COLLECTIVE, "pipeline.depth=1", "pipeline.micro_batches=3", "pipeline.trace=true")
    assert parts.metrics == pytest.approx(plain.metrics, abs=1e-9)
    exposed = [line["exposed_share"] for line in parts.log if line["kind"] == "train"]
    assert exposed
    assert all(0 <= share <= 1 for share in exposed)
    events = json.loads((tmp_path / "parts" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {"rows", "final", "gradients", "update"} <= {event["name"] for event in events}


def test_auto_says_what_it_chose(train):
    run = train("auto", *COLLECTIVE, "pipeline.depth=auto", "pipeline.micro_batches=auto", "train.epochs=5")
    assert "pipeline  off: " in run.out or "ms a step expected" in run.out


def test_what_is_waited_for_in_turn_is_counted_once():
    """By the stages that do it."""
    totals = Totals({"compute": 4.0, "rows": 2.0, "wait": 2.0}, {"compute": 3.0, "rows": 1.0, "wait": 0.5})
    assert steps._per_step(totals, 2) == ({"compute": 2.0, "rows": 1.0}, {"compute": 1.5, "rows": 0.5})


def test_a_run_that_is_too_short_to_measure_says_so(train):
    run = train("short", *COLLECTIVE, "pipeline.depth=auto", "train.steps=5")
    assert "pipeline  off: 5 steps are too few to measure the first 24 and choose" in run.out


def test_light_ends_follow_what_was_measured(train):
    """Even sizes are never asked for; the model is the same."""
    plain = train("plain", *COLLECTIVE, "train.epochs=4")
    light = ["pipeline.depth=1", "pipeline.micro_batches=3", "pipeline.sizes=light_ends"]
    run = train("light", *COLLECTIVE, *light, "pipeline.communication_share=auto", "train.epochs=4")
    assert "pipeline  depth 1, 3 micro-batch(es): " in run.out
    assert run.metrics == pytest.approx(plain.metrics, abs=1e-9)


def test_whole_rows_say_why(train):
    run = train("whole", "parallel.transport=one_sided", "pipeline.depth=1")
    assert "travel whole: the transport is one_sided, which reads rows in place" in run.out


def test_tiers_train_the_same_model(train, tmp_path):
    (tmp_path / "rows").mkdir()
    plain = train("plain", *COLLECTIVE)
    tiers = ["tables.storage=tiered", f"tiers.folder={tmp_path / 'rows'}", "tiers.fast_rows=150", "pipeline.depth=1"]
    tiered = train("tiered", *COLLECTIVE, *tiers, "train.eval_every=3")  # for which no batch is ahead: it fits so
    assert tiered.metrics == plain.metrics
    assert "owners prefetch the rows that they are asked for into fast memory" in tiered.out
    assert list((tmp_path / "rows").iterdir()) == []
    lines = [json.loads(line) for line in (tmp_path / "tiered" / "counters.jsonl").read_text().splitlines()]
    fast = [line for line in lines if line["group"].endswith(", fast memory")]
    # How much is handed on or written back by then depends on when threads run; tests/tables/test_cached.py counts it.
    assert sum(line["rows_found"] for line in fast) > 0
    assert all(line["rows_found"] >= line["rows_forwarded"] >= 0 for line in fast)
    assert all(line["bytes_written"] >= line["rows_written"] >= 0 for line in fast)
    alone = run_evaluation(tmp_path / "tiered", ["tiers.fast_rows=300"])  # on one rank, whose batches are larger
    assert alone.auc == pytest.approx(plain.metrics["auc"], abs=1e-9)

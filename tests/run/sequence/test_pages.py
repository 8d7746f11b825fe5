"""`rowmesh plan` and `rowmesh report` of sequence models."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rowmesh.cli.__main__ import main
from rowmesh.placement import Plan
from rowmesh.report.run_page import run_report
from rowmesh.report.run_record import read_run
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from tests.report.test_plan_page import Page
from tests.support.commands import run_on


def command(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(each) for each in arguments])
    return stop.value.code


def test_a_plan_is_made_from_the_counts_of_events_and_trained_by(ranks, sequence_file, events, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    wanted = ("--ranks", 2, "--strategy", "partitioned", "--extra-memory", 0.3, "--out", plan)
    assert command("plan", sequence_file, *wanted, "--explain", "item:0") == 0
    out = capsys.readouterr().out
    starts = np.maximum(events.offsets[:-1], events.train_ends - 1 - 16)
    count = sum(int((events.items[a:b] == 0).sum()) for a, b in zip(starts, events.train_ends - 1, strict=True))
    assert f"read     {count + 97 / 32:,.6g} times in 97 samples" in out  # and scored in every step
    assert Plan.load(plan).world_size == 2
    losses = {}
    for name, options in {"planned": [f"placement.plan={plan}"], "cyclic": []}.items():
        more = ["train.epochs=1", "parallel.transport=collective", *options, f"run.folder={tmp_path / name}"]
        done = run_on(ranks, ["train", str(sequence_file), *more], ranks=2)
        assert done.status == 0, done.err
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    assert losses["planned"] == losses["cyclic"]  # to the bit


def test_the_page_of_a_run_shows_how_it_ranks(sequence_file, events, tmp_path):
    metrics = run_training(resolve(sequence_file))
    one = " ".join(Page(run_report([read_run(tmp_path / "run")])).texts)
    assert metrics is not None
    numbers = metrics.as_record()
    best = events.optimum["test"]["ndcg@10"]
    assert f"NDCG@10 {numbers['ndcg@10']:.5f} on test, of {best:.5f} that can be reached" in one
    for text in ("NDCG@10, validation", "HR@10, validation", "MRR, validation", "test, popularity", "95 % interval"):
        assert text in one
    for text in ("AUC", "base rate", "score bins", "ROC"):
        assert text not in one
    two = " ".join(Page(run_report([read_run(tmp_path / "run")] * 2)).texts)
    assert "HR@10" in two

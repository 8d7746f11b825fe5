"""Windows of training steps have metrics of predictions that were made before the steps."""

import json

import pytest

from tests.support.clicks import write_config


@pytest.mark.parametrize("options", [[], ["pipeline.depth=1", "pipeline.micro_batches=2"]], ids=["plain", "pipeline"])
def test_windows_of_any_number_of_ranks(clicks, tmp_path, command, options):
    path = write_config(tmp_path / "clicks.toml", tmp_path / "run", clicks.folder, "[train]", "steps = 11")
    found = []
    for ranks in (1, 2):
        run = tmp_path / f"run{ranks}"
        more = [f"run.folder={run}", "train.progressive_every=4", "train.log_every=4", "tables.dtype=float64", *options]
        done = command(["train", str(path), *more], ranks=ranks)
        assert done.status == 0, done.err
        found.append([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    one, two = ([line for line in lines if line["kind"] == "progressive"] for lines in found)
    assert [line["step"] for line in one] == [4, 8]
    losses = [line["loss"] for line in found[0] if line["kind"] == "train"]  # before each update, too
    for line, other, loss in zip(one, two, losses, strict=False):
        assert line["log_loss"] == pytest.approx(loss, abs=1e-6)
        assert other["log_loss"] == pytest.approx(line["log_loss"], abs=1e-6)
        assert other["auc"] == pytest.approx(line["auc"], abs=1e-4)
        assert {"normalized_entropy", "calibration", "base_rate", "samples"} <= line.keys()

"""configs/train.sh, which `make train` calls: it reuses data that are what is asked for, and says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rowmesh.data import DataSource, PlantedConfig, synthesize

SCRIPT = Path(__file__).parents[1] / "configs" / "train.sh"
# Prepares with the real command and prints the others, which would train.
STAND_IN = f"""#!/bin/sh
case "$*" in
    *torch.distributed.run*) echo "$@" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def train(tmp_path):
    """Runs the script; with `ranks=0` a stand-in takes the place of training."""
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)

    def run(ranks=0, **variables):
        settings = {
            "PYTHON": sys.executable if ranks else stand_in,
            "RANKS": ranks or 2,
            "RUN": tmp_path / "run",
            "STORE": tmp_path / "store",
        }
        environment = os.environ | {name: str(value) for name, value in (settings | variables).items()}
        return subprocess.run(
            ["bash", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.fixture
def raw(tmp_path):
    """A small file of raw Criteo rows."""
    synthesize(tmp_path / "raw", {"train": 2_000}, PlantedConfig(max_rows=50), file_format="text")
    (path,) = DataSource.find([tmp_path / "raw"]).files["train"]
    return path


def test_from_raw_rows_to_an_evaluated_model(train, raw, tmp_path):
    done = train(ranks=2, DATA=raw, ARGS="tables.dim=4 train.steps=5 model.bottom=[8] model.top=[8]")
    assert done.returncode == 0, done.stderr
    assert "AUC" in done.stdout
    assert json.loads((tmp_path / "run" / "evaluation" / "test.json").read_text())["split"] == "test"


def test_prepared_data_are_reused_until_something_changes(train, raw):
    first = train(DATA=raw)
    assert first.returncode == 0, first.stderr
    assert "reused /" not in first.stdout
    assert "data.batch_size=64" in first.stdout  # of 1,600 samples
    assert "reused /" in train(DATA=raw).stdout
    with raw.open("a") as file:
        file.write("5\n")
    again = train(DATA=raw)
    assert "again: files.train.1 was" in again.stdout
    assert "bad rows: 1" in again.stdout
    assert "reused /" in train(DATA=raw).stdout


def test_drawn_data_are_reused_until_something_changes(train):
    first = train(SAMPLES=1000)
    assert first.returncode == 0, first.stderr
    second = train(SAMPLES=1000).stdout
    assert second.count("reused /") == 2
    third = train(SAMPLES=1200).stdout
    assert "raw again: samples.train was 1000, is 1200" in third
    assert "criteo again: files.train.1 was" in third


def test_files_that_would_not_be_read_are_named(train, raw):
    raw.with_name("dev.tsv").touch()
    done = train(DATA=raw.parent)
    assert done.returncode == 2
    assert "dev.tsv would not be read" in done.stderr

"""configs/train.sh, which `make train` calls: it reuses data that are what is asked for, and says so."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rowmesh.cli.__main__ import main
from rowmesh.data import DataSource, PlantedConfig, synthesize

SCRIPT = Path(__file__).parents[1] / "configs" / "train.sh"
# Has this process do what `python -m rowmesh.cli` would, after seconds of imports; $TRAIN trains, or prints what would.
STAND_IN = """#!/usr/bin/env bash
case "$*" in
    *torch.distributed.run*) "$TRAIN" "$@"; exit ;;
    "-m rowmesh.cli "*) ;;
    *) exec {python} "$@" ;;
esac
exec 3<>/dev/tcp/127.0.0.1/{port}
printf '%s\\n' "${{@:3}}" "" >&3
read -r status <&3
cat {folder}/out
cat {folder}/err >&2
exit "$status"
"""


class CommandServer:
    """Runs the commands that stand-ins ask for, one after the other.

    Attributes:
        stand_in: takes the place of `python`.
    """

    def __init__(self, folder):
        self._folder = folder
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.01)
        self.stand_in = folder / "python"
        port = self._listener.getsockname()[1]
        self.stand_in.write_text(STAND_IN.format(python=sys.executable, port=port, folder=folder))
        self.stand_in.chmod(0o755)

    def serve(self, process):
        """Until the process has ended; returns its output."""
        while process.poll() is None:
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                connection.settimeout(None)
                with connection, connection.makefile("rw", encoding="utf-8") as file:
                    arguments = list(iter(lambda: file.readline().rstrip("\n"), ""))
                    file.write(f"{self._run(arguments)}\n")
        return process.communicate()

    def _run(self, arguments):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
            main(arguments)
        (self._folder / "out").write_text(out.getvalue())
        (self._folder / "err").write_text(err.getvalue())
        return stop.value.code or 0

    def close(self):
        self._listener.close()


@pytest.fixture
def train(tmp_path):
    """Runs the script; its commands run here, and training under torchrun, or not at all with `ranks=0`."""
    server = CommandServer(tmp_path)

    def run(ranks=0, **variables):
        settings = {
            "PYTHON": server.stand_in,
            "TRAIN": sys.executable if ranks else "echo",
            "RANKS": ranks or 2,
            "RUN": tmp_path / "run",
            "STORE": tmp_path / "store",
            "TMPDIR": tmp_path,  # where torchrun leaves a folder
        }
        environment = os.environ | {name: str(value) for name, value in (settings | variables).items()}
        process = subprocess.Popen(
            ["bash", SCRIPT], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        out, err = server.serve(process)
        return subprocess.CompletedProcess("train.sh", process.returncode, out, err)

    yield run
    server.close()


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
    assert "train configs/own.toml data.folder=" in first.stdout
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
    assert "train configs/criteo.toml data.folder=" in second
    third = train(SAMPLES=1200).stdout
    assert "raw again: samples.train was 1000, is 1200" in third
    assert "criteo again: files.train.1 was" in third


def test_a_model_of_another_kind_leaves_the_run_that_is_there(train, tmp_path):
    ratings = tmp_path / "ratings.dat"
    ratings.write_text("".join(f"{user}::{item}::5::{item}\n" for user in range(9) for item in range(9)))
    assert " run.folder=runs/make_train_hstu " in train(DATA=ratings, MODEL="hstu", RUN="").stdout
    (tmp_path / "mine" / "model").mkdir(parents=True)
    assert (
        f"replaces  the run in {tmp_path / 'mine'}" in train(SAMPLES=1000, HELD_OUT=1000, RUN=tmp_path / "mine").stdout
    )


def test_files_that_would_not_be_read_are_named(train, raw):
    raw.with_name("dev.tsv").touch()
    done = train(DATA=raw.parent)
    assert done.returncode == 2
    assert "dev.tsv would not be read" in done.stderr

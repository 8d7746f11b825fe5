"""Training runs as processes of their own: alone or under torchrun, watched and disturbed from outside."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from rowmesh.data import PlantedConfig
from tests.support.clicks import prepare_clicks, write_config

LONG = ["train.epochs=100000", "train.log_every=1"]
BATCH_SIZE = 128


def prepare_run(folder: Path) -> Path:
    """Draws a small data set; returns the path of a configuration that trains on it into the folder `run`."""
    planted = PlantedConfig(num_rows=(50, 7, 300), head=10, bag_sizes={2: 3})
    data = prepare_clicks(folder, {"train": 4 * BATCH_SIZE, "test": 100}, planted)
    return write_config(folder / "clicks.toml", folder / "run", data.folder, batch_size=BATCH_SIZE)


def start(
    config_file: Path, *options: str, ranks: int = 0, faults: str = "", launcher: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """`rowmesh train`, alone or under torchrun, which may have options of its own, with faults."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *launcher]
    environment = {"OMP_NUM_THREADS": "1", "ROWMESH_FAULTS": faults}
    return subprocess.Popen(
        [*command, "-m", "rowmesh.cli", "train", str(config_file), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment | {"TMPDIR": str(config_file.parent)},  # torchrun leaves a folder there
        start_new_session=True,
    )


def wait_for_steps(process: subprocess.Popen[str], metrics: Path, timeout_s: float = 120.0, count: int = 2) -> None:
    """Until a run has logged so many steps."""
    deadline = time.monotonic() + timeout_s
    while not (metrics.exists() and metrics.read_text().count("\n") >= count):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rank_processes(process: subprocess.Popen[str]) -> dict[str | None, psutil.Process]:
    """The processes of torchrun by their rank."""
    ranks = {}
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):  # a child of a moment, which is gone again
            ranks[child.environ().get("RANK")] = child
    return ranks

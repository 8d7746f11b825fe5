"""A small planted data set and ways to run commands on it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rowmesh.data import Prepared, prepare
from rowmesh.data.inputs import DataSource
from rowmesh.data.planted import PlantedConfig
from rowmesh.data.synthetic import synthesize

BATCH_SIZE = 256


@dataclass(frozen=True)
class Finished:
    """What a command left."""

    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _one_thread():
    """Small batches do not gain from more, and torch's threads spin where cores are few."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def clicks(tmp_path_factory) -> Prepared:
    """Five tables, one of them multi-hot; the last training batch has one sample, so one of two ranks has none."""
    folder = tmp_path_factory.mktemp("clicks")
    planted = PlantedConfig(num_rows=(50, 7, 300, 40, 3), head=10, bag_sizes={2: 3})
    samples = {"train": 7 * BATCH_SIZE + 1, "validation": 300, "test": 501}
    synthesize(folder / "raw", samples, planted)
    source = DataSource.find([folder / "raw"], None, validation=(), test=())
    return prepare(source.files, folder / "prepared", source.schema, optimum=source.optimum)


@pytest.fixture
def config_file(clicks, tmp_path) -> Path:
    path = tmp_path / "clicks.toml"
    path.write_text(
        f"""
        [run]
        folder = "{tmp_path / "run"}"
        [data]
        folder = "{clicks.folder}"
        batch_size = {BATCH_SIZE}
        [model]
        bottom = [8]
        top = [16]
        [tables]
        dim = 4
        optimizer.lr = 0.05
        [train]
        epochs = 2
        log_every = 5
        """
    )
    return path


def run_command(arguments: list[str], *, ranks: int = 0, timeout_s: float = 90.0) -> Finished:
    """Runs `rowmesh` in a process of its own, or under torchrun where `ranks` are given."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "rowmesh.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def command():
    """`run_command`, for tests."""
    return run_command

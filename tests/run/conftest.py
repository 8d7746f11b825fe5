"""A small planted data set and ways to run commands on it."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rowmesh.data import PlantedConfig, Prepared
from tests.support.clicks import prepare_clicks, write_config
from tests.support.commands import run_on

BATCH_SIZE = 256


@dataclass(frozen=True)
class Trained:
    """What a training run left: its output, metrics of the test split, and the lines of its metrics and counters."""

    out: str
    metrics: dict[str, float]
    log: list[dict[str, Any]]
    counters: list[dict[str, Any]]

    @property
    def losses(self) -> list[float | None]:
        """Of each line of the metrics."""
        return [line.get("loss") for line in self.log]


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
    return prepare_clicks(folder, samples, planted)


@pytest.fixture
def config_file(clicks, tmp_path) -> Path:
    more = ("optimizer.lr = 0.05", "[train]", "epochs = 2", "log_every = 5")
    return write_config(tmp_path / "clicks.toml", tmp_path / "run", clicks.folder, *more, batch_size=BATCH_SIZE)


@pytest.fixture(scope="session")
def command(ranks):
    """Runs `rowmesh` on ranks."""
    return partial(run_on, ranks)


@pytest.fixture
def train(config_file, tmp_path, command):
    """Trains for one epoch on two ranks, in 64 bits, into a folder of the given name."""

    def train(name, *options):
        folder = tmp_path / name
        arguments = ["train", str(config_file), "tables.dtype=float64", "train.epochs=1", f"run.folder={folder}"]
        done = command([*arguments, *options], ranks=2)
        assert done.status == 0, done.err
        metrics = json.loads((folder / "evaluation" / "test.json").read_text())
        return Trained(
            done.out,
            {name: value for name, value in metrics.items() if isinstance(value, float)},
            _json_lines(folder / "metrics.jsonl"),
            _json_lines(folder / "counters.jsonl"),
        )

    return train


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]

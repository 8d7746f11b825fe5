"""What `tests.support.lives` imports before it forks ranks: all that training needs, with kernels from a little of it.

Importing it trains for two steps. Kernels that several ranks need besides are loaded by each.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path

import torch
import torch._dynamo  # torch.optim imports it at its first use

import rowmesh.mesh.device_group  # noqa: F401  imported late by a run
from rowmesh.cli.__main__ import main
from rowmesh.data import PlantedConfig
from tests.support.clicks import prepare_clicks, write_config


def train_a_little() -> None:
    """Loads kernels; leaves nothing."""
    samples = {"train": 128, "test": 64}
    with tempfile.TemporaryDirectory(prefix="rowmesh-warm-") as name, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(name)
        data = prepare_clicks(folder, samples, PlantedConfig(num_rows=(50, 7, 300), head=10, bag_sizes={2: 3}))
        config = write_config(folder / "clicks.toml", folder / "run", data.folder, batch_size=64)
        with contextlib.suppress(SystemExit):
            main(["train", str(config), "checkpoint.every_steps=1", "train.epochs=1"])


os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
train_a_little()

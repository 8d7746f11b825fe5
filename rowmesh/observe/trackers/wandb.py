"""Weights & Biases, an extra: `pip install '.[wandb]'`.

Project, entity and mode are those of its own variables (`WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_MODE=offline`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module

from rowmesh.observe.trackers import TrackedRun, Tracker


class WandB:
    """A run of Weights & Biases; numbers are named KIND/NAME."""

    def __init__(self, run: TrackedRun) -> None:
        project = os.environ.get("WANDB_PROJECT", "rowmesh")
        identity = {"id": run.id, "resume": "allow"} if run.id else {}
        self._run = import_module("wandb").init(project=project, name=run.name, config=dict(run.config), **identity)

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Logs a record; an evaluation has the step of the training line before it."""
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        """Ends the run, and waits until it is sent."""
        self._run.finish()


def start(run: TrackedRun) -> Tracker:
    """Begins to track a run."""
    return WandB(run)

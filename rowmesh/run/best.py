"""The best model of a run: kept in its folder while training goes on, and taken back at its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rowmesh import checkpoint
from rowmesh.checkpoint import CheckpointWriteError
from rowmesh.checkpoint.together import on_every_rank
from rowmesh.run.job import Job
from rowmesh.run.run_folder import RunFolder

KEEPING = "keeping the best model"


@dataclass
class BestModel:
    """Writes the model whenever an evaluation finds it better than before, over the one before.

    Memory holds no second model: rows may fill it. A disk without room ends no run: then the last model that could be
    written is the one that is taken back, if there is any.

    Attributes:
        kept_step: after which step the model is that was written last; 0: none was.

    Args:
        job: whose model.
        run: the folder.
        log: prints a line for the user.
    """

    job: Job
    run: RunFolder
    log: Callable[[str], None]
    kept_step: int = 0

    def keep(self, step: int, state: dict[str, Any]) -> None:
        """Writes the model as it is. Collective: every rank calls it, with nothing under way."""
        try:
            checkpoint.save(
                self.run.best, self.job.embeddings, state, metadata={"steps": step}, peers=self.job.mesh.peers
            )
        except CheckpointWriteError as error:
            kept = f"that of step {self.kept_step} stays" if self.kept_step else "none is kept"
            self.log(f"the best model, of step {step}, cannot be written, {kept}: {error}")
        else:
            self.kept_step = step

    def take_back(self) -> dict[str, Any]:
        """Puts the kept rows and their state into the tables; returns the state of the rest. Collective."""
        self.job.embeddings.barrier()
        read = partial(checkpoint.load, self.run.best, self.job.embeddings)
        state = on_every_rank(self.job.mesh.peers, read, KEEPING)
        self.job.embeddings.barrier()
        return state


def remove_best(*runs: RunFolder) -> None:
    """Once the model is where it stays, in whatever folder the run began and ended. On rank 0."""
    for run in runs:
        shutil.rmtree(run.best, ignore_errors=True)

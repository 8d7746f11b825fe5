"""The section `[checkpoint]`: when a run writes all that its next step depends on, and where."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rowmesh.checkpoint.writer import Rules
from rowmesh.run.section import AUTO, Auto, Count, Folder, Positive, Section

RULES = Rules()


class CheckpointConfig(Section):
    """Checkpoints while training goes on; without `every_steps` and `every_minutes` there are none.

    Attributes:
        every_steps: steps between two checkpoints; 0: none by steps.
        every_minutes: minutes between two checkpoints, by the clock of rank 0; 0: none by time.
        keep_last, keep_every, asynchronous, incremental: see `rowmesh.checkpoint.writer.Rules`.
        copy_bytes: as there, with `asynchronous`, and auto in the place of None; with less than the rows take, steps
            save more of them before they update them.
        folder: where they are; empty: `checkpoints` in the run's folder.
        on_failure: what a checkpoint that cannot be written does: a line, and training goes on (continue), or the run
            ends (stop).
        grace_s: seconds after SIGTERM or SIGUSR1 within which a checkpoint is written and the run ends.
    """

    every_steps: Count = 0
    every_minutes: Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)] = 0.0
    keep_last: Positive = RULES.keep_last
    keep_every: Count = RULES.keep_every
    asynchronous: bool = RULES.asynchronous
    copy_bytes: Annotated[int, Field(ge=0, lt=2**63)] | Auto = AUTO
    incremental: Count = RULES.incremental
    folder: Folder = ""
    on_failure: Literal["continue", "stop"] = "continue"
    grace_s: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] = 25.0

    @property
    def is_on(self) -> bool:
        """Whether there are any."""
        return bool(self.every_steps or self.every_minutes)

    @model_validator(mode="after")
    def _is_of_some(self) -> Self:
        given = [key for key in ("asynchronous", "incremental") if getattr(self, key)]
        if given and not self.is_on:
            raise ValueError(
                f"{', '.join(given)}: there are no checkpoints without every_steps or every_minutes; give one of them, "
                "or leave it out"
            )
        return self

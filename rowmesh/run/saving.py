"""Writing the model at the end of a run, so that nothing trained is lost to a full disk or a folder that is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rowmesh import checkpoint
from rowmesh._support.faults import reach
from rowmesh._support.files.advice import described, may_pass
from rowmesh.checkpoint import CheckpointError, CheckpointWriteError
from rowmesh.mesh.together import on_rank_0
from rowmesh.run.config import RunConfig
from rowmesh.run.job import Job
from rowmesh.run.run_folder import FIRST_PLAN, PLAN, Claim, RunFolder

SAVING = "saving the model"
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 10.0


def save_model(job: Job, claim: Claim, state: dict[str, Any], metadata: dict[str, Any]) -> RunFolder:
    """Writes the model and what is needed to load it; returns the folder of the run that has it.

    Where that is refused, it is tried in `run.fallback_folder`, and again for `run.retry_s` seconds. Collective and
    blocking: every rank calls it, and all come to the same end.

    Args:
        job: whose rows to write.
        claim: the folder of the run; rank 0 has taken it.
        state: of the network and the optimizers.
        metadata: of the model.

    Raises:
        CheckpointWriteError, OSError: time is up; the model is nowhere.
        RowmeshError: it cannot be written for a reason that room would not mend.
    """
    config, plans = job.config.run, _plans(job)
    places: list[Callable[[], RunFolder]] = [lambda: claim.settle(plans)]
    if config.fallback_folder:
        places.append(lambda: claim.settle_elsewhere(Path(config.fallback_folder), plans))
    patience = _Patience(config, claim.log, job.mesh.timeout_s)
    while True:
        reasons: list[OSError | CheckpointError] = []
        for place in places:
            try:
                run = _write(job, place, state, metadata)
                if place is places[0]:
                    return on_rank_0(job.mesh, SAVING, claim.finish, RunFolder)
            except (OSError, CheckpointError) as error:  # whatever it is, another place may do
                reasons.append(error)
            else:
                claim.log(f"model     goes to run.fallback_folder: {_text(reasons[0])}")
                return run
        if not any(isinstance(reason, CheckpointWriteError) or may_pass(reason) for reason in reasons):
            raise reasons[0]
        on_rank_0(job.mesh, SAVING, lambda reasons=reasons: patience.wait(reasons))


def _write(job: Job, place: Callable[[], RunFolder], state: dict[str, Any], metadata: dict[str, Any]) -> RunFolder:
    run = on_rank_0(job.mesh, SAVING, place, RunFolder)
    reach("run.saving", run.model)
    checkpoint.save(run.model, job.embeddings, state, metadata=metadata, peers=job.mesh.peers)
    return run


def _plans(job: Job) -> dict[str, str]:
    """The plan that drift came to, and the one that the training began with; nothing where they are the same."""
    if not job.embeddings.engine.num_migrations:  # the plan of dynamic tables has frames for rows from the start
        return {}
    return {FIRST_PLAN: job.placement.plan.to_json(), PLAN: job.embeddings.plan.to_json()}


@dataclass
class _Patience:
    """How long rank 0 waits for room, for all."""

    config: RunConfig
    log: Callable[[str], None]
    timeout_s: float
    _delay_s: float = _FIRST_DELAY_S
    _deadline_s: float | None = field(default=None, init=False)

    def wait(self, reasons: Sequence[OSError | CheckpointError]) -> None:
        """Waits before the next try; raises CheckpointWriteError where time is up."""
        now_s, reason = time.monotonic(), "; ".join(_text(each) for each in reasons)
        if self._deadline_s is None:
            self._deadline_s = now_s + self.config.retry_s
            if self.config.retry_s:
                self.log(
                    f"model     cannot be written: {reason}\n          it is kept in memory, and tried again for "
                    f"{self.config.retry_s:,g} s (run.retry_s); Ctrl-C gives it up"
                )
        if now_s >= self._deadline_s:
            tried = f", tried for {self.config.retry_s:,g} s (run.retry_s)" if self.config.retry_s else ""
            raise CheckpointWriteError(f"the model is not written{tried}: {reason}")
        reach("run.wait")
        time.sleep(min(self._delay_s, self._deadline_s - now_s, self.timeout_s / 4))  # the other ranks wait, too
        self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)


def _text(error: OSError | CheckpointError) -> str:
    return described(error) if isinstance(error, OSError) else str(error)

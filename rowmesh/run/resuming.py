"""Resuming a run: where it goes on, and whether it may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from rowmesh import checkpoint
from rowmesh._support.faults import reach
from rowmesh._support.json_lines import cut_after
from rowmesh.checkpoint import CheckpointError
from rowmesh.checkpoint.manifest import MANIFEST
from rowmesh.checkpoint.owned import BEST
from rowmesh.checkpoint.series import Series, verify
from rowmesh.checkpoint.together import on_every_rank
from rowmesh.errors import ConfigurationError, DamagedCheckpointError, RowmeshError, UnreadableError
from rowmesh.mesh import Mesh
from rowmesh.mesh.together import on_rank_0
from rowmesh.placement import Plan
from rowmesh.run.checkpoints import restore_best, series_of
from rowmesh.run.config import Config
from rowmesh.run.job import Job
from rowmesh.run.placement import Placement, configured_placement, shapes_of
from rowmesh.run.resolve import anchored, resolve, validate
from rowmesh.run.run_folder import Claim, RunFolder
from rowmesh.run.same_model import model_differences
from rowmesh.run.table_data import TableData
from rowmesh.run.task import Task

Resume = Literal["no", "latest", "auto"]
"""The use of the checkpoints in a run's folder. "no": none; "latest" and "auto": the run goes on from the newest. Where
there is no checkpoint, "latest" refuses the run, and "auto" begins it."""
RESUMING = "resuming the run"


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        steps: of the checkpoints that it may go on from, the newest first; none: at its first step.
        is_finished: there is nothing to do.
        plan: of the newest checkpoint, where the run is to be placed as it was; else empty.
    """

    steps: tuple[int, ...] = ()
    is_finished: bool = False
    plan: str = ""

    def to_plain(self) -> list[Any]:
        """To be sent to other ranks."""
        return [list(self.steps), self.is_finished, self.plan]

    @classmethod
    def from_plain(cls, values: Any) -> Self:
        """From what another rank sent."""
        steps, is_finished, plan = values
        return cls(tuple(steps), is_finished, plan)


def find_start(claim: Claim, config: Config, data: TableData, resume: Resume, *, overwrite: bool) -> Start:
    """Looks at what is in a run's folder; on rank 0.

    Args:
        claim: of the folder.
        config: of this run, with its defaults chosen.
        data: of this run.
        resume: what it is to do with checkpoints.
        overwrite: whether a finished run may be replaced.

    Raises:
        RowmeshError: there is no checkpoint, and there must be one; or those that are there are of another model.
    """
    run = claim.unfinished
    series = series_of(config, run)
    if resume == "no":
        if config.checkpoint.folder and series.steps() and not overwrite:
            raise RowmeshError(
                f"{series.folder} holds checkpoints of another run; give --resume to go on with it, another "
                "checkpoint.folder=…, or --overwrite to remove them"
            )
        return Start()
    replaces = overwrite and resume == "auto"
    if replaces and run.is_whole and claim.has_completed:  # it may be this command's, which was killed
        replaces = bool(model_differences(resolve(run.config), config))
    if run.is_whole and not replaces:
        _check_same(resolve(run.config), config, f"the run in {run.path}")
        return Start(is_finished=True)
    steps = [] if run.is_whole else series.steps()[::-1]
    if not steps:
        if resume == "auto":
            return Start()
        raise RowmeshError(
            f"there is no checkpoint in {series.folder} to resume from; give --resume auto to begin where there is "
            "none, or leave it out"
        )
    folder, metadata = _newest_that_reads(series, steps)
    before = _config_of(metadata, folder)
    _check_same(before, config, f"the checkpoint {folder}", may_grow=True)
    if metadata["identity"] != data.identity:
        raise RowmeshError(
            f"the checkpoint {folder} was trained on other data, those in {metadata['data']} at that time; "
            f"{data.place} has others. Give the same data, or train anew without --resume"
        )
    return Start(tuple(steps), plan=metadata["plan"] if _is_placed_alike(before, anchored(config)) else "")


def _newest_that_reads(series: Series, steps: Sequence[int]) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint whose manifest is not damaged, and what that says; `load_newest` passes over the others."""
    reasons: list[str] = []
    for step in steps:
        try:
            return series.at(step), checkpoint.read_manifest(series.at(step)).metadata
        except DamagedCheckpointError as error:
            reasons.append(str(error))
    raise CheckpointError("; ".join(reasons))


def resumed_placement(task: Task, mesh: Mesh, start: Start) -> Placement:
    """The plan of the checkpoint, where it is wanted and fits the ranks; else the one that the configuration asks for.

    Raises:
        ConfigurationError: that one cannot be read or made.
    """
    if start.plan:
        plan = Plan.from_json(start.plan)
        try:
            plan.check_fits(shapes_of(task.config, task.data), mesh.world_size, mesh.ranks_per_node)
        except ConfigurationError:
            return configured_placement(task, mesh)
        return Placement(plan, "as in the checkpoint")
    return configured_placement(task, mesh)


def load_newest(job: Job, run: RunFolder, steps: tuple[int, ...], log: Callable[[str], None]) -> dict[str, Any]:
    """Reads the newest checkpoint that is not damaged, and takes the run's folder back to its step.

    Collective and blocking: every rank calls it, and reads the rows that it holds.

    Args:
        job: whose rows to set.
        run: where the run writes.
        steps: of the checkpoints, the newest first.
        log: prints a line for the user.

    Returns:
        The state that was saved beside the rows.

    Raises:
        CheckpointError: all of them are damaged; the message says how. Or an undamaged checkpoint does not fit, or the
            system refused to read it, which does not show damage: none is removed.
    """
    reasons: list[str] = []
    series = series_of(job.config, run)
    for step in steps:
        job.embeddings.barrier()
        try:
            state = on_every_rank(job.mesh.peers, partial(_read, job, series.at(step)), RESUMING)
        except UnreadableError as error:
            raise UnreadableError(f"{error}. No checkpoint was removed: mend that, and start again") from None
        except DamagedCheckpointError as error:
            reasons.append(str(error))
            if step != steps[-1]:
                log(f"resume    not from step {step:,}: {error}")
            continue
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot go on from {series.at(step)}, which is not damaged: {error}. No checkpoint was removed"
            ) from error
        job.embeddings.barrier()
        reach("resume.loaded", series.at(step))
        go_back = partial(_go_back, run, series, step, has_best=bool(state["progress"]["best_step"]))
        on_rank_0(job.mesh, RESUMING, go_back)
        return state
    raise CheckpointError("; ".join(reasons))


def _read(job: Job, folder: Path) -> dict[str, Any]:
    state = checkpoint.load(folder, job.embeddings)
    if job.mesh.rank == 0 and state["progress"]["best_step"]:
        if not (folder / BEST / MANIFEST).exists():
            raise DamagedCheckpointError(f"{folder / BEST}, the best model by then, is missing")
        verify(folder / BEST)  # read at the end of training, when it would be too late
    return state


def _go_back(run: RunFolder, series: Series, step: int, *, has_best: bool) -> None:
    """Cuts off what the run wrote after the step; what is interrupted here is done again by the next one to resume."""
    for path in (run.metrics, run.counters):
        reach("resume.cut", path)
        cut_after(path, step)
    restore_best(run, series.at(step) / BEST if has_best else None)
    series.remove_after(step)


def _config_of(metadata: dict[str, Any], folder: Path) -> Config:
    if metadata.get("kind") != "checkpoint":
        raise CheckpointError(f"{folder} is a model, and no checkpoint that `rowmesh train` wrote")
    return validate(metadata["config"], str(folder))


def _check_same(before: Config, now: Config, what: str, *, may_grow: bool = False) -> None:
    if differing := model_differences(before, now, may_grow=may_grow):
        raise ConfigurationError(
            f"{what} is of another model: {'; '.join(differing)}. Give the keys as they were, or train anew without "
            "--resume"
        )


def _is_placed_alike(before: Config, now: Config) -> bool:
    """Whether nothing asks for another placement than the run had."""
    return (before.placement, before.parallel.replicas) == (now.placement, now.parallel.replicas)

"""The commands `train` and `evaluate`, as lists of their phases.

Each phase takes values; `rowmesh.run.phases` has them in this order. A phase is a block where it holds
something for those after it, the ranks, the run's folder or the tables, and gives it back however they end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rowmesh.run import phases
from rowmesh.run.config import Config
from rowmesh.run.evaluation import Evaluation
from rowmesh.run.finished import FinishedRun
from rowmesh.run.publications import Publications
from rowmesh.run.resuming import Resume


def run_training(
    config: Config,
    *,
    overwrite: bool = False,
    verify: bool = True,
    fits_threads: bool = False,
    at_end: phases.AtEnd | None = None,
    resume: Resume = "no",
) -> Evaluation | None:
    """Trains as configured, writes the model and returns the metrics on the test split, if there is one.

    Collective and blocking: every rank of a torchrun launch calls it; without torchrun it is one process. The data
    that are read are those that lay in their folder at the start, on all ranks, whatever becomes of the folder.

    Args:
        config: what to train on what.
        overwrite: whether a former run in the folder may be removed.
        verify: whether the data are compared with their checksums.
        fits_threads: whether torch's threads may be lowered to this rank's share of the cores.
        at_end: what to do with the finished run.
        resume: whether to go on from the newest checkpoint in the run's folder: "latest", or "auto", which begins where
            there is none. Where the run is finished, nothing is done, and None returned.

    Raises:
        Preempted: a signal came while the run writes checkpoints, and one is written.
    """
    task, choices = phases.choose_task(config, verify=verify)
    with (
        phases.connected(task, fits_threads=fits_threads) as (mesh, console),
        phases.claimed(task, mesh, console, overwrite=overwrite, resumes=resume != "no") as claim,
    ):
        start = phases.find_start(task, mesh, claim, resume, overwrite=overwrite)
        if start.is_finished:
            console.write(f"resume    nothing to do: {Path(task.config.run.folder)} is a finished run")
            return None
        with phases.set_up(task, mesh, start) as trainer, closing(Publications(trainer.job)) as publications:
            phases.describe_run(trainer, choices, console)
            meaning = phases.fingerprint(task, mesh)
            phases.take_former_model(trainer, start, meaning, console, verify=verify)
            begun = phases.begin(trainer, start, claim)
            phases.train(trainer, start, claim, begun, publications, console)
            run = phases.save(trainer, claim, meaning, console)
            phases.publish(trainer, begun, run, publications, console)
            metrics = phases.evaluate_test_split(trainer, run, console)
            phases.end(trainer.job, run, at_end, console)
            return metrics


def run_evaluation(
    folder: Path,
    overrides: Sequence[str] = (),
    split: str | None = None,
    *,
    other_vocabulary: bool = False,
    verify: bool = True,
    fits_threads: bool = False,
    at_end: phases.AtEnd | None = None,
    trust: bool = False,
) -> Evaluation:
    """Loads the model of a run and returns its metrics on a split (the run's test split by default).

    Collective and blocking, on any number of ranks.

    Args:
        folder: the run's.
        overrides: keys of the configuration that differ from the run's.
        split: which split.
        other_vocabulary: accept data whose ids have another meaning than those of the training.
        verify: compare what is read of the model with its checksums.
        fits_threads: as for `run_training`.
        at_end: what to do with the evaluated run.
        trust: import the module of an own model that the folder names, also where no run of this user left the folder.

    Raises:
        RowmeshError: there is no model, it is damaged, no such data or split, or the data have another vocabulary.
    """
    finished = FinishedRun.open(folder)
    task = phases.reopen_task(finished, overrides, verify=verify, trust=trust)
    split = task.check_split("--split", split) if split else task.check_split("data.test", task.config.data.test)
    with phases.connected(task, fits_threads=fits_threads) as (mesh, console):
        phases.check_meaning(finished, task, mesh, console, accept=other_vocabulary)
        with phases.loaded(finished, task, mesh, verify=verify) as job:
            phases.describe_model(finished, task, job, console)
            metrics = phases.evaluate(job, task, finished.folder, split, finished.config.data, console)
            phases.end(job, finished.folder, at_end, console)
            return metrics

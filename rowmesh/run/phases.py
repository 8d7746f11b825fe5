"""The phases of a run, in the order in which `rowmesh.run.commands` goes through them.

Each takes values, and returns one where others need it. Every rank calls them: all that take a mesh, a job or a trainer
are collective.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from rowmesh.checkpoint.series import Series
from rowmesh.errors import RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.threads import fit_threads
from rowmesh.mesh.together import on_rank_0
from rowmesh.mesh.waiting import gather_objects
from rowmesh.observe.environment import environment_report
from rowmesh.observe.trackers import check_trackers
from rowmesh.observe.trackers.prometheus import check_free
from rowmesh.run import loop, resuming
from rowmesh.run.about import about_run
from rowmesh.run.best import remove_best
from rowmesh.run.build import job_on
from rowmesh.run.checkpoints import held_folder
from rowmesh.run.checks import SETTING_UP, naming_lost_peers
from rowmesh.run.config import Config, DataConfig
from rowmesh.run.console import Console
from rowmesh.run.device import check_device
from rowmesh.run.evaluation import Evaluation
from rowmesh.run.evaluation_names import evaluation_name, place_of
from rowmesh.run.fingerprint import Fingerprint, mismatch
from rowmesh.run.finished import FinishedRun
from rowmesh.run.job import Job
from rowmesh.run.loading import load_model
from rowmesh.run.own_model import check_importable
from rowmesh.run.placement import Placement, evaluation_placement
from rowmesh.run.publications import Publications
from rowmesh.run.raw import raw_metadata, remember_forms
from rowmesh.run.report import describe, describe_training, model_text, password_lines, warn_of_space
from rowmesh.run.resolve import anchored, resolve, to_toml
from rowmesh.run.resuming import Resume, Start, load_newest, resumed_placement
from rowmesh.run.run_folder import ABOUT, CONFIG, ENVIRONMENT, PLAN, Claim, RunFolder, write_json
from rowmesh.run.saving import SAVING, save_model
from rowmesh.run.starting import check_start, start_text
from rowmesh.run.tables import table_specs
from rowmesh.run.task import Task
from rowmesh.run.tasks import check_data, open_data, task_of
from rowmesh.run.trainer import Trainer
from rowmesh.run.trust import check_trusted, seal_of

AtEnd = Callable[[RunFolder], str]
"""Something that rank 0 does with the folder of a run at its end; returns a line about it, and never fails."""


def choose_task(config: Config, *, verify: bool) -> tuple[Task, list[str]]:
    """Opens the data, and says what is done with them; and lines on what was chosen where the configuration says auto.

    Raises:
        RowmeshError: something does not fit, which is refused before anything is made.
    """
    check_trackers(config.run.trackers)
    if config.run.prometheus_file:
        check_free(Path(config.run.prometheus_file))
    check_importable(config.model)
    check_device(config)
    task, choices = task_of(config, open_data(config, verify=verify))
    task.check()
    return task, choices


@contextmanager
def connected(task: Task, *, fits_threads: bool) -> Iterator[tuple[Mesh, Console]]:
    """The ranks, and what this one prints, for the time of a block; a rank that is lost is named.

    Args:
        task: what the ranks come together for.
        fits_threads: whether torch has this rank's share of the cores meanwhile.
    """
    threads = torch.get_num_threads()
    with Mesh.connect(task.config.parallel.timeout_s) as mesh, naming_lost_peers(mesh, SETTING_UP):
        console = Console(mesh.rank)
        try:
            if fits_threads and (said := fit_threads(mesh)):
                console.write(f"threads   {said}")
            yield mesh, console
        finally:
            torch.set_num_threads(threads)


@contextmanager
def claimed(task: Task, mesh: Mesh, console: Console, *, overwrite: bool, resumes: bool) -> Iterator[Claim]:
    """The folder of the run and that of its checkpoints, kept for it for the time of a block.

    Rank 0 takes them; the others learn whether it could.
    """
    with ExitStack() as stack:
        run = RunFolder(Path(task.config.run.folder))
        claim = Claim(run, overwrite=overwrite, log=console.write, resumes=resumes)

        def take() -> None:
            stack.enter_context(claim)
            stack.enter_context(held_folder(task.config))

        on_rank_0(mesh, SETTING_UP, take)
        yield claim


def find_start(task: Task, mesh: Mesh, claim: Claim, resume: Resume, *, overwrite: bool) -> Start:
    """Where the run begins, by what is in its folder; see `rowmesh.run.resuming.find_start`."""

    def find() -> Start:
        return resuming.find_start(claim, task.config, task.data, resume, overwrite=overwrite)

    return on_rank_0(mesh, SETTING_UP, find, Start)


@contextmanager
def set_up(task: Task, mesh: Mesh, start: Start) -> Iterator[Trainer]:
    """Tables, network and what trains them, for the time of a block."""

    def place() -> Placement:
        return resumed_placement(task, mesh, start)

    with job_on(task, mesh, place, trains=True) as job:
        yield Trainer(job, task)


def describe_run(trainer: Trainer, choices: Sequence[str], console: Console) -> None:
    """Prints what is trained on what, on which ranks, and why so."""
    job, task = trainer.job, trainer.task
    console.write(*password_lines(job.config))
    training = describe_training(job, task, trainer.total_steps)
    console.write(*describe(job, task), *choices, *training, f"run       {Path(job.config.run.folder)}")


def fingerprint(task: Task, mesh: Mesh) -> Fingerprint:
    """Says what the ids of the data mean: before training, since at its end the data may be elsewhere."""
    return on_rank_0(mesh, SETTING_UP, task.fingerprint)


def take_former_model(trainer: Trainer, start: Start, meaning: Fingerprint, console: Console, *, verify: bool) -> None:
    """Begins with the rows, the network and the optimizers of another run, where the configuration names one."""
    job = trainer.job
    if start.steps or (former := check_start(job.config, lambda: meaning)) is None:
        return
    job.embeddings.barrier()
    remember_forms(job.data, former.manifest.metadata)
    trainer.begin_with(load_model(job, former.folder, verify, optimizer_state=True))
    console.write(start_text(former))


def begin(trainer: Trainer, start: Start, claim: Claim) -> RunFolder:
    """Writes a description of the run into its folder; returns the folder it writes to until its model is written."""
    about = about_run(trainer.job, trainer.total_steps)

    def leave() -> RunFolder:
        return _begin(claim, trainer.job, about, goes_on=bool(start.steps))

    return on_rank_0(trainer.job.mesh, SETTING_UP, leave, RunFolder)


def _begin(claim: Claim, job: Job, about: dict[str, Any], *, goes_on: bool) -> RunFolder:
    """On rank 0. Folders are kept absolute beside what was given."""
    config = job.config
    given = {"run.folder": config.run.folder, "data.folder": config.data.folder, "from": str(Path.cwd())}
    if config.model.is_own and (seal := seal_of(config.model.name)) is not None:
        given["seal"] = seal
    given["id"] = (goes_on and claim.unfinished.id) or secrets.token_hex(8)
    files = {
        CONFIG: to_toml(anchored(config)),
        ENVIRONMENT: json.dumps(environment_report(), indent=1) + "\n",
        ABOUT: json.dumps(about, indent=1) + "\n",
        PLAN: job.placement.plan.to_json(),
    }
    if goes_on:
        return claim.resume(given, files)
    if config.checkpoint.folder:
        Series(Path(config.checkpoint.folder)).clear()  # of a run that is overwritten, or that had none that is whole
    return claim.begin(given, files)


def train(
    trainer: Trainer, start: Start, claim: Claim, begun: RunFolder, publications: Publications, console: Console
) -> None:
    """Goes on from the newest checkpoint, where there is one, and does the steps.

    Where that fails before the first step of a run, the run leaves no folder.
    """
    job = trainer.job
    try:
        if start.steps:
            trainer.resume(load_newest(job, begun, start.steps, console.write))
            of = "" if trainer.total_steps is None else f" of {trainer.total_steps:,}"
            console.write(f"resume    after step {trainer.step:,}{of}")
        console.write(*warn_of_space(job, Path(job.config.run.folder)))  # now: a former run without a model is gone
        publications.begin(trainer.step, on_rank_0(job.mesh, SETTING_UP, lambda: begun.id))
        loop.train(trainer, begun, publications, console)
    except BaseException:
        if job.mesh.rank == 0 and not start.steps and not trainer.step:
            claim.withdraw()
        raise


def save(trainer: Trainer, claim: Claim, meaning: Fingerprint, console: Console) -> RunFolder:
    """Writes the model; returns the run's folder, wherever that is in the end."""
    job = trainer.job
    with naming_lost_peers(job.mesh, SAVING):
        console.write(*_mapped(job))
        metadata = {
            "steps": trainer.step,
            **_choice(trainer),
            "data": job.data.place,
            "fingerprint": meaning,
            **raw_metadata(job.data),
        }
        run = save_model(job, claim, trainer.state_dict(), metadata)
    console.write(f"model     {run.model}, {model_text(metadata)}")
    return run


def _mapped(job: Job) -> list[str]:
    """Lines on how many ids their tables' out_of_range mapped to another row, by feature, over all ranks."""
    mine: Counter[str] = Counter()
    for counters in job.embeddings.counters:
        mine.update(counters.out_of_range)
    everyone: Counter[str] = Counter()
    for theirs in gather_objects(job.mesh, mine, SAVING):
        everyone.update(theirs)
    return [
        f"mapped    {feature}: {count:,} ids outside their table read its out_of_range row"
        for feature, count in sorted(everyone.items())
    ]


def _choice(trainer: Trainer) -> dict[str, Any]:
    """How the model was chosen among those that were evaluated; nothing where the last is kept in any case."""
    stopping = trainer.stopping
    if not stopping.patience:
        return {}
    return {
        "trained_steps": trainer.trained_steps,
        **trainer.task.chosen_by(stopping.losses.get(trainer.step)),
        "is_best": trainer.step == stopping.best_step,
    }


def publish(trainer: Trainer, begun: RunFolder, run: RunFolder, publications: Publications, console: Console) -> None:
    """Publishes the model that the run keeps; the copy of the best goes then."""
    publications.write_last(trainer.step, console.write)
    if trainer.job.mesh.rank == 0:
        remove_best(begun, run)


def evaluate_test_split(trainer: Trainer, run: RunFolder, console: Console) -> Evaluation | None:
    """Evaluates the model on the test split, where there is one, and prints what went wrong."""
    job, task = trainer.job, trainer.task
    metrics = evaluate(job, task, run, task.tested, job.config.data, console) if task.tested else None
    console.write(*task.advice(job, trainer.stopping, trainer.trained_steps, metrics))
    return metrics


def reopen_task(finished: FinishedRun, overrides: Sequence[str], *, verify: bool, trust: bool) -> Task:
    """Opens the data for the model of a run, and says what is done with them.

    Args:
        finished: the run.
        overrides: keys of the configuration that differ from the run's.
        verify: compare what is read of the data with its checksums.
        trust: import the module of an own model that the folder names, also where no run of this user left the folder.
    """
    run, trained, metadata = finished.folder, finished.config, finished.manifest.metadata
    config = resolve(run.config, overrides)
    if config.model.is_own and config.model.name == trained.model.name:
        check_trusted(run.path, config.model.name, run.seal, trust=trust, how="pass --trust")
    check_importable(config.model, trained_from=run.started_in)
    # Another schema that is named on purpose is read; `check_meaning` compares what it means.
    is_own = config.data.raw_schema == trained.data.raw_schema
    data = open_data(config, verify=verify, trained=metadata if is_own else None)
    remember_forms(data, metadata)
    return task_of(config, data)[0]


def check_meaning(finished: FinishedRun, task: Task, mesh: Mesh, console: Console, *, accept: bool) -> None:
    """Raises RowmeshError where ids do not mean what they meant in training; where that is accepted, prints a line."""
    console.write(*on_rank_0(mesh, SETTING_UP, lambda: _differences(finished, task, accept)))


def _differences(finished: FinishedRun, task: Task, accept: bool) -> list[str]:
    run, metadata, data = finished.folder, finished.manifest.metadata, task.data
    check_data(finished.config, data)
    if not (what := mismatch(metadata, task.fingerprint, run.model)):
        return []
    if accept:
        _check_sizes(finished, task)
        return [f"data      differ from those of the training in {what}; accepted"]
    raise RowmeshError(
        f"the model in {run.path} was trained on {metadata['data']}, and {data.place} differs from it in "
        f"{what}: the same ids and values mean something else. Prepare the data as for the training, or give "
        "--other-vocabulary to evaluate nevertheless"
    )


def _check_sizes(finished: FinishedRun, task: Task) -> None:
    """Raises RowmeshError where tables have not as many rows as the data have values, whatever they mean."""
    manifest = finished.manifest
    tables = [table for table in table_specs(task.config.tables, task.data) if not table.takes_any_id]
    saved = {name: entry.num_rows for name, entry in manifest.tables.items() if entry.known is None}
    unlike = [
        f"{table.name} has {saved[table.name]:,} rows in the model and {table.num_rows:,} values in the data"
        for table in tables
        if saved.get(table.name, table.num_rows) != table.num_rows
    ]
    if unlike:
        more = f", and {len(unlike) - 1} more" if len(unlike) > 1 else ""
        raise RowmeshError(
            f"--other-vocabulary accepts values that mean something else, but not another number of them: table "
            f"{unlike[0]}{more}. Evaluate {finished.folder.path} on data that were prepared with the vocabulary of its "
            f"own ({manifest.metadata['data']})"
        )


@contextmanager
def loaded(finished: FinishedRun, task: Task, mesh: Mesh, *, verify: bool) -> Iterator[Job]:
    """The tables and the network of a run with its model, for the time of a block."""
    config, trained = task.config, finished.config
    changed = (config.placement, config.parallel.replicas) != (trained.placement, trained.parallel.replicas)

    def place() -> Placement:
        return evaluation_placement(task, mesh, finished.folder.plan, changed=changed)

    with job_on(task, mesh, place, trains=False) as job:
        load_model(job, finished.folder, verify)
        yield job


def describe_model(finished: FinishedRun, task: Task, job: Job, console: Console) -> None:
    """Prints what is evaluated on what."""
    run, manifest = finished.folder, finished.manifest
    console.write(*describe(job, task), f"model     {run.model}, {model_text(manifest.metadata)}")


def evaluate(job: Job, task: Task, run: RunFolder, split: str, trained: DataConfig, console: Console) -> Evaluation:
    """Prints the metrics of a split, then writes them: what cannot be written is not lost.

    Args:
        job: what is evaluated.
        task: says how.
        run: the folder that gets the metrics.
        split: which samples.
        trained: the data of the run.
        console: prints them.
    """
    name = on_rank_0(job.mesh, SETTING_UP, lambda: evaluation_name(run, trained, job.data, split))
    title = name if split not in job.data.splits else split
    with console.progress(task.num_evaluation_batches(split), title=title) as progress:
        metrics = task.evaluate(job, split, progress.advance)
    console.write(*task.results(title, metrics))
    record: dict[str, Any] = {"split": name, "data": place_of(job.data, split), **metrics.as_file()}
    record |= {"planted_optimum": task.optimum(split)}
    doing = f"writing the metrics of {name}"
    on_rank_0(job.mesh, doing, lambda: _write_metrics(run.evaluation(name), record))
    return metrics


def _write_metrics(path: Path, record: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, record)
    except OSError as error:
        reason = error.strerror or error
        raise RowmeshError(f"cannot write {path}: {reason}; the metrics are printed above and nowhere else") from None


def end(job: Job, run: RunFolder, at_end: AtEnd | None, console: Console) -> None:
    """Has rank 0 do what is to be done with the folder of the run."""
    if at_end is not None and job.mesh.rank == 0:
        console.write(at_end(run))

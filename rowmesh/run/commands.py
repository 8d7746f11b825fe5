"""What the commands `train` and `evaluate` do, from a resolved configuration to files in the run's folder."""

from __future__ import annotations

import json
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rowmesh import checkpoint
from rowmesh._support.faults import reach
from rowmesh._support.files.printable import say
from rowmesh.checkpoint.files import UNVERIFIABLE
from rowmesh.checkpoint.manifest import Manifest
from rowmesh.checkpoint.series import Series
from rowmesh.checkpoint.together import on_every_rank
from rowmesh.errors import RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.threads import fit_threads
from rowmesh.mesh.together import on_rank_0
from rowmesh.mesh.waiting import gather_objects
from rowmesh.observe.environment import environment_report
from rowmesh.observe.lines import fitted
from rowmesh.observe.progress import Progress
from rowmesh.observe.trackers import check_trackers
from rowmesh.observe.trackers.prometheus import check_free
from rowmesh.run.about import about_run
from rowmesh.run.best import remove_best
from rowmesh.run.build import build
from rowmesh.run.checkpoints import held_folder
from rowmesh.run.checks import SETTING_UP, naming_lost_peers
from rowmesh.run.config import Config, DataConfig
from rowmesh.run.device import check_device
from rowmesh.run.evaluation import Evaluation
from rowmesh.run.evaluation_names import evaluation_name, place_of
from rowmesh.run.fingerprint import Fingerprint, mismatch
from rowmesh.run.job import Job
from rowmesh.run.loop import train
from rowmesh.run.own_model import check_importable
from rowmesh.run.placement import Placement, evaluation_placement
from rowmesh.run.preflight import check_memory
from rowmesh.run.publications import Publications
from rowmesh.run.raw import raw_metadata, remember_forms
from rowmesh.run.report import describe, describe_training, model_text, password_lines, warn_of_space
from rowmesh.run.resolve import anchored, resolve, to_toml
from rowmesh.run.resuming import Resume, Start, find_start, load_newest, resumed_placement
from rowmesh.run.run_folder import ABOUT, CONFIG, ENVIRONMENT, PLAN, Claim, RunFolder, write_json
from rowmesh.run.saving import SAVING, save_model
from rowmesh.run.splits import check_same_data
from rowmesh.run.starting import check_start, start_text
from rowmesh.run.table_data import TableData
from rowmesh.run.tables import table_specs
from rowmesh.run.task import Task
from rowmesh.run.tasks import check_data, open_data, task_of
from rowmesh.run.trainer import Trainer
from rowmesh.run.trust import check_trusted, seal_of

AtEnd = Callable[[RunFolder], str]
"""Something that rank 0 does with the folder of a run at its end; returns a line about it, and never fails."""


def run_training(
    config: Config,
    *,
    overwrite: bool = False,
    verify: bool = True,
    fits_threads: bool = False,
    at_end: AtEnd | None = None,
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
    check_trackers(config.run.trackers)
    if config.run.prometheus_file:
        check_free(Path(config.run.prometheus_file))
    check_importable(config.model)
    check_device(config)
    data = open_data(config, verify=verify)
    task, choices = task_of(config, data)
    config = task.config
    task.check()  # refuses what does not fit before anything is made
    run = RunFolder(Path(config.run.folder))
    with (
        Mesh.connect(config.parallel.timeout_s) as mesh,
        naming_lost_peers(mesh, SETTING_UP),
        _threads(mesh, fits_threads),
        _claimed(mesh, run, overwrite, resumes=resume != "no") as claim,
        ExitStack() as stack,
    ):
        on_rank_0(mesh, SETTING_UP, lambda: stack.enter_context(held_folder(config)))
        start = on_rank_0(mesh, SETTING_UP, lambda: find_start(claim, config, data, resume, overwrite=overwrite), Start)
        if start.is_finished:
            _write(mesh, f"resume    nothing to do: {run.path} is a finished run")
            return None
        job = stack.enter_context(job_on(task, mesh, lambda: resumed_placement(config, mesh, data, start), trains=True))
        trainer = Trainer(job, task)
        publications = stack.enter_context(closing(Publications(job)))
        _write(mesh, *password_lines(config))
        _write(mesh, *describe(job, task), *choices, *describe_training(job, task, trainer.total_steps))
        _write(mesh, f"run       {run.path}")
        meaning = on_rank_0(mesh, SETTING_UP, task.fingerprint)  # now: at the end the data may be elsewhere
        if (former := None if start.steps else check_start(config, lambda: meaning)) is not None:
            job.embeddings.barrier()
            remember_forms(data, former.manifest.metadata)
            trainer.begin_with(load_model(job, former.folder, verify, optimizer_state=True))
            _write(mesh, start_text(former))
        about = about_run(job, trainer.total_steps)
        begun = on_rank_0(
            mesh, SETTING_UP, lambda: _begin(claim, config, job.placement, about, goes_on=bool(start.steps)), RunFolder
        )
        with _withdrawn_without_a_step(mesh, claim, trainer, goes_on=bool(start.steps)):
            if start.steps:
                trainer.resume(load_newest(job, begun, start.steps, claim.log))
                of = "" if trainer.total_steps is None else f" of {trainer.total_steps:,}"
                _write(mesh, f"resume    after step {trainer.step:,}{of}")
            _write(mesh, *warn_of_space(job, run.path))  # now: a former run without a model is gone
            publications.begin(trainer.step, on_rank_0(mesh, SETTING_UP, lambda: begun.id))
            train(trainer, begun, publications)
        run = _save(job, trainer, claim, meaning)
        publications.write_last(trainer.step, claim.log)
        if mesh.rank == 0:
            remove_best(begun, run)
        metrics = _evaluate(job, task, run, task.tested, config.data) if task.tested else None
        _write(mesh, *task.advice(job, trainer.stopping, trainer.trained_steps, metrics))
        _end(mesh, run, at_end)
        return metrics


def run_evaluation(
    folder: Path,
    overrides: Sequence[str] = (),
    split: str | None = None,
    *,
    other_vocabulary: bool = False,
    verify: bool = True,
    fits_threads: bool = False,
    at_end: AtEnd | None = None,
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
    run = RunFolder(folder)
    if not run.config.exists():
        raise RowmeshError(f"{folder} is no run: {run.config.name} is missing; give the folder of a finished run")
    config = resolve(run.config, overrides)
    if config.model.is_own and config.model.name == resolve(run.config).model.name:
        check_trusted(run.path, config.model.name, run.seal, trust=trust, how="pass --trust")
    check_importable(config.model, trained_from=run.started_in)
    manifest = checkpoint.read_manifest(run.model)
    # Another schema that is named on purpose is read; its meaning is compared below.
    is_own = config.data.raw_schema == resolve(run.config).data.raw_schema
    data = open_data(config, verify=verify, trained=manifest.metadata if is_own else None)
    remember_forms(data, manifest.metadata)
    task, _ = task_of(config, data)
    config = task.config
    split = task.check_split("--split", split) if split else task.check_split("data.test", config.data.test)
    with (
        Mesh.connect(config.parallel.timeout_s) as mesh,
        naming_lost_peers(mesh, SETTING_UP),
        _threads(mesh, fits_threads),
    ):
        _write(mesh, *on_rank_0(mesh, SETTING_UP, lambda: _compare(run, manifest, task, other_vocabulary)))
        trained = resolve(run.config)
        changed = (config.placement, config.parallel.replicas) != (trained.placement, trained.parallel.replicas)

        def place() -> Placement:
            return evaluation_placement(config, mesh, data, run.plan, changed=changed)

        with job_on(task, mesh, place, trains=False) as job:
            load_model(job, run, verify)
            _write(mesh, *([] if manifest.checksums or not verify else [f"model     {run.model} {UNVERIFIABLE}"]))
            _write(mesh, *describe(job, task), f"model     {run.model}, {model_text(manifest.metadata)}")
            metrics = _evaluate(job, task, run, split, trained.data)
            _end(mesh, run, at_end)
            return metrics


def _begin(claim: Claim, config: Config, placement: Placement, about: dict[str, Any], *, goes_on: bool) -> RunFolder:
    """Leaves what the run is, and returns where it writes. Folders are kept absolute beside what was given."""
    given = {"run.folder": config.run.folder, "data.folder": config.data.folder, "from": str(Path.cwd())}
    if config.model.is_own and (seal := seal_of(config.model.name)) is not None:
        given["seal"] = seal
    given["id"] = (goes_on and claim.unfinished.id) or secrets.token_hex(8)
    files = {
        CONFIG: to_toml(anchored(config)),
        ENVIRONMENT: json.dumps(environment_report(), indent=1) + "\n",
        ABOUT: json.dumps(about, indent=1) + "\n",
        PLAN: placement.plan.to_json(),
    }
    if goes_on:
        return claim.resume(given, files)
    if config.checkpoint.folder:
        Series(Path(config.checkpoint.folder)).clear()  # of a run that is overwritten, or that had none that is whole
    return claim.begin(given, files)


@contextmanager
def _withdrawn_without_a_step(mesh: Mesh, claim: Claim, trainer: Trainer, *, goes_on: bool) -> Iterator[None]:
    """Where a block fails before the first step of a run, the run leaves no folder."""
    try:
        yield
    except BaseException:
        if mesh.rank == 0 and not goes_on and not trainer.step:
            claim.withdraw()
        raise


def _save(job: Job, trainer: Trainer, claim: Claim, meaning: Fingerprint) -> RunFolder:
    """Writes the model; returns the run's folder, wherever that is in the end."""
    with naming_lost_peers(job.mesh, SAVING):
        _write_mapped(job)
        metadata = {
            "steps": trainer.step,
            **_choice(trainer),
            "data": job.data.place,
            "fingerprint": meaning,
            **raw_metadata(job.data),
        }
        run = save_model(job, claim, trainer.state_dict(), metadata)
    _write(job.mesh, f"model     {run.model}, {model_text(metadata)}")
    return run


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


def load_model(job: Job, run: RunFolder, verify: bool, *, optimizer_state: bool = False) -> dict[str, Any]:
    """Reads the rows of this rank and the network of a run; returns what was saved beside the rows.

    Collective: all ranks fail where one does.

    Args:
        job: of the same tables and network.
        run: whose model.
        verify: compare what is read with its checksums.
        optimizer_state: whether the state of rows is read, too.

    Raises:
        RowmeshError: there is no model, it is damaged, or it is of other tables or another network.
    """
    read = partial(checkpoint.load, run.model, job.embeddings, optimizer_state=optimizer_state, verify=verify)
    state = on_every_rank(job.mesh.peers, read, SETTING_UP)
    try:
        job.network.load_state_dict(state["network"])
    except KeyError:
        raise RowmeshError(f"the model in {run.model} has no network; rowmesh train writes one") from None
    except (RuntimeError, TypeError) as error:
        is_state = isinstance(state["network"], Mapping)
        what = (_unlike(state["network"], job.network.state_dict()) if is_state else "") or str(error)
        raise RowmeshError(f"the network in {run.model} is another; leave model.… as it was trained: {what}") from None
    if "linear" in state and job.config.train.linear != "torch" and job.config.train.precision == "float32":
        job.linear.load_state_dict(state["linear"])
    job.embeddings.barrier()
    return state


def _unlike(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """In which tensors two states of networks differ, the first by name; "" where only torch knows.

    >>> _unlike({"0.weight": torch.zeros(8, 4), "1.bias": torch.zeros(3)}, {"0.weight": torch.zeros(2, 4)})
    '0.weight is [8, 4] there and [2, 4] here, and 1 more differs'
    """

    def shape(state: Mapping[str, Any], name: str) -> str:
        found = getattr(state.get(name), "shape", None)
        return "none" if found is None else str(list(found))

    names = [name for name in dict.fromkeys([*saved, *own]) if shape(saved, name) != shape(own, name)]
    if not names:
        return ""
    others = len(names) - 1
    more = f", and {others} more differ{'s' if others == 1 else ''}" if others else ""
    return f"{names[0]} is {shape(saved, names[0])} there and {shape(own, names[0])} here{more}"


def _compare(run: RunFolder, manifest: Manifest, task: Task, accept: bool) -> list[str]:
    """Raises RowmeshError where ids do not mean what they meant in training; where that is accepted, a line says so."""
    metadata, data = manifest.metadata, task.data
    check_data(resolve(run.config), data)
    if not (what := mismatch(metadata, task.fingerprint, run.model)):
        return []
    if accept:
        _check_sizes(run, manifest, task)
        return [f"data      differ from those of the training in {what}; accepted"]
    raise RowmeshError(
        f"the model in {run.path} was trained on {metadata['data']}, and {data.place} differs from it in "
        f"{what}: the same ids and values mean something else. Prepare the data as for the training, or give "
        "--other-vocabulary to evaluate nevertheless"
    )


def _check_sizes(run: RunFolder, manifest: Manifest, task: Task) -> None:
    """Raises RowmeshError where tables have not as many rows as the data have values, whatever they mean."""
    tables = [table for table in table_specs(task.config.tables, task.data) if table.storage != "dynamic"]
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
            f"{unlike[0]}{more}. Evaluate {run.path} on data that were prepared with the vocabulary of its own "
            f"({manifest.metadata['data']})"
        )


def _evaluate(job: Job, task: Task, run: RunFolder, split: str, trained: DataConfig) -> Evaluation:
    """Prints the metrics of a split, then writes them: what cannot be written is not lost."""
    name = on_rank_0(job.mesh, SETTING_UP, lambda: evaluation_name(run, trained, job.data, split))
    title = name if split not in job.data.splits else split
    num_batches = task.num_evaluation_batches(split)
    with Progress(num_batches, title=title, enabled=job.mesh.rank == 0) as progress:
        metrics = task.evaluate(job, split, progress.advance)
    _write(job.mesh, *task.results(title, metrics))
    record: dict[str, Any] = {"split": name, "data": place_of(job.data, split), **metrics.as_file()}
    record |= {"planted_optimum": task.optimum(split)}
    doing = f"writing the metrics of {name}"
    on_rank_0(job.mesh, doing, lambda: _write_metrics(run.evaluation(name), record))
    return metrics


def _end(mesh: Mesh, run: RunFolder, at_end: AtEnd | None) -> None:
    if at_end is not None and mesh.rank == 0:
        _write(mesh, at_end(run))


def _write_metrics(path: Path, record: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, record)
    except OSError as error:
        reason = error.strerror or error
        raise RowmeshError(f"cannot write {path}: {reason}; the metrics are printed above and nowhere else") from None


def _write(mesh: Mesh, *lines: str) -> None:
    if mesh.rank == 0 and lines:
        say(*fitted(lines, sys.stdout))


@contextmanager
def _threads(mesh: Mesh, fits: bool) -> Iterator[None]:
    """Gives this rank its share of the cores for the time of a block, and says so."""
    before = torch.get_num_threads()
    if fits and (said := fit_threads(mesh)):
        _write(mesh, f"threads   {said}")
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_mapped(job: Job) -> None:
    """Prints how many ids their tables' out_of_range mapped to another row, by feature, over all ranks."""
    mine: Counter[str] = Counter()
    for counters in job.embeddings.counters:
        mine.update(counters.out_of_range)
    everyone: Counter[str] = Counter()
    for theirs in gather_objects(job.mesh, mine, SAVING):
        everyone.update(theirs)
    for feature, count in sorted(everyone.items()):
        _write(job.mesh, f"mapped    {feature}: {count:,} ids outside their table read its out_of_range row")


@contextmanager
def job_on(task: Task, mesh: Mesh, place: Callable[[], Placement], *, trains: bool) -> Iterator[Job]:
    """The pieces of a run, for the time of a block; collective.

    Rank 0 reads or makes the plan for all: files may be on its host alone.
    """
    config = task.config
    check_same_data(mesh, task.data)
    reach("train.plan")
    placement = on_rank_0(mesh, SETTING_UP, place, Placement)
    averages = config.parallel.synchronization == "average"
    on_host = config.train.device == "cpu"
    network = task.network_bytes(mesh.world_size, trains=trains) if on_host else 0
    check_memory(placement.plan, mesh, _elsewhere(config, task.data), averages=averages, network_bytes=network)
    reach("train.build")
    job = build(task, mesh, placement, trains=trains)
    reach("train.built")
    try:
        yield job
    finally:
        job.embeddings.close()


def _elsewhere(config: Config, data: TableData) -> list[str]:
    """Tables whose rows are not in the host's memory: in files, or on a GPU, which says for itself that it has no room.

    With `train.device=cuda` tiered tables have all rows on the host nevertheless, and some on the GPU.
    """
    of_tiers, of_others = bool(config.tiers.folder), config.train.device != "cpu"
    tables = table_specs(config.tables, data)
    return [table.name for table in tables if (of_tiers if table.storage == "tiered" else of_others)]


@contextmanager
def _claimed(mesh: Mesh, run: RunFolder, overwrite: bool, *, resumes: bool) -> Iterator[Claim]:
    """Rank 0 takes the folder; the others learn whether it could."""
    with ExitStack() as stack:
        claim = Claim(run, overwrite=overwrite, log=lambda text: _write(mesh, text), resumes=resumes)

        def take() -> None:
            stack.enter_context(claim)

        on_rank_0(mesh, SETTING_UP, take)
        yield claim

"""What the commands `train` and `evaluate` do, from a resolved configuration to files in the run's folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rowmesh import checkpoint
from rowmesh.errors import RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.observe import environment_report
from rowmesh.observe.tensorboard import require_tensorboard
from rowmesh.train.config import Config
from rowmesh.train.evaluate import evaluate
from rowmesh.train.job import Job, build
from rowmesh.train.loop import Trainer
from rowmesh.train.metrics import Metrics
from rowmesh.train.report import describe, results
from rowmesh.train.resolve import resolve, write_toml
from rowmesh.train.run_folder import Claim, RunFolder, write_json


def run_training(config: Config, *, overwrite: bool = False) -> Metrics | None:
    """Trains as configured, writes the model and returns the metrics on the test split, if there is one.

    Collective and blocking: every rank of a torchrun launch calls it; without torchrun it is one process.
    """
    if config.train.tensorboard:
        require_tensorboard()
    run = RunFolder(Path(config.run.folder))
    with (
        Mesh.connect(config.parallel.timeout_s) as mesh,
        _claimed(mesh, run, overwrite) as keep,
        _job(config, mesh) as job,
    ):
        trainer = Trainer(job)
        _announce(job, run, trainer.total_steps)
        keep()
        if mesh.rank == 0:
            write_toml(config, run.config)
            write_json(run.environment, environment_report())
        trainer.run(run)
        _say_mapped(job)
        metadata = {"steps": trainer.step, "data": config.data.folder}
        checkpoint.save(run.model, job.embeddings, trainer.state_dict(), metadata=metadata, group=mesh.group)
        _say(mesh, f"model     {run.model}, after {trainer.step} steps")
        return _evaluate(job, run, config.data.test) if config.data.test in job.data.splits else None


def run_evaluation(folder: Path, overrides: Sequence[str] = (), split: str | None = None) -> Metrics:
    """Loads the model of a run and returns its metrics on a split (the run's test split by default).

    Collective and blocking, on any number of ranks.
    """
    run = RunFolder(folder)
    if not run.config.exists():
        raise RowmeshError(f"{folder} is no run: {run.config.name} is missing; give the folder of a finished run")
    config = resolve(run.config, overrides)
    checkpoint.read_manifest(run.model)
    with Mesh.connect(config.parallel.timeout_s) as mesh, _job(config, mesh) as job:
        state = checkpoint.load(run.model, job.embeddings, optimizer_state=False)
        job.network.load_state_dict(state["network"])
        job.embeddings.barrier()
        return _evaluate(job, run, split or config.data.test)


def _evaluate(job: Job, run: RunFolder, split: str) -> Metrics:
    metrics = evaluate(job, split)
    known = job.data.splits[split]
    if job.mesh.rank == 0:
        record: dict[str, Any] = {"split": split, "data": str(job.data.folder), **metrics.as_record()}
        write_json(run.evaluation(split), record | {"planted_optimum": known.optimum})
    _say(job.mesh, *results(split, metrics, known))
    return metrics


def _announce(job: Job, run: RunFolder, total_steps: int) -> None:
    config = job.config
    steps = f"{total_steps:,} of {config.data.batch_size:,} samples each, {config.train.epochs} epoch(s) at most"
    _say(job.mesh, *describe(job), f"steps     {steps}", f"run       {run.path}")


def _say(mesh: Mesh, *lines: str) -> None:
    if mesh.rank == 0:
        print(*lines, sep="\n", flush=True)  # noqa: T201


def _say_mapped(job: Job) -> None:
    """Tells of ids that their tables' out_of_range mapped to another row, by feature, over all ranks."""
    mine: Counter[str] = Counter()
    for counters in job.embeddings.counters:
        mine.update(counters.out_of_range)
    everyone: list[Counter[str]] = [mine]
    if job.mesh.group is not None:
        everyone = everyone * job.mesh.world_size
        dist.all_gather_object(everyone, mine, job.mesh.group)
    for feature, count in sorted(sum(everyone, Counter()).items()):
        _say(job.mesh, f"mapped    {feature}: {count:,} ids outside their table read its out_of_range row")


@contextmanager
def _job(config: Config, mesh: Mesh) -> Iterator[Job]:
    job = build(config, mesh)
    try:
        yield job
    finally:
        job.embeddings.close()


@contextmanager
def _claimed(mesh: Mesh, run: RunFolder, overwrite: bool) -> Iterator[Callable[[], None]]:
    """Rank 0 takes the folder; the others learn whether it could. Yields what keeps the folder."""
    with ExitStack() as stack:
        claim = Claim(run, overwrite=overwrite)
        refusal: list[str | None] = [None]
        if mesh.rank == 0:
            try:
                stack.enter_context(claim)
            except RowmeshError as error:
                refusal = [str(error)]
        if mesh.group is not None:
            dist.broadcast_object_list(refusal, group=mesh.group, group_src=0)
        if refusal[0] is not None:
            raise RowmeshError(refusal[0])
        yield claim.keep

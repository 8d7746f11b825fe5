"""The lines that a run prints: its choices and their reasons, and how good the result is."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import rowmesh
from rowmesh._support.files.secrets import places_of_passwords
from rowmesh.data.prepared import Prepared, Split
from rowmesh.mesh.waiting import gather_objects
from rowmesh.models import DLRM, ProjectedDLRM
from rowmesh.placement.text import bytes_text
from rowmesh.run.checks import SETTING_UP
from rowmesh.run.config import Config, ScheduleConfig, chosen
from rowmesh.run.evaluation import Evaluation
from rowmesh.run.job import Job
from rowmesh.run.metrics import Metrics, binary_entropy
from rowmesh.run.schedule import factor
from rowmesh.run.table_data import TableData
from rowmesh.run.targets import Target, is_click
from rowmesh.run.task import Task
from rowmesh.run.value_metrics import ValueMetrics
from rowmesh.tables import Tiers

_CRITERIA = {
    "validation_log_loss": "validation log-loss",
    "validation_loss": "validation loss",
    "validation_ndcg@10": "validation NDCG@10",
}


def describe(job: Job, task: Task) -> list[str]:
    """Lines on device, data, placement, tables, transport, network and memory. Collective: every rank calls it."""
    memory = memory_of_every_rank(job)
    facts = [
        ("ranks", _ranks(job)),
        ("device", _device(job)),
        *task.describe(job),
        ("plan", job.placement.text),
        *(("replicas", text) for text in _replicas(job)),
        ("transport", f"{job.embeddings.transport}: {job.embeddings.transport_reason}"),
        *(("group", _group(group, job.embeddings.tiers)) for group in job.embeddings.groups),
        ("network", _network(job)),
        ("linear", job.linear.reason),
        *(("memory", f"rank {rank}: {_sizes(sizes)}") for rank, sizes in enumerate(memory)),
    ]
    return [f"{name:<10}{text}" for name, text in facts]


def describe_training(job: Job, task: Task, total_steps: int | None) -> list[str]:
    """Lines on what only training needs: the network's optimizer, the steps, the evaluations."""
    optimizer = job.config.optimizer
    schedule = job.config.schedule.name
    facts = [
        (
            "optimizer",
            f"{optimizer.name} lr {chosen(optimizer.lr):g} for the network, {schedule} schedule",
        ),
        *(("loss", text) for text in [task.describe_loss(job)] if text),
        *task.describe_steps(total_steps),
    ]
    lines = [f"{name:<10}{text}" for name, text in facts]
    return lines + _warn_of_warmup(job.config.schedule, total_steps)


def steps_of_splits(config: Config, data: TableData, total_steps: int | None) -> list[tuple[str, str]]:
    """Lines on steps over the samples of a split, and on a split for the end that there is not."""
    size = f"of {chosen(config.data.batch_size):,} samples each"
    lines = [("steps", f"{total_steps:,} {size}, {config.train.epochs} epoch(s) at most")]
    if config.data.test not in data.splits:
        lines.append(("test", f"none: {data.folder} has no split {config.data.test!r}"))
    return lines


def _warn_of_warmup(schedule: ScheduleConfig, total_steps: int | None) -> list[str]:
    """A line where training ends before its learning rates are reached.

    >>> _warn_of_warmup(ScheduleConfig(warmup_steps=5000), 100)
    ['warning   schedule.warmup_steps=5,000 of 100 steps: learning rates reach 0.02 of what they are; lower it']
    """
    if total_steps is None or not 0 < total_steps < schedule.warmup_steps:
        return []
    return [
        f"{'warning':<10}schedule.warmup_steps={schedule.warmup_steps:,} of {total_steps:,} steps: learning rates "
        f"reach {factor(schedule, total_steps - 1, total_steps):.2g} of what they are; lower it"
    ]


def click_loss(job: Job) -> str:
    """The terms of the loss; "" where it is the log-loss of one label, without sample weights."""
    weight = job.schema.weight
    if is_click(job.targets) and weight is None:
        return ""
    own = job.own is not None and getattr(job.network, "loss", None) is not None
    parts = ["of the model's own"] if own else [_term(target) for target in job.targets]
    return " + ".join(parts) + (f", samples weighted by {weight!r}" if weight is not None else "")


def _term(target: Target) -> str:
    names = {"binary": "binary cross entropy", "mse": "squared error"}
    factor = "" if target.loss_weight == 1 else f"{target.loss_weight:g} · "
    return f"{factor}{names[target.loss]} of {target.name!r}"


def model_text(metadata: Mapping[str, Any]) -> str:
    """The step of a model, and whether it is the best of its run.

    >>> model_text({"steps": 30, "trained_steps": 50, "validation_log_loss": 0.5, "is_best": True})
    'the best of 50 steps: after step 30, validation log-loss 0.50000'
    >>> model_text({"steps": 30})
    'after 30 steps'
    """
    steps = metadata.get("steps", "?")
    found = [(key, metadata[key]) for key in _CRITERIA if metadata.get(key) is not None]
    if not found:
        return f"after {steps} steps"
    best = (
        f"the best of {metadata['trained_steps']} steps" if metadata["is_best"] else "not the best, which is not kept"
    )
    key, loss = found[0]
    return f"{best}: after step {steps}, {_CRITERIA[key]} {loss:.5f}"


def password_lines(config: Config) -> list[str]:
    """Advice about passwords that stand in a configuration; no lines where there are none."""
    places = list(places_of_passwords(config.model_dump(exclude_none=True)))
    if not places:
        return []
    return [
        f"password  {', '.join(places)}: a URL has a password, which the files of the run show as ***; write $NAME in "
        "its place, and keep it in the variable NAME of the environment: evaluating the run finds it there, too"
    ]


def warn_of_space(job: Job, folder: Path) -> list[str]:
    """Lines where a folder has too little room for the model, which is written at the end, or for checkpoints."""
    free, needed = shutil.disk_usage(folder).free, model_bytes(job)
    lines = []
    if free < needed:
        lines.append(
            f"{'disk':<10}{folder} has {bytes_text(free)} free and the model needs {bytes_text(needed)}: make room "
            "before training ends, or it goes to run.fallback_folder, or waits for room (run.retry_s)"
        )
    return lines + _warn_of_checkpoints(job, folder, needed)


def _warn_of_checkpoints(job: Job, run: Path, model: int) -> list[str]:
    """As many as are kept, and one that is being written; on the disk of the run, the model too."""
    config = job.config.checkpoint
    if not config.is_on:
        return []
    place = Path(config.folder or run).absolute()
    free = shutil.disk_usage(next(each for each in (place, *place.parents) if each.exists())).free
    needed = (config.keep_last + 1) * model + (0 if config.folder else model)
    if free >= needed:
        return []
    what = f"{config.keep_last + 1} checkpoints{'' if config.folder else ' with the model'}"
    return [
        f"{'disk':<10}{place} has {bytes_text(free)} free, and {what} need {bytes_text(needed)}: make room, lower "
        "checkpoint.keep_last or give another checkpoint.folder; one that cannot be written is left out"
    ]


def model_bytes(job: Job) -> int:
    """About what the model takes on disk: every row once with its state, and the network with two moments at most."""
    rows = sum(table.shape.num_rows * table.shape.row_bytes for table in job.placement.plan.tables)
    cored = [table.name for table in job.embeddings.tables if not table.stores_rows]
    rows += sum(sum(job.embeddings.cores(name).num_bytes) for name in cored)
    return rows + 3 * sum(parameter.nbytes for parameter in job.network.parameters())


def results(split: str, evaluation: Evaluation, known: Split | None) -> list[str]:
    """A small table a label: what training reached, beside what can be reached without a model, and with the best one.

    Args:
        split: its name.
        evaluation: what training reached.
        known: the split's metadata, which holds the optimum where the data were planted.
    """
    several = len(evaluation.labels) > 1
    lines = []
    for name, metrics in evaluation.labels.items():
        title = f"{split}, {name}" if several else split
        if isinstance(metrics, ValueMetrics):
            lines += _value_results(title, metrics)
        else:
            lines += _click_results(title, metrics, None if several else known)
    return lines


def _value_results(title: str, metrics: ValueMetrics) -> list[str]:
    rows = [("trained", metrics.rmse, metrics.mae), ("training mean", metrics.baseline_rmse, metrics.baseline_mae)]
    about = f"mean {metrics.mean_label:.5g}, of predictions {metrics.mean_prediction:.5g}"
    header = f"{'':<18}{'RMSE':>12}{'MAE':>12}"
    return [
        f"{title}: {metrics.samples:,} samples, {about}",
        header,
        *(f"  {name:<16}{rmse:>12.5f}{mae:>12.5f}" for name, rmse, mae in rows),
    ]


def _click_results(split: str, metrics: Metrics, known: Split | None) -> list[str]:
    entropy = binary_entropy(metrics.base_rate)
    reached = [metrics.auc, metrics.normalized_entropy, metrics.log_loss, metrics.calibration]
    rows: list[tuple[str, Sequence[float]]] = [("trained", reached)]
    if known is not None and known.optimum is not None:
        optimum = known.optimum
        rows.append(
            ("planted optimum", [optimum["auc"], optimum["log_loss"] / (entropy or math.nan), optimum["log_loss"]])
        )
    rows.append(("base rate", [0.5, 1.0, entropy, 1.0]))
    header = f"{'':<18}{'AUC':>10}{'norm. entropy':>16}{'log-loss':>12}{'calibration':>14}"
    title = f"{split}: {metrics.samples:,} samples, base rate {metrics.base_rate:.4f}"
    return [title, header, *(f"  {name:<16}{_numbers(values)}" for name, values in rows)]


def _numbers(values: Sequence[float]) -> str:
    widths = (10, 16, 12, 14)
    texts = ("undefined" if math.isnan(value) else f"{value:.5f}" for value in values)
    return "".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=False))


def _replicas(job: Job) -> list[str]:
    """A line for each number of replicas above 1: how many tables, on which ranks, how they are kept together."""
    plan, sync = job.embeddings.plan, job.embeddings.synchronization
    often = "every step" if sync.every == 1 else f"every {sync.every} steps"
    how = "gradients are summed" if sync.mode == "exact" else f"rows and moments are averaged {often}"
    lines = []
    for count in plan.replica_counts:
        if count > 1:
            number = list(plan.replicas.values()).count(count)
            of = "1 table" if number == 1 else f"each of {number} tables"
            groups = ", ".join(str(list(group)) for group in plan.grid(count).groups[:4])
            more = f" and {count - 4} more" if count > 4 else ""
            lines.append(f"{count} of {of}, on ranks {groups}{more}; {sync.mode}: {how}")
    return lines


def _ranks(job: Job) -> str:
    world_size, hosts = job.mesh.world_size, len(set(job.mesh.hosts))
    backend = "gloo" if job.mesh.group is not None else "no process group"
    threads = torch.get_num_threads()
    advice = ""
    if world_size == 1 and threads > 1 and job.embeddings.device.type == "cpu":
        advice = f"; ranks with a thread each come first: torchrun --standalone --nproc-per-node {threads}"
    return f"{world_size} on {hosts} host{'s'[: hosts > 1]}, {backend}, {threads} torch thread(s) each{advice}"


def _device(job: Job) -> str:
    where = f"cpu ({torch.get_num_threads()} thread(s))"
    if job.embeddings.device.type == "cuda":
        where = f"{job.embeddings.device} ({torch.cuda.get_device_name(job.embeddings.device)})"
    return f"train.device={job.config.train.device}: {where}; rowmesh {rowmesh.__version__}, torch {torch.__version__}"


def click_data(data: Prepared) -> list[tuple[str, str]]:
    """Lines on samples and features, and on how dense ones were transformed when the data were prepared."""
    splits = ", ".join(f"{name} {split.samples:,}" for name, split in data.splits.items())
    features = f"{data.num_dense} dense, {len(data.tables)} sparse features"
    unverified = f"; {data.verification}" if data.verification else ""
    about = f"{data.folder}: {splits} samples; {features}{unverified}"
    return [("data", about), *(("dense", text) for text in _dense(data))]


def _dense(data: Prepared) -> list[str]:
    """How dense features were transformed; nothing where there are none."""
    if data.dense_scales is None:
        advice = '; where columns differ much in size, prepare the data again with dense_transform = "standardize"'
        kind = data.schema.dense_transform
        return [f"{'transform ' + kind if kind != 'none' else 'as they are'}, not standardized{advice}"][
            : data.num_dense
        ]
    logged = sum(scale.log1p for scale in data.dense_scales)
    missing = [f"{scale.name} {scale.missing['train']:.1%}" for scale in data.dense_scales if scale.missing["train"]]
    text = f"standardized by the training split, {logged} of {data.num_dense} after a logarithm"
    return [text + (f"; missing, which read as the mean: {', '.join(missing)}" if missing else "")]


def _group(group: Any, tiers: Tiers) -> str:
    rows = sum(table.num_rows for table in group.tables)
    dtype = str(group.dtype).removeprefix("torch.")
    about = (
        f"{group.name}: {len(group.tables)} tables, {rows:,} rows × {group.dim} {dtype}, "
        f"{group.optimizer.name} lr {group.optimizer.lr:g}"
    )
    if group.caches_rows:
        where = tiers.folder or "memory"
        fast = f"{tiers.fast_share:.0%} of a rank's in fast memory, at least {tiers.fast_rows:,}"
        return f"{about}; {fast}, all in {where}"
    return about + ("" if group.stores_rows else _cores(group))


def _cores(group: Any) -> str:
    """How big the cores of a group are, beside the rows that they stand for."""
    shapes = [table.tensor_train_shape for table in group.tables]
    cores = group.dtype.itemsize * sum(shape.num_parameters for shape in shapes)
    rows = group.dtype.itemsize * sum(shape.num_rows * shape.dim for shape in shapes)
    ranks = sorted({shape.ranks for shape in shapes})
    shown = " to ".join(str(each) for each in dict.fromkeys((ranks[0], ranks[-1])))
    names = ", ".join(table.name for table in group.tables)
    return (
        f"; tensor-train cores of ranks {shown} on every rank, {bytes_text(cores)} in place of {bytes_text(rows)} of "
        f"rows: {names}"
    )


def _network(job: Job) -> str:
    parameters = sum(parameter.numel() for parameter in job.network.parameters())
    dtype = str(next(job.network.parameters()).dtype).removeprefix("torch.")
    return f"{job.config.model.name}: {_layers(job)}{parameters:,} parameters, {dtype}, on every rank"


def _layers(job: Job) -> str:
    network, projected = job.network, ""
    if isinstance(network, ProjectedDLRM):
        projected, network = f"vectors projected to {network.projection.width}, ", network.dlrm
    if not isinstance(network, DLRM):
        return "".join(f"{key} {value}, " for key, value in job.config.model.options.items())
    bottom, top = ("→".join(map(str, w)) for w in (network.bottom_widths, network.top_widths))
    return f"{projected}bottom {bottom}, top {top}, "


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {num_bytes / 1e6:,.1f} MB" for name, num_bytes in sizes.items())


def memory_of_every_rank(job: Job) -> list[dict[str, int]]:
    """Bytes by use: rows, optimizer state, buffers, network. Collective: every rank calls it."""
    network = sum(parameter.nbytes for parameter in job.network.parameters())
    own = {**job.embeddings.memory_bytes, "network": network}
    return gather_objects(job.mesh, own, SETTING_UP)

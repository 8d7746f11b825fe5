"""Warnings at the end of a run: what its numbers say went wrong, and what to try."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from rowmesh.data import Prepared
from rowmesh.data.window import SplitFile, Window
from rowmesh.mesh.together import on_rank_0
from rowmesh.run.config import Config
from rowmesh.run.evaluation import Evaluation
from rowmesh.run.job import Job
from rowmesh.run.metrics import Metrics, area_under_roc
from rowmesh.run.score_bins import sorted_keys
from rowmesh.run.stopping import EarlyStopping
from rowmesh.run.targets import is_click
from rowmesh.run.value_metrics import ValueMetrics

MOST_IDS = 5_000_000
"""Ids of the training split: with more, biases take too long."""
PRIOR, SWEEPS = 5.0, 3
LEAST_LEAD = 0.005  # of biases in AUC
RISE, FALL = 0.005, 0.002  # shares of the least validation loss
BIASES = "fitting a bias for every id"


def advice(job: Job, stopping: EarlyStopping, trained_steps: int, evaluation: Evaluation | None) -> list[str]:
    """Lines on a model that is worse than it should be. Collective: every rank calls it.

    Args:
        job: what was trained.
        stopping: what evaluations found.
        trained_steps: when training ended.
        evaluation: of the test split, where there is one.
    """
    length = "train.steps" if job.config.train.steps else "train.epochs"  # whichever training ends by
    lines = list(_on_losses(job, stopping, trained_steps))
    for number, (name, metrics) in enumerate(evaluation.labels.items() if evaluation is not None else ()):
        of = f" of {name!r}" if len(job.targets) > 1 else ""
        if isinstance(metrics, ValueMetrics):
            lines += _on_mean(job, metrics, of)
            continue
        lines += _on_base_rate(job, metrics, name, of)
        if _num_ids(job.clicks, job.config) <= MOST_IDS and job.clicks.schema.weight is None:
            lines += _on_biases(metrics, _bias_auc(job, number), of, length)
    return [f"warning   {line}" for line in lines]


def _bias_auc(job: Job, label: int) -> float:
    splits = job.config.data
    return on_rank_0(job.mesh, BIASES, lambda: bias_auc(job.clicks, splits.train, splits.test, label))


def _on_mean(job: Job, metrics: ValueMetrics, of: str) -> Iterator[str]:
    if metrics.rmse >= metrics.baseline_rmse:
        config = job.config
        yield (
            f"the model predicts{of} worse than the mean of the training labels alone (RMSE {metrics.rmse:.5g} and "
            f"{metrics.baseline_rmse:.5g}); train longer, change optimizer.lr ({config.optimizer.lr:g}) or "
            f"tables.optimizer.lr ({config.tables.optimizer.lr:g}), or prepare the label in units in which it is near 1"
        )


def _on_losses(job: Job, stopping: EarlyStopping, trained_steps: int) -> Iterator[str]:
    config, loss = job.config, "log-loss" if is_click(job.targets) else "loss"
    steps = sorted(stopping.losses)
    if not steps:
        return
    best, last = stopping.best_loss, stopping.losses[steps[-1]]
    if not stopping.patience and last > best * (1 + RISE):
        yield (
            f"the model overfits: its validation {loss} was {best:.5f} after step {stopping.best_step} and is "
            f"{last:.5f} after step {trained_steps}; give train.patience, which keeps the best, or fewer train.epochs"
        )
    if stopping.best_step == steps[-1] and len(steps) > 1 and stopping.losses[steps[-2]] > best * (1 + FALL):
        more = (
            f"train.steps above {config.train.steps}"
            if config.train.steps
            else f"train.epochs above {config.train.epochs}"
        )
        yield (
            f"the validation {loss} was still falling when training ended ({stopping.losses[steps[-2]]:.5f}, then "
            f"{best:.5f}); give {more}"
        )


def _on_base_rate(job: Job, metrics: Metrics, label: str, of: str) -> Iterator[str]:
    if not metrics.normalized_entropy >= 1:
        return
    length, train = "", job.config.train
    if not train.patience:
        steps = f"change train.steps ({train.steps}) or " if train.steps else ""
        length = f"{steps}give train.patience so that training stops in time, "
    rate, config = job.data.splits[job.config.data.train].label_means[label], job.config
    yield (
        f"the model predicts{of} worse than the base rate alone (normalized entropy "
        f"{metrics.normalized_entropy:.4f}, 1 or more); lower optimizer.lr ({config.optimizer.lr:g}) or "
        f"tables.optimizer.lr ({config.tables.optimizer.lr:g}), {length}"
        f"and see whether the test split is like the training split: positive rates are "
        f"{metrics.base_rate:.4f} and {rate:.4f}, and {_rarest(job)}"
    )


def _rarest(job: Job) -> str:
    """Which feature has most ids in the test split that training did not have."""
    split = job.config.data.test
    table = max(job.data.tables, key=lambda each: each.rare_share.get(split, 0.0))
    share = table.rare_share.get(split, 0.0)
    return f"{share:.0%} of the test split's ids of {table.name!r} are rare or unseen in training"


def _on_biases(metrics: Metrics, auc: float, of: str, length: str) -> Iterator[str]:
    if auc > metrics.auc + LEAST_LEAD:
        yield (
            f"one number for each id, without any interaction, reaches AUC {auc:.5f}, and the model{of} "
            f"{metrics.auc:.5f}; train longer or with other rates (leave out data.batch_size, {length} and the "
            "learning rates to have them chosen), and look at the scale of dense features"
        )


def _num_ids(data: Prepared, config: Config) -> int:
    return data.splits[config.data.train].samples * len(data.tables)


def bias_auc(data: Prepared, train: str, test: str, label: int = 0) -> float:
    """The AUC on `test` of a sum of one bias for each id, fitted on `train`; multi-hot features are left out.

    Newton's step for the biases of one feature after the other, each as if PRIOR samples spoke for 0:
    w += Σ(y − p) / (Σ p(1 − p) + PRIOR / 4). NaN where `test` has one class only.
    """
    window = _window(data, train)
    clicked = window.labels[label]
    sizes = [table.num_rows for table in data.tables if not table.multi_hot]
    rate = min(max(float(clicked.mean()), 1e-6), 1 - 1e-6)
    base = float(np.log(rate / (1 - rate)))
    biases, logits = [np.zeros(size) for size in sizes], np.full(len(clicked), base)
    for _ in range(SWEEPS):
        for bias, ids in zip(biases, window.ids, strict=True):
            change = _newton(ids, clicked, logits, len(bias))
            bias += change
            logits += change[ids]
    held_out = _window(data, test)
    scores = base + sum((bias[ids] for bias, ids in zip(biases, held_out.ids, strict=True)), start=np.zeros(1))
    scores = np.broadcast_to(scores, held_out.labels[label].shape).astype(np.float32)
    labels = held_out.labels[label].astype(np.uint8)
    return area_under_roc(sorted_keys(scores, labels), int(labels.sum()))


def _newton(
    ids: npt.NDArray[np.int32], labels: npt.NDArray[np.float32], logits: npt.NDArray[np.float64], size: int
) -> npt.NDArray[np.float64]:
    predicted = 1 / (1 + np.exp(-logits))
    slope = np.bincount(ids, labels - predicted, size)
    return slope / (np.bincount(ids, predicted * (1 - predicted), size) + PRIOR / 4)


def _window(data: Prepared, split: str) -> Window:
    file = SplitFile(data, split)
    return file.window(range(file.num_blocks))

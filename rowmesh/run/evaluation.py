"""Evaluation: the metrics of a split, label by label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from rowmesh.errors import RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.run.metrics import Metrics, Predictions
from rowmesh.run.targets import Target
from rowmesh.run.value_metrics import ValueMetrics, ValuePredictions


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts every label of a split.

    Attributes:
        labels: label → its metrics, in the order of the labels.
        loss: the sum over labels of log-loss or mean squared error, each times its `train.loss_weights`; of a single
            label without such a weight its own. Early stopping looks at it.
    """

    labels: Mapping[str, Metrics | ValueMetrics]
    loss: float

    @property
    def first(self) -> Metrics:
        """The metrics of the first label.

        Raises:
            RowmeshError: it is trained as a value.
        """
        name, metrics = next(iter(self.labels.items()))
        if not isinstance(metrics, Metrics):
            raise RowmeshError(f"label {name!r} is predicted as a value, which has no AUC or log-loss; see .labels")
        return metrics

    @property
    def samples(self) -> int:
        """How many samples the split has."""
        return next(iter(self.labels.values())).samples

    @property
    def auc(self) -> float:
        """The AUC of the first label."""
        return self.first.auc

    @property
    def log_loss(self) -> float:
        """The log-loss of the first label."""
        return self.first.log_loss

    @property
    def text(self) -> str:
        """The most telling numbers, in a line."""
        parts = [_short(metrics) for metrics in self.labels.values()]
        if len(parts) == 1:
            return parts[0]
        return "; ".join(
            [f"loss {self.loss:.5f}", *(f"{n}: {part}" for n, part in zip(self.labels, parts, strict=True))]
        )

    def as_record(self) -> dict[str, Any]:
        """The numbers, for a line of `metrics.jsonl`: of several labels `auc/NAME` and so on, and the `loss`."""
        if len(self.labels) == 1:
            return next(iter(self.labels.values())).as_record()
        record: dict[str, Any] = {"samples": self.samples, "loss": self.loss}
        for name, metrics in self.labels.items():
            record |= {f"{key}/{name}": value for key, value in metrics.as_record().items() if key != "samples"}
        return record

    def as_file(self) -> dict[str, Any]:
        """The same with score bins, for `evaluation/SPLIT.json`: of several labels in `labels`, by name."""
        records = {name: metrics.as_record() | _bins(metrics) for name, metrics in self.labels.items()}
        if len(records) == 1:
            return next(iter(records.values()))
        return {"samples": self.samples, "loss": self.loss, "labels": records}


class AllPredictions:
    """Collects outputs and labels of one evaluation on each rank.

    Args:
        targets: what is predicted.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._of = [Predictions() if t.loss == "binary" else ValuePredictions(t.mean) for t in targets]

    def add(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> None:
        """Adds a batch: outputs and labels `[B]`, or `[B, L]` of several labels; weights `[B]`.

        Raises:
            DataError: a number is not finite, or a label none of its target.
        """
        if len(self._of) == 1:
            self._of[0].add(outputs, labels, weights)
            return
        for number, predictions in enumerate(self._of):
            predictions.add(outputs[:, number], labels[:, number], weights)

    def metrics(self, mesh: Mesh, doing: str) -> Evaluation:
        """The metrics of everything added on all ranks. Collective and blocking: all get the same result.

        Raises:
            DataError: on every rank, where there are no samples, or none with a weight.
            PeerError: a rank died, or did not come within the mesh's timeout; names it.
        """
        found = {
            target.name: predictions.metrics(mesh, doing)
            for target, predictions in zip(self._targets, self._of, strict=True)
        }
        losses = [target.loss_weight * found[target.name].loss for target in self._targets]
        return Evaluation(found, sum(losses[1:], start=losses[0]))


def _short(metrics: Metrics | ValueMetrics) -> str:
    if isinstance(metrics, Metrics):
        return f"AUC {metrics.auc:.5f}, log-loss {metrics.log_loss:.5f}"
    return f"RMSE {metrics.rmse:.5f}, MAE {metrics.mae:.5f}"


def _bins(metrics: Metrics | ValueMetrics) -> dict[str, Any]:
    return {"score_bins": asdict(metrics.score_bins)} if isinstance(metrics, Metrics) else {}

"""Metrics of predicted values, such as ratings, exact over any number of ranks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rowmesh.errors import DataError
from rowmesh.mesh import Mesh
from rowmesh.mesh.together import on_rank_0
from rowmesh.run.metrics import Floats, check_labels, check_shapes, check_weights, finite, floats, gathered, weighed


@dataclass(frozen=True, kw_only=True)
class ValueMetrics:
    """How well predictions meet labels of any number; means are by sample weights where there are any.

    Attributes:
        samples: how many there are.
        mean_label, mean_prediction: over the samples.
        rmse: the root of the mean squared error.
        mae: the mean absolute error.
        baseline_rmse, baseline_mae: those of always predicting the mean of the training labels.
    """

    samples: int
    mean_label: float
    mean_prediction: float
    rmse: float
    mae: float
    baseline_rmse: float
    baseline_mae: float

    @property
    def loss(self) -> float:
        """The mean squared error."""
        return self.rmse**2

    def as_record(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        return asdict(self)

    def to_plain(self) -> dict[str, Any]:
        """To be sent to other ranks."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Any) -> Self:
        """The metrics that another rank sent."""
        return cls(**values)


class ValuePredictions:
    """Collects the predictions and labels of one evaluation on each rank.

    Args:
        baseline: the mean of the training labels.

    Example:
        >>> import torch
        >>> predictions = ValuePredictions(baseline=3.0)
        >>> predictions.add(torch.tensor([2.0, 5.0]), torch.tensor([1.0, 5.0]))
        >>> predictions.metrics().mae, predictions.metrics().baseline_mae
        (0.5, 2.0)
    """

    def __init__(self, baseline: float) -> None:
        self._baseline = baseline
        self._parts: list[tuple[Floats, Floats, Floats]] = []

    def add(self, values: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch: predictions, labels and sample weights `[B]`, kept as float32, those of float64 as they are.

        A batch that is refused adds nothing.

        Raises:
            DataError: predictions, labels and weights are not one for each sample; a number is not finite; a prediction
                is too large for float32; a weight is below 0.
        """
        check_shapes("predictions", values, labels, weights)
        kept = finite(values, "predictions")
        check_labels(labels, kind="value")
        if weights is not None:
            check_weights(weights)
        self._parts.append((kept, floats(labels), weighed(weights, len(kept))))

    def metrics(self, mesh: Mesh | None = None, doing: str = "computing metrics") -> ValueMetrics:
        """The metrics of everything added on all ranks.

        Collective and blocking: every rank calls it, all get the same result. Moves 12 bytes a sample to rank 0, and
        4 more for each number that is float64.

        Raises:
            DataError: on every rank, where there are no samples, or all weights are 0.
            PeerError: a rank died, or did not come within the mesh's timeout; names it.
        """
        mesh = mesh or Mesh()
        empty = np.empty(0, np.float32)
        columns = list(zip(*self._parts, strict=True)) or [(), (), ()]
        values, labels, weights = (gathered(np.concatenate([empty, *parts]), mesh, doing) for parts in columns)
        return on_rank_0(mesh, doing, lambda: compute_values(values, labels, weights, self._baseline), ValueMetrics)


def compute_values(values: Floats, labels: Floats, weights: Floats, baseline: float) -> ValueMetrics:
    """The metrics of predictions, labels and weights `[n]`.

    Raises:
        DataError: there are no samples, or all weights are 0.
    """
    if len(values) == 0:
        raise DataError("no samples to evaluate: the split is empty")
    z, y, w = (each.astype(np.float64) for each in (values, labels, weights))
    if not (total := float(w.sum())) > 0:
        raise DataError("the weights of all samples are 0: there is nothing to evaluate")

    def mean(each: npt.NDArray[np.float64]) -> float:
        return float((w * each).sum() / total)

    return ValueMetrics(
        samples=len(z),
        mean_label=mean(y),
        mean_prediction=mean(z),
        rmse=math.sqrt(mean((z - y) ** 2)),
        mae=mean(np.abs(z - y)),
        baseline_rmse=math.sqrt(mean((baseline - y) ** 2)),
        baseline_mae=mean(np.abs(baseline - y)),
    )

"""Progressive validation: every sample is predicted before it is trained on, and windows of them have metrics.

Source: Blum, Kalai and Langford, "Beating the Hold-Out: Bounds for K-fold and Progressive Cross-Validation" (COLT
1999); McMahan et al., "Ad Click Prediction: a View from the Trenches" (KDD 2013), §5.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.mesh.together import summed
from rowmesh.mesh.waiting import gather_objects
from rowmesh.run.evaluation import AllPredictions, Evaluation
from rowmesh.run.job import Job
from rowmesh.run.metrics import gathered

DOING = "computing the metrics of a window"


class Progressive:
    """Collects the outputs of steps, which are made before the steps change the model.

    Args:
        job: what is trained.
        every: steps of a window; 0: nothing is collected.
    """

    def __init__(self, job: Job, every: int) -> None:
        self._job, self._every = job, every
        self._parts: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def add(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> None:
        """Adds outputs and labels `[B]`, or `[B, L]`, of some samples, before they are trained on."""
        if self._every:
            self._parts.append((outputs.detach().to("cpu", torch.float32, copy=True), labels, weights))

    def after_step(self, step: int) -> Evaluation | None:
        """The metrics of the window that ends with a step, if one does, and any of its samples counts.

        Collective: every rank calls it.

        Raises:
            DataError: on every rank, where an output is not finite.
        """
        if not self._every or step % self._every:
            return None
        parts, self._parts = self._parts, []
        weight = sum(float(len(labels) if weights is None else weights.sum()) for _, labels, weights in parts)
        if not summed(self._job.mesh, weight, DOING):  # raw rows may all be bad
            return None
        predictions = AllPredictions(self._job.targets)
        for part in parts:
            predictions.add(*part)
        return predictions.metrics(self._job.mesh, DOING)

    def state_dict(self) -> dict[str, Any]:
        """The samples of all ranks, on rank 0, that a window which is not over has so far. Collective."""
        mesh = self._job.mesh
        columns = {
            "outputs": [outputs for outputs, _, _ in self._parts],
            "labels": [labels for _, labels, _ in self._parts],
            "weights": [weights for _, _, weights in self._parts if weights is not None],
        }
        found: dict[str, Any] = {"samples": gather_objects(mesh, sum(map(len, columns["labels"])), DOING)}
        for name, parts in columns.items():
            found[name] = torch.from_numpy(gathered(np.concatenate([_NONE, *map(_flat, parts)]), mesh, DOING))
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with a window: every rank with what it had; on another number of ranks, rank 0 with all."""
        mesh, sizes = self._job.mesh, state["samples"]
        if len(sizes) != mesh.world_size:
            sizes = [sum(sizes), *([0] * (mesh.world_size - 1))]
        own = slice(sum(sizes[: mesh.rank]), sum(sizes[: mesh.rank + 1]))
        num_labels = len(self._job.targets)
        shape = (-1, num_labels) if num_labels > 1 else (-1,)
        outputs, labels = (state[name].view(shape)[own] for name in ("outputs", "labels"))
        if self._every and len(labels):
            self._parts = [(outputs, labels, state["weights"][own] if len(state["weights"]) else None)]


_NONE = np.empty(0, np.float32)


def _flat(values: Tensor) -> NDArray[np.float32]:
    return values.to("cpu", torch.float32).numpy().ravel()

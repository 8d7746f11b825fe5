"""Metrics of click predictions, exact over any number of ranks.

Every rank keeps the logits and labels it has seen (5 bytes a sample), rank 0 gathers them and needs up
to 72 bytes a sample more while it ranks them: 7 GB for a test set of 89 million samples, a day of Criteo
Terabyte. A histogram would need less and be inexact.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.errors import DataError
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import complete, gather_objects
from rowmesh.train.score_bins import Keys, Labels, Logits, ScoreBins, sorted_keys
from rowmesh.train.together import on_rank_0


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """How well logits predict labels of 0 and 1.

    Attributes:
        samples: how many there are.
        base_rate: the share of labels that are 1.
        auc: the probability that a random positive scores above a random negative, ties counting half;
            NaN where one of the classes is absent.
        log_loss: the mean of −ln p(label), in nats.
        normalized_entropy: log_loss over that of always predicting the base rate (He et al., ADKDD'14);
            NaN where one of the classes is absent.
        calibration: sum of predictions over sum of labels; NaN without positives.
        score_bins: samples and positives by score, for curves.
    """

    samples: int
    base_rate: float
    auc: float
    log_loss: float
    normalized_entropy: float
    calibration: float
    score_bins: ScoreBins = field(repr=False)

    def as_record(self) -> dict[str, Any]:
        """The numbers, for JSON, which has no NaN: what is undefined becomes null."""
        numbers = {key: value for key, value in asdict(self).items() if key != "score_bins"}
        return {key: None if value != value else value for key, value in numbers.items()}

    def to_plain(self) -> dict[str, Any]:
        """To be sent to other ranks."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Any) -> Self:
        """What another rank sent."""
        return cls(**dict(values, score_bins=ScoreBins.from_plain(values["score_bins"])))


class Predictions:
    """Collects the logits and labels of one evaluation on each rank.

    Example:
        >>> predictions = Predictions()
        >>> predictions.add(torch.tensor([-1.0, 0.5, 2.0]), torch.tensor([0.0, 1.0, 1.0]))
        >>> predictions.metrics().auc
        1.0
    """

    def __init__(self) -> None:
        self._logits: list[Logits] = []
        self._labels: list[Labels] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch: logits `[B]` of any floating dtype, kept as float32; labels `[B]`, each 0 or 1.

        Raises:
            DataError: a logit is not finite, or too large for float32; a label is neither 0 nor 1.
        """
        kept = logits.detach().to("cpu", torch.float32)
        if not bool(torch.isfinite(kept).all()):
            first = logits[~torch.isfinite(kept)][0].item()
            raise DataError(
                f"{_count_bad(kept)} of {kept.numel()} logits are not finite or past ±3.4e38, the first of them "
                f"{first}: training diverged"
            )
        check_labels(labels)
        self._logits.append(kept.numpy().copy())
        self._labels.append(labels.to("cpu", torch.uint8).numpy())

    def metrics(self, mesh: Mesh | None = None, doing: str = "computing metrics") -> Metrics:
        """The metrics of everything added on all ranks.

        Collective and blocking: every rank calls it, all get the same result. Moves 5 bytes a sample to rank 0.

        Args:
            mesh: the ranks; default: this process alone.
            doing: what this is for, for the message of a PeerError.

        Raises:
            DataError: on every rank, where there are no samples.
            PeerError: a rank died, or did not come within the mesh's timeout; names it.
        """
        mesh = mesh or Mesh()
        logits = np.concatenate([np.empty(0, np.float32), *self._logits])
        labels = np.concatenate([np.empty(0, np.uint8), *self._labels])
        logits, labels = _gather(logits, mesh, doing), _gather(labels, mesh, doing)
        return on_rank_0(mesh, doing, lambda: compute(logits, labels), Metrics)


def compute(logits: Logits, labels: Labels) -> Metrics:
    """The metrics of float32 logits `[n]` and uint8 labels `[n]`.

    Raises:
        DataError: there are no samples.
    """
    if len(logits) == 0:
        raise DataError("no samples to evaluate: the split is empty")
    keys = sorted_keys(logits, labels)
    positives, samples = int(labels.sum(dtype=np.int64)), len(labels)
    predicted, loss = _sums(logits, labels)
    base_rate, log_loss = positives / samples, loss / samples
    entropy = binary_entropy(base_rate)
    return Metrics(
        samples=samples,
        base_rate=base_rate,
        auc=area_under_roc(keys, positives),
        log_loss=log_loss,
        normalized_entropy=log_loss / entropy if entropy > 0 else math.nan,
        calibration=predicted / positives if positives else math.nan,
        score_bins=ScoreBins.of(keys),
    )


def area_under_roc(keys: Keys, positives: int) -> float:
    """The exact area under the ROC curve; ties count half.

    Args:
        keys: of the samples, as `sorted_keys` gives them.
        positives: how many labels are 1.

    >>> area_under_roc(sorted_keys(np.float32([1, 1, 0, 2]), np.uint8([1, 0, 0, 1])), 2)
    0.875
    """
    negatives = len(keys) - positives
    if positives == 0 or negatives == 0:
        return math.nan
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] >> 1 != keys[:-1] >> 1]))
    positives_up_to = np.cumsum(keys & np.uint64(1), dtype=np.int64)
    ends = np.append(starts[1:], len(keys)) - 1
    positives_below = np.append(0, positives_up_to[ends][:-1])
    positives_here = positives_up_to[ends] - positives_below
    negatives_here = ends + 1 - starts - positives_here
    negatives_below = starts - positives_below
    twice_wins = int((positives_here * (2 * negatives_below + negatives_here)).sum())
    return twice_wins / (2 * positives * negatives)


def binary_entropy(rate: float) -> float:
    """−rate ln rate − (1 − rate) ln(1 − rate): the log-loss of always predicting the base rate.

    >>> binary_entropy(0.5) == math.log(2)
    True
    """
    return -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)


def check_labels(labels: Tensor) -> None:
    """Raises DataError where a label is neither 0 nor 1."""
    wrong = (labels != 0) & (labels != 1)
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0])
        raise DataError(
            f"{int(wrong.sum())} of {labels.numel()} labels are neither 0 nor 1, the first of them "
            f"{labels[position].item()} at sample {position} of the batch; prepare the data again"
        )


def _count_bad(values: Tensor) -> int:
    return int((~torch.isfinite(values)).sum())


def _sums(logits: Logits, labels: Labels, chunk: int = 1 << 20) -> tuple[float, float]:
    """Σ sigmoid(logit) and Σ log-loss in float64, a chunk at a time to bound memory."""
    predicted = loss = 0.0
    for start in range(0, len(logits), chunk):
        z = logits[start : start + chunk].astype(np.float64)
        y = labels[start : start + chunk]
        softplus = np.logaddexp(0.0, z)  # −ln(1 − p)
        predicted += float(np.exp(z - softplus).sum())
        loss += float((softplus - y * z).sum())
    return predicted, loss


def _gather(values: npt.NDArray[Any], mesh: Mesh, doing: str) -> npt.NDArray[Any]:
    """All ranks' values in rank order on rank 0; what they are elsewhere."""
    lengths = gather_objects(mesh, len(values), doing)
    if mesh.group is None or not any(lengths):
        return values
    longest = max(lengths)  # a gather takes as much of every rank
    own = torch.from_numpy(np.pad(values, (0, longest - len(values))))
    parts = torch.from_numpy(np.empty((mesh.world_size, longest), values.dtype))
    into = list(parts) if mesh.rank == 0 else None
    complete(mesh, lambda: dist.gather(own, into, group=mesh.group, group_dst=0, async_op=True), doing)
    if into is None:
        return values
    return np.concatenate([part[:length].numpy() for part, length in zip(into, lengths, strict=True)])

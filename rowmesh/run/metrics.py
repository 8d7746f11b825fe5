"""Metrics of click predictions, exact over any number of ranks.

Every rank keeps the logits and labels it has seen (5 bytes a sample; 9 where logits are float64), rank 0 gathers them
and needs up to 72 bytes a sample more while it ranks them: 7 GB for a test set of 89 million samples, a day of Criteo
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

from rowmesh.data.schema import LabelKind
from rowmesh.errors import DataError
from rowmesh.mesh import Mesh
from rowmesh.mesh.together import on_rank_0
from rowmesh.mesh.waiting import complete, gather_objects
from rowmesh.run.score_bins import Keys, Labels, ScoreBins, sorted_keys

Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """How well logits predict labels of 0 and 1; means and sums are by sample weights where there are any.

    Attributes:
        samples: how many there are.
        base_rate: the share of labels that are 1.
        auc: the probability that a random positive scores above a random negative, ties counting half (with weights, of
            pairs drawn in proportion to the product of their weights); NaN where one of the classes is absent.
        log_loss: the mean of −ln p(label), in nats.
        normalized_entropy: log_loss over that of always predicting the base rate (He et al., ADKDD'14);
            NaN where one of the classes is absent.
        calibration: the mean predicted rate over the observed one, `base_rate`; NaN without positives.
        score_bins: samples and positives by score, for curves; each sample counts 1.
    """

    samples: int
    base_rate: float
    auc: float
    log_loss: float
    normalized_entropy: float
    calibration: float
    score_bins: ScoreBins = field(repr=False)

    @property
    def loss(self) -> float:
        """The log-loss."""
        return self.log_loss

    def as_record(self) -> dict[str, Any]:
        """The numbers, for JSON, which has no NaN: what is undefined becomes null."""
        numbers = {key: value for key, value in asdict(self).items() if key != "score_bins"}
        return {key: None if value != value else value for key, value in numbers.items()}

    def to_plain(self) -> dict[str, Any]:
        """To be sent to other ranks."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Any) -> Self:
        """The metrics that another rank sent."""
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
        self._logits: list[Floats] = []
        self._labels: list[Labels] = []
        self._weights: list[Floats] = []
        self._is_weighted = False

    def add(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch: logits `[B]` of any floating dtype; labels `[B]`, each 0 or 1; sample weights `[B]`.

        Logits and weights are kept as float32, those of float64 as they are. A batch that is refused adds nothing.

        Raises:
            DataError: logits, labels and weights are not one for each sample; a logit is not finite, or too large for
                float32; a label is neither 0 nor 1; a weight is below 0 or not finite.
        """
        check_shapes("logits", logits, labels, weights)
        kept = finite(logits, "logits")
        check_labels(labels)
        if weights is not None:
            check_weights(weights)
        self._is_weighted |= weights is not None
        self._weights.append(weighed(weights, len(kept)))
        self._logits.append(kept)
        self._labels.append(labels.to("cpu", torch.uint8).numpy())

    def metrics(self, mesh: Mesh | None = None, doing: str = "computing metrics") -> Metrics:
        """The metrics of everything added on all ranks.

        Collective and blocking: every rank calls it, all get the same result. Moves 5 bytes a sample to rank 0,
        9 where they have weights, and 4 more for each of these that is float64.

        Args:
            mesh: the ranks; default: this process alone.
            doing: what this is for, for the message of a PeerError.

        Raises:
            DataError: on every rank, where there are no samples, or all weights are 0.
            PeerError: a rank died, or did not come within the mesh's timeout; names it.
        """
        mesh = mesh or Mesh()
        logits = np.concatenate([np.empty(0, np.float32), *self._logits])
        labels = np.concatenate([np.empty(0, np.uint8), *self._labels])
        logits, labels = gathered(logits, mesh, doing), gathered(labels, mesh, doing)
        weights = None
        if any(gather_objects(mesh, self._is_weighted, doing)):
            weights = gathered(np.concatenate([np.empty(0, np.float32), *self._weights]), mesh, doing)
        return on_rank_0(mesh, doing, lambda: compute(logits, labels, weights), Metrics)


def compute(logits: Floats, labels: Labels, weights: Floats | None = None) -> Metrics:
    """The metrics of logits `[n]`, uint8 labels `[n]` and weights `[n]`; None: 1 each.

    Raises:
        DataError: there are no samples, or all weights are 0.
    """
    if len(logits) == 0:
        raise DataError("no samples to evaluate: the split is empty")
    keys = sorted_keys(logits.astype(np.float32, copy=False), labels)
    if weights is None:
        positives, total = int(labels.sum(dtype=np.int64)), len(labels)
        auc = area_under_roc(keys if logits.dtype == np.float32 else _rank_keys(logits, labels), positives)
    else:
        positives, total = float(weights[labels == 1].sum(dtype=np.float64)), float(weights.sum(dtype=np.float64))
        if not total > 0:
            raise DataError("the weights of all samples are 0: there is nothing to evaluate")
        auc = weighted_area_under_roc(logits, labels, weights)
    predicted, loss = _sums(logits, labels, weights)
    base_rate, log_loss = positives / total, loss / total
    entropy = binary_entropy(base_rate)
    return Metrics(
        samples=len(labels),
        base_rate=base_rate,
        auc=auc,
        log_loss=log_loss,
        normalized_entropy=log_loss / entropy if entropy > 0 else math.nan,
        calibration=predicted / positives if positives else math.nan,
        score_bins=ScoreBins.of(keys),
    )


def area_under_roc(keys: Keys, positives: int) -> float:
    """The exact area under the ROC curve; ties count half.

    Args:
        keys: of the samples, as `sorted_keys` gives them: a label in the lowest bit, above it what rises with scores.
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


def _rank_keys(scores: Floats, labels: Labels) -> Keys:
    """As `sorted_keys`, of scores that are too fine for it: above the label stands the rank of the score."""
    keys = (np.unique(scores, return_inverse=True)[1].astype(np.uint64) << np.uint64(1)) | labels
    keys.sort()
    return keys


def weighted_area_under_roc(scores: Floats, labels: Labels, weights: Floats) -> float:
    """The area under the ROC curve of weighted samples; ties count half, NaN where one of the classes has no weight.

    >>> scores, labels = np.float32([1, 1, 0, 2]), np.uint8([1, 0, 0, 1])
    >>> weighted_area_under_roc(scores, labels, np.float32([1, 1, 1, 1]))
    0.875
    """
    order = np.argsort(scores, kind="stable")
    ordered, w, y = scores[order], weights[order].astype(np.float64), labels[order] == 1
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    positive, negative = np.add.reduceat(w * y, starts), np.add.reduceat(w * ~y, starts)
    pairs = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / pairs) if pairs > 0 else math.nan


def binary_entropy(rate: float) -> float:
    """−rate ln rate − (1 − rate) ln(1 − rate): the log-loss of always predicting the base rate.

    >>> binary_entropy(0.5) == math.log(2)
    True
    """
    return -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)


def check_shapes(what: str, values: Tensor, labels: Tensor, weights: Tensor | None) -> None:
    """Raises DataError where predictions, labels and sample weights of a batch are not `[B]` each, of one B.

    Args:
        what: the predictions are called.
        values: the predictions.
        labels, weights: theirs.
    """
    shapes = {what: list(values.shape), "labels": list(labels.shape)}
    if weights is not None:
        shapes["sample weights"] = list(weights.shape)
    if values.dim() != 1 or len({tuple(shape) for shape in shapes.values()}) > 1:
        advice = "; squeeze(1) takes the last dimension away" if values.dim() == 2 and values.shape[1] == 1 else ""
        found = ", ".join(f"{name} are {shape}" for name, shape in shapes.items())
        raise DataError(f"{found}: they must be [B] each, one of a sample{advice}")


def check_labels(labels: Tensor, name: str = "", kind: LabelKind = "binary") -> None:
    """Raises DataError where a label is neither 0 nor 1, or, of kind "value", not finite.

    Args:
        labels: `[B]`.
        name: of the label, for the message.
        kind: as the schema has it.
    """
    wrong = ~torch.isfinite(labels) if kind == "value" else (labels != 0) & (labels != 1)
    _refuse(
        labels, wrong, f"labels{f' {name!r}' if name else ''}", "not finite" if kind == "value" else "neither 0 nor 1"
    )


def check_weights(weights: Tensor, name: str = "") -> None:
    """Raises DataError where a sample weight `[B]` is below 0 or not finite, or too large for float32."""
    is_weight = torch.isfinite(weights) & (weights >= 0) & (weights <= _LARGEST)
    _refuse(weights, ~is_weight, f"sample weights{f' {name!r}' if name else ''}", "below 0 or not finite")


def _refuse(values: Tensor, wrong: Tensor, what: str, how: str) -> None:
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0])
        raise DataError(
            f"{int(wrong.sum())} of {values.numel()} {what} are {how}, the first of them "
            f"{values[position].item()} at sample {position} of the batch; prepare the data again"
        )


def finite(values: Tensor, what: str) -> Floats:
    """A copy of predictions; raises DataError where one is not finite, or too large for float32."""
    kept = floats(values)
    wrong = ~(np.abs(kept) <= _LARGEST)
    if wrong.any():
        raise DataError(
            f"{wrong.sum()} of {kept.size} {what} are not finite or past ±3.4e38, the first of them "
            f"{float(kept[wrong][0])}: training diverged"
        )
    return kept


def floats(values: Tensor) -> Floats:
    """A copy in the host's memory: float64 of float64 and of whole numbers, float32 of all that is coarser."""
    is_coarse = values.dtype.is_floating_point and values.dtype != torch.float64
    return values.detach().to("cpu", torch.float32 if is_coarse else torch.float64).numpy().copy()


def weighed(weights: Tensor | None, count: int) -> Floats:
    """Sample weights `[count]`; 1 each where there are none."""
    return np.ones(count, np.float32) if weights is None else floats(weights)


def _sums(logits: Floats, labels: Labels, weights: Floats | None, chunk: int = 1 << 20) -> tuple[float, float]:
    """Σ w·sigmoid(logit) and Σ w·log-loss in float64, a chunk at a time to bound memory."""
    predicted = loss = 0.0
    for start in range(0, len(logits), chunk):
        z = logits[start : start + chunk].astype(np.float64)
        y = labels[start : start + chunk]
        w = 1 if weights is None else weights[start : start + chunk].astype(np.float64)
        softplus = np.logaddexp(0.0, z)  # −ln(1 − p)
        predicted += float((w * np.exp(z - softplus)).sum())
        loss += float((w * (softplus - y * z)).sum())
    return predicted, loss


def gathered(values: npt.NDArray[Any], mesh: Mesh, doing: str) -> npt.NDArray[Any]:
    """All ranks' values in rank order on rank 0, of the finest dtype among them; what they are elsewhere."""
    everyone = gather_objects(mesh, [len(values), values.dtype.str], doing)
    lengths = [length for length, _ in everyone]
    values = values.astype(np.result_type(*(np.dtype(name) for _, name in everyone)), copy=False)
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

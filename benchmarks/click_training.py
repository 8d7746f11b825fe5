"""One training on small click data through an EmbeddingCollection: its loss and quality by samples seen."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.click_sets import RealRows, Synthetic, read
from rowmesh import EmbeddingCollection, EmbeddingOptimizer
from rowmesh.data import Batch, Prepared
from rowmesh.models import DLRM
from rowmesh.run.metrics import compute
from rowmesh.run.precision import Precision, computing_in
from rowmesh.tables import TableSpec

BOTTOM, TOP = (64,), (128, 64)  # hidden widths
JUDGED_AT_ONCE = 8192


@dataclass(frozen=True)
class Point:
    """What a model is worth after so many samples.

    Attributes:
        samples: trained on so far.
        train_log_loss: mean over the samples since the point before, each judged before it was trained on.
        auc, log_loss, accuracy: of held-out samples; accuracy is the share of labels that the likelier class hits.
    """

    samples: int
    train_log_loss: float
    auc: float
    log_loss: float
    accuracy: float

    def as_record(self) -> dict[str, float]:
        """For JSON."""
        return {name: round(value, 6) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Clicks:
    """The prepared data of one seed, in batches."""

    prepared: Prepared
    batches: list[Batch]
    held_out: list[Batch]

    @staticmethod
    @contextmanager
    def of(data: Synthetic | RealRows, seed: int, *, tuning: bool, batch_size: int, epochs: int) -> Iterator[Clicks]:
        """Drawn or cut, and prepared, in a folder that is deleted afterwards."""
        with tempfile.TemporaryDirectory() as folder:
            prepared = data.prepared(Path(folder), seed, tuning)
            batches = read(prepared, "train", batch_size, epochs=epochs, seed=seed)
            yield Clicks(prepared, batches, read(prepared, "test", JUDGED_AT_ONCE))


def train(
    specs: Sequence[TableSpec],
    clicks: Clicks,
    network_lr: float,
    seed: int,
    num_points: int,
    precision: Precision = "float32",
) -> list[Point]:
    """A DLRM from the start; first values are a function of the seed.

    Args:
        specs: the tables, of one dim.
        clicks: what to train on and to judge by.
        network_lr: of Adam on the dense layers.
        seed: of all first values.
        num_points: how often to judge, evenly over the batches; the last time at the end.
        precision: what the network computes in.
    """
    torch.manual_seed(seed)
    embeddings = EmbeddingCollection(specs, seed=seed)
    num_dense = clicks.batches[0].dense.shape[1]
    network = DLRM(num_dense=num_dense, num_features=len(specs), dim=specs[0].dim, bottom=BOTTOM, top=TOP)
    optimizers: list[Any] = [torch.optim.Adam(network.parameters(), lr=network_lr), EmbeddingOptimizer(embeddings)]
    ends = {len(clicks.batches) * (number + 1) // num_points for number in range(num_points)}
    points, losses, samples = [], [], 0
    for number, batch in enumerate(clicks.batches, start=1):
        losses.append(_step(network, embeddings, optimizers, batch, precision))
        samples += len(batch.labels)
        if number in ends:
            points.append(
                Point(samples, sum(losses) / len(losses), *_judged(network, embeddings, clicks.held_out, precision))
            )
            losses.clear()
    embeddings.close()
    return points


def _step(
    network: DLRM, embeddings: EmbeddingCollection, optimizers: list[Any], batch: Batch, precision: Precision
) -> float:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = F.binary_cross_entropy_with_logits(_logits(network, embeddings, batch, precision), batch.labels)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def _logits(network: DLRM, embeddings: EmbeddingCollection, batch: Batch, precision: Precision) -> Tensor:
    vectors = embeddings(batch.sparse).stacked()
    with computing_in(precision):
        return network(batch.dense, vectors).float()


@torch.no_grad()
def _judged(
    network: DLRM, embeddings: EmbeddingCollection, held_out: list[Batch], precision: Precision
) -> tuple[float, float, float]:
    logits = torch.cat([_logits(network, embeddings, batch, precision) for batch in held_out])
    labels = torch.cat([batch.labels for batch in held_out])
    metrics = compute(logits.numpy(), labels.to(torch.uint8).numpy())
    return metrics.auc, metrics.log_loss, float(((logits > 0) == (labels > 0)).double().mean())

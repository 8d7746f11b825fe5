"""Checks that end a step: values that are not finite, labels that are no labels, and lost peers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rowmesh.data import Batch
from rowmesh.data.schema import Schema
from rowmesh.errors import DataError, RowmeshError, Terminated
from rowmesh.mesh import Mesh
from rowmesh.run.metrics import check_labels, check_weights

SETTING_UP = "setting up"
"""The work of ranks before the first step, for the message of a PeerError."""
_LOST = re.compile(r"gloo|nccl|connection|timed out|broken pipe", re.IGNORECASE)


class DivergedError(RowmeshError, ArithmeticError):
    """The loss is not finite: names the step."""


def check_batch(batch: Batch, schema: Schema, where: str) -> None:
    """Raises DataError where dense values or labels are not finite, labels neither 0 nor 1, or weights below 0.

    Args:
        batch: what a rank got.
        schema: of the data: names what is wrong, and says which labels are 0 and 1.
        where: step and rank, for the message.
    """
    finite = torch.isfinite(batch.dense)
    if not bool(finite.all()):
        sample, column = (int(i) for i in (~finite).nonzero()[0])
        raise DataError(
            f"{where}: {int((~finite).sum())} of {finite.numel()} dense values are not finite, the first of "
            f"them {batch.dense[sample, column].item()} in feature {schema.dense[column]!r} of "
            f"sample {sample}; prepare the data again"
        )
    labels = batch.labels if batch.labels.dim() == 2 else batch.labels[:, None]
    try:
        for column, label in zip(labels.unbind(1), schema.labels, strict=True):
            check_labels(column, label.name, label.kind)
        if batch.weights is not None:
            check_weights(batch.weights, str(schema.weight))
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def check_loss(loss: float, where: str) -> float:
    """The loss; raises DivergedError where it is not finite."""
    if not math.isfinite(loss):
        raise DivergedError(
            f"{where}: the loss is {loss}; lower optimizer.lr or tables.optimizer.lr, or give schedule.warmup_steps"
        )
    return loss


@contextmanager
def naming_lost_peers(mesh: Mesh, doing: str) -> Iterator[None]:
    """Turns the error of a broken connection into a PeerError that names the rank that is gone.

    So it does with SIGTERM, by which torchrun ends the other ranks where one has failed.

    Args:
        mesh: the ranks.
        doing: what is interrupted, for the message.
    """
    try:
        yield
    except RowmeshError:
        raise
    except Terminated as stop:
        if dead := mesh.dead_ranks():
            raise mesh.processes.died(dead, doing) from stop
        raise
    except RuntimeError as error:
        if mesh.world_size == 1 or not _LOST.search(str(error)):
            raise
        raise mesh.peer_error(doing, error) from error

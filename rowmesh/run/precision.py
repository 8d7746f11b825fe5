"""Precision: what the dense network computes in; rows, parameters and optimizer state stay in theirs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from rowmesh.errors import ConfigurationError
from rowmesh.tables import TableSpec

Precision = Literal["float32", "bfloat16"]


def computing_in(precision: Precision) -> AbstractContextManager[object]:
    """A block in which networks on a CPU compute in a precision.

    In bfloat16 that is torch's autocast: matrix products take and give bfloat16 and are summed in float32, what needs
    more range or precision is float32. Gradients arrive in float32. Losses belong outside.

    Args:
        precision: float32 changes nothing.

    Example:
        >>> layer = torch.nn.Linear(4, 2)
        >>> with computing_in("bfloat16"):
        ...     layer(torch.ones(1, 4)).dtype
        torch.bfloat16
    """
    return torch.autocast("cpu", torch.bfloat16) if precision == "bfloat16" else nullcontext()


def check_precision(precision: Precision, device: str, tables: Sequence[TableSpec]) -> None:
    """Raises ConfigurationError where bfloat16 was asked for and cannot be."""
    if precision == "float32":
        return
    obstacle = None
    double = [table.name for table in tables if table.dtype == torch.float64]
    if device != "cpu":
        obstacle = f"is for networks on a CPU, and train.device is {device}"
    elif double:
        obstacle = f"cannot be combined with float64, which tables {', '.join(double)} are"
    if obstacle:
        raise ConfigurationError(f"train.precision={precision} {obstacle}; change that, or set train.precision=float32")

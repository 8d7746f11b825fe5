"""Synchronization: how the replicas of tables on several groups of ranks are kept together, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rowmesh.errors import ConfigurationError

Mode = Literal["exact", "average"]


@dataclass(frozen=True)
class Synchronization:
    """How replicas are kept together.

    Attributes:
        mode: "exact", gradients are summed over groups before the update; or "average", groups update for themselves,
            and rows and moments are averaged.
        every: steps between two averages (only "average").
        dense: average whole tables, as the paper does, for comparison (only "average").

    Raises:
        ConfigurationError: an unknown mode, or options that it does not have.
    """

    mode: Mode = "exact"
    every: int = 1
    dense: bool = False

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigurationError(f"synchronization must be 'exact' or 'average', got {self.mode!r}")
        if self.every < 1:
            raise ConfigurationError(f"replicas can be synchronized every 1 or more steps, not every {self.every}")
        if self.mode == "exact" and (self.every != 1 or self.dense):
            raise ConfigurationError(
                "exact synchronization is sparse and of every step; for every so many steps, or whole tables, take "
                "'average'"
            )

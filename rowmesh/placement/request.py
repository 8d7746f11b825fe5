"""Request: what a user asks of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rowmesh.errors import ConfigurationError
from rowmesh.placement.plan import TableShape

Mode = Literal["train", "infer"]
Objective = Literal["auto", "total", "slowest_link"]
WireDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The purpose of a plan, its memory, and its objective.

    Attributes:
        batch_size: samples of a rank in a step.
        mode: `train` pays for gradients and for keeping copies equal too, `infer` for fetches alone. Either way every
            copy takes the optimizer state of its table's shape, which is 0 for tables that are only served.
        deduplicated: the exchange sends a row once for all samples of a batch, as rowmesh does. False counts every
            access, as the paper does.
        extra_memory: memory for copies, as a share of what a rank holds without any; 0 makes none.
        memory_limit_bytes: for rows and their optimizer state on a rank; replaces `extra_memory` where given.
        objective: what is minimized, summed over or greatest of the links (pairs of ranks): bytes × seconds a byte.
            `auto` is `total`: gloo and one-sided reads serve a rank's peers one after another, so that its step takes
            the sum over its links. Say `slowest_link` where all links work at once and each has wires of its own.
        max_hops: 2 lets requests for other nodes be merged in their own node first, 1 does not.
        fetch_weight: what a byte fetched costs, relative to a byte of gradients. The model waits for fetches, while
            gradients can be sent behind its back: above 1, copies that take fetches off the critical path may pay even
            though they move more bytes.
        time_limit_s: for the exact strategies.
        wire_dtype: how values and gradients travel in messages; `bfloat16` where a run rounds them to half their bytes.
        allows_sums: whether tables with `send="auto"` may send sums. Not where ranks read each other's memory, on
            devices and in pipelines, where they send rows.

    Example:
        >>> Request(batch_size=512, extra_memory=0.1).limit_bytes([TableShape("item", 100, 64, 64, 4)], world_size=4)
        1870
    """

    batch_size: int
    mode: Mode = "train"
    deduplicated: bool = True
    extra_memory: float = 0.05
    memory_limit_bytes: int | None = None
    objective: Objective = "auto"
    max_hops: int = 2
    fetch_weight: float = 1.0
    time_limit_s: float = 30.0
    wire_dtype: WireDtype = "float32"
    allows_sums: bool = True

    def __post_init__(self) -> None:
        wrong = {
            "batch_size": self.batch_size < 1,
            "mode": self.mode not in get_args(Mode),
            "extra_memory": not self.extra_memory >= 0,
            "memory_limit_bytes": self.memory_limit_bytes is not None and self.memory_limit_bytes < 1,
            "objective": self.objective not in get_args(Objective),
            "max_hops": self.max_hops not in (1, 2),
            "fetch_weight": not self.fetch_weight > 0,
            "time_limit_s": not self.time_limit_s > 0,
            "wire_dtype": self.wire_dtype not in get_args(WireDtype),
        }
        allowed = {
            "batch_size": "at least 1",
            "mode": f"one of {list(get_args(Mode))}",
            "extra_memory": "at least 0",
            "memory_limit_bytes": "at least 1, or left out",
            "objective": f"one of {list(get_args(Objective))}",
            "max_hops": "1 or 2",
            "fetch_weight": "above 0",
            "time_limit_s": "above 0",
            "wire_dtype": f"one of {list(get_args(WireDtype))}",
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise ConfigurationError(
                    f"a placement's {name} is {getattr(self, name)!r}, but must be {allowed[name]}"
                )

    @property
    def training(self) -> bool:
        """Whether gradients move."""
        return self.mode == "train"

    @property
    def minimizes_slowest_link(self) -> bool:
        """Whether the slowest link is minimized; `auto` resolved."""
        return self.objective == "slowest_link"

    def limit_bytes(self, shapes: Sequence[TableShape], world_size: int, device_bytes: int | None = None) -> int:
        """The memory a rank may use for the tables.

        Args:
            shapes: of the tables.
            world_size: W.
            device_bytes: what a rank has (`Topology.memory_bytes`), never exceeded.
        """
        limit = self.memory_limit_bytes
        if limit is None:
            least = sum(shape.row_bytes * -(-shape.num_rows // world_size) for shape in shapes)
            limit = int(least * (1 + self.extra_memory))
        return limit if device_bytes is None else min(limit, device_bytes)

"""What the placement benchmarks share: plans of all strategies, and what they come to on the true frequencies."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.shapes import Cells, Shape
from rowmesh.errors import ConfigurationError
from rowmesh.placement import strategies
from rowmesh.placement.cost import Cost, cost_of, degree_of_balance
from rowmesh.placement.plan import Plan, TableShape
from rowmesh.placement.profile import Profile, TableProfile
from rowmesh.placement.request import Request
from rowmesh.placement.topology import Topology

MIB = 2.0**20
WORLD_SIZE = 8
BATCH_SIZE = 16_384


@dataclass(frozen=True)
class Found:
    """A plan and how long the search took, or why there is none."""

    plan: Plan | None
    seconds: float
    why_not: str = ""


def find(strategy: str, profile: Profile, topology: Topology, request: Request) -> Found:
    """Lets one strategy search."""
    _warm_up(strategy)
    began = time.perf_counter()
    try:
        plan = strategies.search(strategy, profile, topology, request)
    except ConfigurationError as error:
        return Found(None, time.perf_counter() - began, str(error))
    return Found(plan, time.perf_counter() - began)


@cache
def _warm_up(strategy: str) -> None:
    """Imports and compiles what a strategy needs."""
    shape = TableShape("item", 1000, 64, 64)
    profile = Profile.from_counts({"item": np.arange(1000, 0, -1)}, [shape], num_samples=501_000)
    for mode in ("infer", "train"):
        with suppress(ConfigurationError):  # there is a strategy for inference alone
            strategies.search(strategy, profile, Topology.grouped(2, 2, 2.0), Request(batch_size=16, mode=mode))


def best_of(times: int, search: Callable[[], Any]) -> float:
    """The least seconds of a few runs: what the work takes without disturbance."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        search()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def peak_mib(run: Callable[[], Any]) -> float:
    """The most memory that a function had at once beyond what was there, in MiB."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


def links(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """What is between different ranks."""
    return matrix[~np.eye(len(matrix), dtype=bool)]


def spread(values: NDArray[np.float64], digits: int = 4) -> dict[str, float]:
    """Most, mean, least, and least over most."""
    return {
        "max": round(float(values.max()), digits),
        "mean": round(float(values.mean()), digits),
        "min": round(float(values.min()), digits),
        "balance": round(degree_of_balance(values), 6),
    }


def value_links(cost: Cost) -> NDArray[np.float64]:
    """MiB of values on each link, without requests: what the paper counts as communication."""
    return links(cost.lookup_bytes) / MIB


def judge(plan: Plan, shape: Shape, request: Request) -> Cost:
    """What a plan costs by the true frequencies."""
    return cost_of(plan, shape.truth, request)


def oracle(shape: Shape) -> Profile:
    """The true frequencies in their true order, which no count can show: a bound is computed from them."""
    return Profile(
        tuple(
            _by_frequency(t, c, shape.truth.num_samples)
            for t, c in zip(shape.truth.tables, shape.truth.cells, strict=True)
        ),
        shape.truth.num_samples,
    )


def _by_frequency(table: TableProfile, cells: Cells, num_samples: int) -> TableProfile:
    frequency, place = np.unique(-cells.frequency, return_inverse=True)
    lengths = np.bincount(place, cells.rows).astype(np.int64)
    return replace(table, lengths=lengths, accesses=-frequency * num_samples)

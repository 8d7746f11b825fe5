"""The paper's strategy: balanced partitions, then copies of them.

Partitions of at most a threshold of all accesses and memory are placed to balance look-ups, then memory; the threshold
is halved until they are balanced. Inference then copies partitions by Algorithm 1, training by equations (4) and (5).

A plan keeps what can run: a partition that all ranks copied is replicated, one that some copied stays at its owner. The
paths as the paper makes them are judged by its own equations, in the plan's notes under `paths`.

Source: OPER §4. Differs: with deduplication, reads are distinct rows; Algorithm 1's balance of seconds counts them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rowmesh.errors import ConfigurationError
from rowmesh.placement import equations
from rowmesh.placement.baselines.partitions import Partitions
from rowmesh.placement.cost import degree_of_balance
from rowmesh.placement.plan import Plan
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology

FIRST_THRESHOLD = 1e-3
WANTED_BALANCE = 0.99
MAX_PARTITIONS = 20_000
# BW_P2P / BW_AllReduce of equations (4) and (5): a ring moves what it moves over the same links.
BANDWIDTH_RATIO = 1.0


def search(profile: Profile, topology: Topology, request: Request, threshold: float = FIRST_THRESHOLD) -> Plan:
    """The paper's plan.

    Args:
        profile: of the tables.
        topology: of the ranks.
        request: what is asked for.
        threshold: of partitions, to begin with; the paper's 0.1 %.

    Raises:
        ConfigurationError: no partitions were found that fit.
    """
    problem = Problem(profile, topology, request)
    parts, owner, threshold = _balanced(problem, threshold)
    paths = _paths(problem, parts, owner)
    everywhere = (paths == np.arange(topology.world_size)).all(axis=1)
    notes = {"threshold": threshold, "partitions": len(parts), "paths": judge(parts, paths, topology)}
    return problem.plan(parts.ranges(owner, everywhere), "partitioned", notes)


def judge(parts: Partitions, paths: np.ndarray, topology: Topology) -> dict[str, Any]:
    """Equations (1) to (3) for paths [P, W]: fetches alone, values without requests."""
    stored, looked_up, moved = equations.evaluate(paths, parts.stored_bytes, parts.read_bytes, topology.cost)
    links = moved[~np.eye(topology.world_size, dtype=bool)]
    return {
        "total": float(links.sum()),
        "slowest_link": float(links.max(initial=0.0)),
        "link_balance": degree_of_balance(links),
        "memory_bytes": float(stored.max()),
        "memory_balance": degree_of_balance(stored),
        "lookup_balance": degree_of_balance(looked_up),
    }


def _balanced(problem: Problem, threshold: float) -> tuple[Partitions, np.ndarray, float]:
    """Partitions and their owners: the first that fit in balance, else the finest that fit, trimmed if necessary."""
    W, limit = problem.topology.world_size, problem.limit_bytes
    problem.check_feasible()
    fitting = None
    while True:
        parts = Partitions.cut(problem.profile, problem.demand, threshold)
        owner = parts.balanced()
        stored, read = (np.bincount(owner, of, W) for of in (parts.stored_bytes, parts.read_bytes))
        if stored.max() <= limit:
            fitting = parts, owner, threshold
            if min(degree_of_balance(stored), degree_of_balance(read)) >= WANTED_BALANCE:
                return fitting
        finest = len(parts) == sum(shape.num_rows for shape in problem.shapes)
        if finest or len(parts) > MAX_PARTITIONS:
            break
        threshold /= 2
    if fitting is None and (trimmed := parts.trimmed(owner, limit)):
        return *trimmed, threshold
    if fitting is None:
        raise ConfigurationError(
            f"strategy 'partitioned': {len(parts):,} partitions need {int(stored.max()):,} bytes on the fullest rank, "
            f"{int(stored.max()) - limit:,} more than the limit of {limit:,}; allow more, or take strategy 'cyclic'"
        )
    return fitting


def _paths(problem: Problem, parts: Partitions, owner: np.ndarray) -> np.ndarray:
    from rowmesh.placement.baselines.duplication import duplicate_for_inference, pays_in_training

    W, request = problem.topology.world_size, problem.request
    spare = (problem.limit_bytes - np.bincount(owner, parts.stored_bytes, W)) * problem.allows_copies
    if not request.training:
        return duplicate_for_inference(owner, parts.read_bytes, parts.stored_bytes, spare, problem.topology.cost)
    of_row = parts.accesses / (parts.stop - parts.start) / problem.profile.num_samples * request.batch_size
    copied = pays_in_training(of_row, BANDWIDTH_RATIO, parts.stored_bytes, spare.min())
    paths = np.repeat(owner[:, None], W, axis=1)
    paths[copied] = np.arange(W)
    return paths

"""The paper's own problem, partition by partition, by integer programming: with its bound, as far as time allows.

Binary variables say which rank stores which partition; continuous ones say from which holder each rank fetches it. The
objective is the request's: the sum over links, or the slowest. With P partitions and M ranks there are P · M binaries
and P · M² others; beyond some thousand, expect a bound rather than an optimum.

Source: OPER §3.3 and Table 3 (the solver's row). Differs: HiGHS instead of Gurobi; both objectives.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from rowmesh._support import extras
from rowmesh.errors import ConfigurationError
from rowmesh.placement.baselines.partitioned import judge
from rowmesh.placement.baselines.partitions import Partitions
from rowmesh.placement.plan import Plan
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology

THRESHOLD = 0.02
_PURPOSE = "strategy 'exact_partitions' solves integer programs"
WANTED_GAP = 1e-4


def search(profile: Profile, topology: Topology, request: Request, threshold: float = THRESHOLD) -> Plan:
    """The best placement of partitions that is found in `request.time_limit_s`, for inference.

    Notes hold `paths`, judged by equations (1) to (3), `bound`, below which no placement of these partitions comes, and
    `solver_s`. As with `partitioned`, what some ranks alone have copied stays at its owner in the plan.

    Raises:
        ConfigurationError: the request is for training, or no placement was found in time.
    """
    if request.training:
        raise ConfigurationError(
            "strategy 'exact_partitions' knows fetches alone: ask for mode 'infer', or take strategy 'exact'"
        )
    problem = Problem(profile, topology, request)
    parts = Partitions.cut(profile, problem.demand, threshold)
    began = time.perf_counter()
    paths, bound = _solve(problem, parts, threshold)
    everywhere = (paths == np.arange(topology.world_size)).all(axis=1)
    holders = (paths == np.arange(topology.world_size)).argmax(axis=1)
    notes = {
        "threshold": threshold,
        "partitions": len(parts),
        "paths": judge(paths, parts.stored_bytes, parts.read_bytes, topology),
        "bound": bound,
        "solver_s": time.perf_counter() - began,
    }
    return problem.plan(parts.ranges(holders, everywhere), "exact_partitions", notes)


def _solve(problem: Problem, parts: Partitions, threshold: float) -> tuple[np.ndarray, float]:
    """(paths [P, M], bound). Variables: holds [P · M] binary, fetches [P · M · M], the slowest link."""
    optimize = extras.load("scipy.optimize", "exact", _PURPOSE)
    P, M = len(parts), problem.topology.world_size
    read, stored = parts.read_bytes / parts.read_bytes.sum(), parts.stored_bytes / problem.limit_bytes
    cost = problem.topology.cost.copy()
    np.fill_diagonal(cost, 0.0)
    scale = cost.max() if M > 1 else 1.0
    link_cost = (cost / scale).ravel()
    objective = np.zeros(P * M + P * M * M + 1)
    if problem.request.minimizes_slowest_link:
        objective[-1] = 1
    else:
        objective[P * M : -1] = np.kron(read, link_cost)
    integrality = np.concatenate([np.ones(P * M), np.zeros(P * M * M + 1)])
    most = np.concatenate([np.ones(P * M + P * M * M), [np.inf]])
    result = optimize.milp(
        objective,
        integrality=integrality,
        constraints=_constraints(read, stored, link_cost, M),
        bounds=optimize.Bounds(0, most),
        options={"time_limit": problem.request.time_limit_s, "mip_rel_gap": WANTED_GAP},
    )
    if result.x is None:
        raise ConfigurationError(
            f"strategy 'exact_partitions' found no placement of {P:,} partitions on {M} ranks in "
            f"{problem.request.time_limit_s:g} s ({result.message}); lower the threshold of {threshold:g} where they "
            "are too coarse to fit, or raise time_limit_s"
        )
    holds = result.x[: P * M].reshape(P, 1, M) > 0.5
    paths = np.where(holds, result.x[P * M : -1].reshape(P, M, M), -1.0).argmax(axis=2)
    return paths, float(result.mip_dual_bound * parts.read_bytes.sum() * scale)


def _constraints(read: np.ndarray, stored: np.ndarray, link_cost: np.ndarray, M: int) -> list[Any]:
    """Fetched from holders alone; by every rank, once; within memory; no link slower than the slowest."""
    constraint = extras.load("scipy.optimize", "exact", _PURPOSE).LinearConstraint
    sparse = extras.load("scipy.sparse", "exact", _PURPOSE)
    csr_matrix, eye, hstack, kron = sparse.csr_matrix, sparse.eye, sparse.hstack, sparse.kron
    P, links = len(read), np.flatnonzero(link_cost)
    seconds = kron(csr_matrix(read), eye(M * M)).tocsr()[links].multiply(link_cost[links][:, None])
    holder = kron(eye(P), kron(np.ones((M, 1)), eye(M)))
    slowest = csr_matrix(np.ones((len(links), 1)))

    def row(holds: Any, fetches: Any, slowest_link: Any) -> Any:
        blocks = [holds, fetches, slowest_link]
        height = next(block.shape[0] for block in blocks if block is not None)
        widths = (P * M, P * M * M, 1)
        filled = [csr_matrix((height, w)) if b is None else b for b, w in zip(blocks, widths, strict=True)]
        return hstack(filled).tocsr()

    return [
        constraint(row(-holder, eye(P * M * M), None), ub=0),
        constraint(row(None, kron(eye(P * M), np.ones((1, M))), None), 1, 1),
        constraint(row(kron(csr_matrix(stored), eye(M)), None, None), ub=1),
        constraint(row(None, seconds, -slowest), ub=0),
    ]

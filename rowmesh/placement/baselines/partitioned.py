"""The paper's strategy: balanced partitions, then copies of them.

Partitions of at most a threshold of all accesses and memory are placed to balance look-ups, then memory; the threshold
is halved until they are balanced. Inference then copies partitions by Algorithm 1, training by equations (4) and (5).

A plan keeps what can run: a partition that all ranks copied is replicated, one that some copied stays at its owner. The
paths as the paper makes them are judged by its own equations, in the plan's notes under `paths`.

Source: OPER §4. Differs: with deduplication, reads are distinct rows; Algorithm 1's balance of seconds counts them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rowmesh.errors import ConfigurationError
from rowmesh.ops.compiled import compiled
from rowmesh.placement import equations
from rowmesh.placement.baselines.partitions import Partitions
from rowmesh.placement.cost import degree_of_balance
from rowmesh.placement.pairs import Links, Spread
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
    if request.training:
        everywhere, judged = _copied_in_training(problem, parts, owner)
    else:
        paths = _paths(problem, parts, owner)
        everywhere = (paths == np.arange(topology.world_size)).all(axis=1)
        judged = judge(paths, parts.stored_bytes, parts.read_bytes, topology)
    notes = {"threshold": threshold, "partitions": len(parts), "paths": judged}
    return problem.plan(parts.ranges(owner, everywhere), "partitioned", notes)


def judge(paths: np.ndarray, stored_bytes: np.ndarray, read_bytes: np.ndarray, topology: Topology) -> dict[str, Any]:
    """Equations (1) to (3) for paths [P, W]: fetches alone, values without requests."""
    stored, looked_up, moved = equations.evaluate(paths, stored_bytes, read_bytes, topology.cost)
    links = moved[~np.eye(topology.world_size, dtype=bool)]
    return {
        "total": float(links.sum()),
        "slowest_link": float(links.max(initial=0.0)),
        "link_balance": degree_of_balance(links),
        "memory_bytes": float(stored.max()),
        "memory_balance": degree_of_balance(stored),
        "lookup_balance": degree_of_balance(looked_up),
    }


def judge_owned(stored_bytes: np.ndarray, read_bytes: np.ndarray, topology: Topology) -> dict[str, Any]:
    """`judge` where each partition is at its owner alone or on every rank, without matrices of all pairs of ranks.

    Args:
        stored_bytes: [W + 1], of the partitions of each owner, then of those on every rank.
        read_bytes: [W + 1], alike.
        topology: of the ranks.
    """
    owned = Spread(topology.world_size, topology.ranks_per_node).direct(read_bytes[:-1])
    looked_up = replace(owned, diagonal=owned.diagonal + read_bytes[-1])
    links = Links.of(owned.without_own(), topology.costs)
    stored = stored_bytes[:-1] + stored_bytes[-1]
    return {
        "total": links.total,
        "slowest_link": links.most,
        "link_balance": links.least / links.most if links.most > 0 else 1.0,
        "memory_bytes": float(stored.max()),
        "memory_balance": degree_of_balance(stored),
        "lookup_balance": degree_of_balance(Links.of(looked_up).sent * topology.own_cost),
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


def _copied_in_training(problem: Problem, parts: Partitions, owner: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """(the partitions [P] that every rank copies, how the equations judge it); all others stay with their owners."""
    W, request = problem.topology.world_size, problem.request
    of_row = parts.accesses / (parts.stop - parts.start) / problem.profile.num_samples * request.batch_size
    spare = _spare_bytes(problem, parts, owner).min()
    copied = pays_in_training(of_row, BANDWIDTH_RATIO, parts.stored_bytes, spare)
    path = np.where(copied, W, owner)
    stored, read = (np.bincount(path, of, W + 1) for of in (parts.stored_bytes, parts.read_bytes))
    return copied | (W == 1), judge_owned(stored, read, problem.topology)


def _paths(problem: Problem, parts: Partitions, owner: np.ndarray) -> np.ndarray:
    spare = _spare_bytes(problem, parts, owner)
    return duplicate_for_inference(owner, parts.read_bytes, parts.stored_bytes, spare, problem.topology.cost)


def _spare_bytes(problem: Problem, parts: Partitions, owner: np.ndarray) -> np.ndarray:
    """[W], what each rank has left for copies."""
    W = problem.topology.world_size
    return (problem.limit_bytes - np.bincount(owner, parts.stored_bytes, W)) * problem.allows_copies


def duplicate_for_inference(
    owner: np.ndarray, read_bytes: np.ndarray, stored_bytes: np.ndarray, spare_bytes: np.ndarray, L: np.ndarray
) -> np.ndarray:
    """Algorithm 1: every rank in turn copies a partition from behind its slowest link, while one fits.

    Partitions are tried in falling order of reads per byte, which the paper leaves open; fitting exactly is fitting.

    Args:
        owner: int64 [P], where each partition is.
        read_bytes: [P], what a rank reads of each in a step.
        stored_bytes: [P].
        spare_bytes: [M], what each rank has left.
        L: [M, M], seconds a byte.

    Returns:
        paths, int64 [P, M]: from which rank each rank fetches each partition.
    """
    num_ranks = len(spare_bytes)
    paths = np.repeat(owner[:, None], num_ranks, axis=1)
    seconds = np.bincount(owner, read_bytes, num_ranks)[None, :] * L
    order = np.argsort(-read_bytes / stored_bytes, kind="stable")
    _duplicate(order, stored_bytes.astype(np.float64), read_bytes, paths, seconds, spare_bytes.astype(np.float64), L)
    return paths


def pays_in_training(
    accesses_per_batch: np.ndarray, bandwidth_ratio: float, stored_bytes: np.ndarray, spare_bytes: float
) -> np.ndarray:
    """[P], which partitions are copied to all ranks, by equations (4) and (5), the most accessed first while they fit.

    T_non-dup = 2 · f · b · (M − 1) / M · S / BW_P2P and T_dup = 2 · (M − 1) / M · S / BW_AR; a copy pays where T_dup is
    less, which is f · b > BW_P2P / BW_AR.

    Args:
        accesses_per_batch: [P], f · b of a row, on average over the partition.
        bandwidth_ratio: BW_P2P / BW_AR.
        stored_bytes: [P].
        spare_bytes: what the fullest rank has left.
    """
    order = np.argsort(-accesses_per_batch, kind="stable")
    order = order[accesses_per_batch[order] > bandwidth_ratio]
    fits = np.cumsum(stored_bytes[order]) <= spare_bytes
    copied = np.zeros(len(accesses_per_batch), bool)
    copied[order[fits]] = True
    return copied


@compiled(nogil=True)
def _duplicate(order, stored, read, paths, seconds, spare, L):
    """`cursor[g, t]`: partitions before it, in order, that g fetches from t do not fit on g, and never will again."""
    num_partitions, num_ranks = paths.shape
    cursor = np.zeros((num_ranks, num_ranks), np.int64)
    position = np.empty(num_partitions, np.int64)
    for q in range(num_partitions):
        position[order[q]] = q
    stopped = np.zeros(num_ranks, np.bool_)
    while not stopped.all():
        for g in range(num_ranks):
            if stopped[g]:
                continue
            target = _slowest(seconds, g)
            q = cursor[g, target] if target >= 0 else num_partitions
            while q < num_partitions and (paths[order[q], g] != target or stored[order[q]] > spare[g]):
                q += 1
            if target >= 0:
                cursor[g, target] = q
            if q == num_partitions:
                stopped[g] = True
                continue
            p = order[q]
            paths[p, g] = g
            seconds[g, target] -= read[p] * L[g, target]
            seconds[g, g] += read[p] * L[g, g]
            spare[g] -= stored[p]
            for i in range(num_ranks):
                old = paths[p, i]
                if i != g and L[i, g] < L[i, old]:
                    paths[p, i] = g
                    seconds[i, old] -= read[p] * L[i, old]
                    seconds[i, g] += read[p] * L[i, g]
                    cursor[i, g] = min(cursor[i, g], position[p])


@compiled(nogil=True)
def _slowest(seconds, rank):
    """The rank from which another fetches for longest, or −1 where there is none."""
    target = -1
    for j in range(seconds.shape[1]):
        if j != rank and (target < 0 or seconds[rank, j] > seconds[rank, target]):
            target = j
    return target

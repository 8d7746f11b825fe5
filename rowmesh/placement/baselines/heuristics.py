"""Heuristics of others, to compare with: table by table, shard by shard, or for memory or accesses alone.

`memory_greedy`, `access_greedy`, `table_wise` and `row_wise` know nothing of a limit: `Problem.fits` says whether their
plan keeps it. None makes copies, but `torchrec_like` of whole tables.

Source: OPER §6.4.
"""

from __future__ import annotations

import heapq

import numpy as np

from rowmesh.placement.cost import ONE_HOP, REPLICATED
from rowmesh.placement.demand import Demand
from rowmesh.placement.plan import Plan, RowRange
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.cyclic_ranges import Span, cyclic_ranges
from rowmesh.placement.strategies.levels import LinkCosts, RowBytes
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology

GREEDY_ROWS = 4096


def memory_greedy(profile: Profile, topology: Topology, request: Request) -> Plan:
    """Equal bytes for every rank: all tables end to end, cut into W equal parts."""
    problem = Problem(profile, topology, request)
    W = topology.world_size
    total = sum(shape.row_bytes * shape.num_rows for shape in problem.shapes)
    before, ranges = 0, []
    for shape in problem.shapes:
        ends = [(rank + 1) * total // W - before for rank in range(W)]
        stops = [min(max(end // shape.row_bytes, 0), shape.num_rows) for end in ends[:-1]]
        ranges.append(_shards([*stops, shape.num_rows]))
        before += shape.row_bytes * shape.num_rows
    return problem.plan(ranges, "memory_greedy")


def table_wise(profile: Profile, topology: Topology, request: Request) -> Plan:
    """Whole tables, one after another to the next rank."""
    problem = Problem(profile, topology, request)
    ranges = [
        [RowRange(0, shape.num_rows, "fixed", rank=index % topology.world_size)]
        for index, shape in enumerate(problem.shapes)
    ]
    return problem.plan(ranges, "table_wise")


def row_wise(profile: Profile, topology: Topology, request: Request) -> Plan:
    """Every table in W equal shards of neighbouring rows."""
    problem = Problem(profile, topology, request)
    ranges = [_row_wise(shape.num_rows, topology.world_size) for shape in problem.shapes]
    return problem.plan(ranges, "row_wise")


def access_greedy(profile: Profile, topology: Topology, request: Request) -> Plan:
    """Row by row, the most read first, to the rank that is read least; memory does not count.

    The first rows of all tables go one by one; the others are cyclic, which keeps the loads within one row of each
    table's rest of each other.
    """
    problem = Problem(profile, topology, request)
    demand = problem.demand.falling()
    seconds = _seconds(problem, demand)
    load = seconds[ONE_HOP]
    order = np.argsort(-load, kind="stable")
    ends = np.cumsum(demand.lengths[order])
    whole = order[ends <= GREEDY_ROWS]
    heads = np.bincount(demand.table[whole], demand.lengths[whole], len(problem.shapes)).astype(int)
    rows = [(float(load[run]), int(demand.table[run])) for run in whole for _ in range(demand.lengths[run])]
    ranges: list[list[RowRange]] = [[] for _ in problem.shapes]
    ranks = [(0.0, rank) for rank in range(topology.world_size)]
    for amount, table in rows:
        busy, rank = ranks[0]
        ranges[table].append(RowRange(len(ranges[table]), len(ranges[table]) + 1, "fixed", rank=rank))
        heapq.heapreplace(ranks, (busy + amount, rank))
    rest = [
        Span(t, int(head), s.num_rows, ONE_HOP) for t, (head, s) in enumerate(zip(heads, problem.shapes, strict=True))
    ]
    started = np.array([busy for busy, _ in sorted(ranks, key=lambda entry: entry[1])])
    tails = cyclic_ranges([span for span in rest if len(span)], demand, seconds, started=started, max_head_rows=0)
    return problem.plan([head + tail for head, tail in zip(ranges, tails, strict=True)], "access_greedy")


def torchrec_like(profile: Profile, topology: Topology, request: Request) -> Plan:
    """A mix as TorchRec's planner makes it, table by table: small ones on every rank where that costs less and fits,
    big ones in row-wise shards, the others whole, each to the rank with the least to do that has room.
    """
    problem = Problem(profile, topology, request)
    W, demand = topology.world_size, problem.demand.falling()
    per_row = _seconds(problem, demand)
    whole, copied = (
        np.bincount(demand.table, per_row[kind] * demand.lengths, len(problem.shapes)) for kind in (ONE_HOP, REPLICATED)
    )
    size = np.array([shape.row_bytes * shape.num_rows for shape in problem.shapes], np.int64)
    ranges: list[list[RowRange]] = [_row_wise(shape.num_rows, W) for shape in problem.shapes]
    shard = np.array([shape.row_bytes * -(-shape.num_rows // W) for shape in problem.shapes], np.int64)
    room = np.full(W, problem.limit_bytes - shard.sum())
    load = np.full(W, float(whole.sum() / W))
    for table in np.argsort(size, kind="stable").tolist():
        num_rows = problem.shapes[table].num_rows
        without = room + shard[table]
        if copied[table] < whole[table] and size[table] <= without.min():
            ranges[table], room = [RowRange(0, num_rows, "replicated")], without - size[table]
            load += (copied[table] - whole[table]) / W
            continue
        spread = load - whole[table] / W
        fits = without >= size[table]
        if fits.any() and size[table] <= size.sum() / W:
            rank = int(np.argmin(np.where(fits, spread, np.inf)))
            ranges[table], room, load = [RowRange(0, num_rows, "fixed", rank=rank)], without, spread
            room[rank] -= size[table]
            load[rank] += whole[table]
    return problem.plan(ranges, "torchrec_like")


def _seconds(problem: Problem, demand: Demand) -> np.ndarray:
    return RowBytes.of(demand, problem.request).seconds(LinkCosts.of(problem.topology))


def _row_wise(num_rows: int, world_size: int) -> list[RowRange]:
    shard = -(-num_rows // world_size)
    return _shards([min((rank + 1) * shard, num_rows) for rank in range(world_size)])


def _shards(stops: list[int]) -> list[RowRange]:
    """A range for each rank, up to each stop, without empty ones."""
    starts = [0, *stops[:-1]]
    return [
        RowRange(start, stop, "fixed", rank=rank)
        for rank, (start, stop) in enumerate(zip(starts, stops, strict=True))
        if stop > start
    ]

"""The paper's strategy, against transcriptions of its text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.errors import ConfigurationError
from rowmesh.placement import TableShape
from rowmesh.placement.baselines.partitioned import (
    duplicate_for_inference,
    judge,
    judge_owned,
    pays_in_training,
    search,
)
from rowmesh.placement.baselines.partitions import Partitions
from rowmesh.placement.demand import Demand
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology
from tests.placement.strategies.problems import power_law, small


@settings(max_examples=60)
@given(small(), st.sampled_from([0.5, 0.1, 0.02, 0.001]))
def test_partitions_close_at_the_first_row_that_reaches_a_threshold(case, threshold):
    """§4.1, row by row."""
    profile, topology, request = case
    demand = Demand.of(profile, topology.world_size, topology.ranks_per_node, request)
    parts = Partitions.cut(profile, demand, threshold)
    most_accesses = max(1.0, threshold * sum(table.total_accesses for table in profile.tables))
    most_bytes = threshold * sum(shape.row_bytes * shape.num_rows for shape in profile.shapes)
    expected = []
    for index, table in enumerate(profile.tables):
        counts, most_rows = np.repeat(table.accesses, table.lengths), max(1, int(most_bytes / table.shape.row_bytes))
        start = 0
        for row in range(len(counts)):
            if counts[start : row + 1].sum() >= most_accesses or row + 1 - start == most_rows or row + 1 == len(counts):
                expected.append((index, start, row + 1, counts[start : row + 1].sum()))
                start = row + 1
    found = zip(parts.table.tolist(), parts.start.tolist(), parts.stop.tolist(), parts.accesses.tolist(), strict=True)
    assert list(found) == expected
    rank = np.repeat(demand.rank * demand.value_bytes[demand.table], demand.lengths)
    first = demand.first_row[parts.table]
    for k, (start, stop) in enumerate(zip(first + parts.start, first + parts.stop, strict=True)):
        assert parts.read_bytes[k] == pytest.approx(rank[start:stop].sum(), abs=1e-9)


def test_placement_is_greedy_by_reads_then_by_memory():
    """§4.2."""
    profile = power_law((5_000, 500))
    parts = Partitions.cut(profile, Demand.of(profile, 4, 4, Request(batch_size=512)), 0.01)
    owner = parts.balanced()
    load, stored = np.zeros(4), np.zeros(4)
    for k in sorted(np.flatnonzero(parts.by_access), key=lambda k: -parts.read_bytes[k]):
        assert load[owner[k]] == load.min()
        load[owner[k]] += parts.read_bytes[k]
        stored[owner[k]] += parts.stored_bytes[k]
    for k in sorted(np.flatnonzero(~parts.by_access), key=lambda k: -parts.stored_bytes[k]):
        assert stored[owner[k]] == stored.min()
        stored[owner[k]] += parts.stored_bytes[k]


def algorithm_1(order, mem, access, path, CL, available, L):
    """As printed, but for `<=` in line 7 and the order of partitions."""
    M = len(available)
    stop = [False] * M
    while not all(stop):
        for gid in range(M):
            if stop[gid]:
                continue
            others = [j for j in range(M) if j != gid]
            tid = max(others, key=lambda j: CL[gid][j])
            for p in order:
                if path[p][gid] == tid and mem[p] <= available[gid]:
                    path[p][gid] = gid
                    CL[gid][tid] -= access[p] * L[gid][tid]
                    CL[gid][gid] += access[p] * L[gid][gid]
                    available[gid] -= mem[p]
                    for i in others:
                        oid = path[p][i]
                        if L[i][gid] < L[i][oid]:
                            path[p][i] = gid
                            CL[i][oid] -= access[p] * L[i][oid]
                            CL[i][gid] += access[p] * L[i][gid]
                    break
            else:
                stop[gid] = True
    return path


@pytest.mark.parametrize(
    "topology", [Topology.uniform(3), Topology.grouped(2, 3, 4.21), Topology.grouped(3, 2, 2.0)], ids=lambda t: t.name
)
@pytest.mark.parametrize("seed", range(4))
def test_algorithm_1(topology, seed):
    rng = np.random.default_rng(seed)
    W, P = topology.world_size, 40
    owner, read, stored = rng.integers(0, W, P), rng.zipf(1.5, P).clip(max=1000) * 1.0, rng.integers(1, 10, P)
    spare = rng.integers(5, 60, W)
    paths = duplicate_for_inference(owner, read, stored, spare, topology.cost)
    order = sorted(range(P), key=lambda p: -read[p] / stored[p])
    CL = [[sum(read[p] for p in range(P) if owner[p] == j) * topology.cost[i, j] for j in range(W)] for i in range(W)]
    path = [[int(owner[p])] * W for p in range(P)]
    assert paths.tolist() == algorithm_1(order, stored, read, path, CL, spare.tolist(), topology.cost)
    holds = paths == np.arange(W)
    assert holds[np.arange(P), owner].all()
    assert np.all((holds * stored[:, None]).sum(axis=0) <= spare + np.bincount(owner, stored, W))


def test_equations_4_and_5():
    """A copy pays where T_dup < T_non-dup, as long as it fits."""
    f_times_b, stored = np.array([8.0, 0.5, 3.0, 1.5, 2.0]), np.array([10, 10, 10, 50, 10])
    M, S, ratio = 4, 64, 1.8
    non_dup, dup = 2 * f_times_b * (M - 1) / M * S * 1.0, 2 * (M - 1) / M * S * ratio
    assert pays_in_training(f_times_b, ratio, stored, 1000).tolist() == (dup < non_dup).tolist()
    assert pays_in_training(f_times_b, ratio, stored, 20).tolist() == [True, False, True, False, False]


@pytest.mark.parametrize("topology", [Topology.uniform(1), Topology.grouped(3, 2, 4.21), Topology.load("2x4")])
def test_partitions_with_one_owner_or_on_every_rank_are_judged_as_by_their_paths(topology):
    W = topology.world_size
    stored, read = np.random.default_rng(0).random((2, W + 1))
    paths = np.concatenate([np.repeat(np.arange(W)[:, None], W, axis=1), np.arange(W)[None]])
    assert judge_owned(stored, read, topology) == pytest.approx(judge(paths, stored, read, topology))


def test_a_plan_keeps_what_can_run_and_the_paths_own_cost():
    profile, topology = power_law(), Topology.grouped(2, 2, 4.21)
    request = Request(batch_size=2048, mode="infer", extra_memory=0.1)
    plan = search(profile, topology, request)
    assert {part.rule for table in plan.tables for part in table.ranges} == {"fixed", "replicated"}
    paths, cost = plan.notes["paths"], Problem(profile, topology, request).cost(plan)
    assert paths["memory_bytes"] <= Problem(profile, topology, request).limit_bytes
    values = cost.lookup_bytes * topology.cost
    assert paths["total"] < values.sum()  # some copies are not in the plan
    flat = Topology.uniform(4)
    plan = search(profile, flat, request)
    values = Problem(profile, flat, request).cost(plan).lookup_bytes * flat.cost
    assert plan.notes["paths"]["total"] == pytest.approx(values.sum(), rel=0.05)


def test_without_copies_the_plan_costs_what_its_paths_cost():
    profile, topology = power_law(), Topology.grouped(2, 2, 4.21)
    request = Request(batch_size=2048, mode="infer")
    problem = Problem(profile, topology, request)
    parts = Partitions.cut(profile, problem.demand, 0.001)
    owner = parts.balanced()
    judged = judge(np.repeat(owner[:, None], 4, axis=1), parts.stored_bytes, parts.read_bytes, topology)
    plan = problem.plan(parts.ranges(owner, np.zeros(len(parts), bool)), "partitioned")
    values = problem.cost(plan).lookup_bytes * topology.cost
    assert judged["total"] == pytest.approx(values.sum())
    assert judged["slowest_link"] == pytest.approx(values.max())
    assert judged["memory_bytes"] == max(plan.memory_bytes)


def test_the_threshold_is_halved_until_partitions_are_balanced():
    profile, topology = power_law(), Topology.uniform(8)
    plan = search(profile, topology, Request(batch_size=2048, mode="infer"), threshold=0.05)
    assert plan.notes["threshold"] < 0.05
    assert plan.notes["partitions"] > 20


def test_training_copies_rows_read_more_than_once_a_batch():
    profile, topology = power_law(), Topology.uniform(4)
    plan = search(profile, topology, Request(batch_size=2048, extra_memory=1.0))
    for index, table in enumerate(plan.tables):
        rate = np.repeat(profile.access_rate(index), profile.tables[index].lengths) * 2048
        for part in table.ranges:
            assert (rate[part.start : part.stop].mean() > 1) == (part.rule == "replicated")


def test_partitions_that_do_not_fit_are_refused():
    """One rank reads the hottest row, the other must store the rest."""
    profile = Profile.from_counts({"item": [100] + [10] * 10}, [TableShape("item", 11, 64, 64)], 1000)
    with pytest.raises(
        ConfigurationError, match=r"'partitioned': 11 partitions need 576 bytes .* 192 more than .* 384"
    ):
        search(profile, Topology.uniform(2), Request(batch_size=8, mode="infer", extra_memory=0.0))


@pytest.mark.parametrize("dims", [(16,), (16, 64, 4)])
def test_without_extra_memory_partitions_are_trimmed_to_fit(dims):
    """Balanced to a few rows, which is too much where nothing is to spare."""
    profile = power_law(sizes=(60_001, 30_000, 701, 9), dims=dims)
    request = Request(batch_size=512, mode="infer", extra_memory=0.0)
    problem = Problem(profile, Topology.uniform(8), request)
    parts = Partitions.cut(profile, problem.demand, 1e-3)
    owner = parts.balanced()
    limit = int(np.bincount(owner, parts.stored_bytes, 8).mean()) + 2 * int(problem.demand.row_bytes.max())
    assert np.bincount(owner, parts.stored_bytes, 8).max() > limit
    trimmed = parts.trimmed(owner, limit)
    assert trimmed is not None
    cut, owners = trimmed
    assert np.bincount(owners, cut.stored_bytes, 8).max() <= limit
    assert cut.read_bytes.sum() == pytest.approx(parts.read_bytes.sum())
    for table, shape in enumerate(problem.shapes):
        start, stop = (rows[cut.table == table] for rows in (cut.start, cut.stop))
        assert start[0] == 0
        assert stop[-1] == shape.num_rows
        assert np.array_equal(start[1:], stop[:-1])
    plan = search(profile, Topology.uniform(8), request)
    plan.check(problem.limit_bytes)
    assert parts.trimmed(owner, int(parts.stored_bytes.sum()) // 8 - 1000) is None

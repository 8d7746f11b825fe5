"""Which number of replicas is chosen, for which tables, and what is said where none fits."""

import re
from dataclasses import replace

import numpy as np
import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.mesh.grid import Grid
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan, TableShape
from rowmesh.placement.pairs import LinkKinds
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.problem import Problem, least_bytes
from rowmesh.placement.topology import Topology
from rowmesh.placement.two_dimensional import arrangements, compare_replicas
from rowmesh.placement.two_dimensional_cost import cost_with_replicas, group_topology
from tests.placement.problems import problem

LIMIT = 2_000_000
AVERAGE = Synchronization("average", every=4)


def hot_and_cold(topology=None, **wanted):
    """A small table of which every batch reads most rows, and one that is fifty times as big."""
    shapes = [TableShape("hot", 2_000, 64, 64), TableShape("cold", 100_000, 64, 64)]
    counts = {"hot": np.full(2_000, 50), "cold": np.ones(100_000)}
    request = Request(**{"batch_size": 2_048, "memory_limit_bytes": LIMIT, **wanted})
    return Problem(Profile.from_counts(counts, shapes, 100_000), topology or Topology.grouped(2, 2, 8.0), request)


def test_all_numbers_and_arrangements_are_compared():
    comparison = compare_replicas(problem(Topology.grouped(2, 4, 4.0)))
    alike = [(c.replicas, c.together) for c in comparison.candidates if not c.is_mixed]
    assert alike == [(1, "shards"), (2, "replicas"), (2, "shards"), (4, "replicas"), (4, "shards"), (8, "shards")]
    for candidate in comparison.candidates:
        candidate.plan.check()
        assert candidate.needed_bytes == max(candidate.plan.memory_bytes)
        chosen = {table.name for table in candidate.plan.tables if table.replicas == candidate.replicas}
        assert chosen == set(candidate.names)
        again = cost_with_replicas(
            candidate.plan,
            comparison.problem.profile,
            comparison.problem.topology,
            comparison.problem.request,
            Synchronization(),
        )
        assert candidate.total_s == again.total_s
    assert comparison.chosen.total_s == min(candidate.total_s for candidate in comparison.candidates)


@pytest.mark.parametrize("batch_size", [16, 2_048])
def test_rows_take_one_hop_where_a_second_wait_costs_more_than_it_saves(batch_size):
    topology = replace(Topology.grouped(4, 4, 8.0), latencies=LinkKinds(0.0, 1e4, 1e4))
    asked = problem(topology, batch_size=batch_size)
    one_hop = replace(asked, request=replace(asked.request, max_hops=1))
    best, other = (compare_replicas(each, "cyclic", counts=[1]) for each in (asked, one_hop))
    takes_two = any(part.two_hop for table in best.plan.tables for part in table.ranges)
    assert best.chosen.total_s <= other.chosen.total_s
    assert takes_two == (batch_size > 16)
    assert best.parts[1].plan.tables == best.plan.tables


def test_where_links_are_alike_there_is_one_arrangement():
    assert arrangements(Topology.uniform(8), 4) == ("shards",)
    assert arrangements(Topology.grouped(2, 4, 4.0), 1) == arrangements(Topology.grouped(2, 4, 4.0), 8) == ("shards",)
    assert arrangements(Topology.grouped(2, 4, 4.0), 2) == ("replicas", "shards")


def test_a_hot_table_is_replicated_where_the_cold_one_does_not_fit_twice():
    comparison = compare_replicas(hot_and_cold(), sync=AVERAGE)
    assert {table.name: table.replicas for table in comparison.plan.tables} == {"hot": 2, "cold": 1}
    assert max(comparison.plan.memory_bytes) <= LIMIT
    assert all(
        candidate.over_bytes
        for candidate in comparison.candidates
        if set(candidate.names) == {"hot", "cold"} and candidate.replicas > 1
    )
    single = comparison.candidates[0]
    assert comparison.chosen.total_s < single.total_s
    assert comparison.why.startswith("M = 2 for 1 of 2 tables, ")
    assert "; M = 1 takes " in comparison.why
    assert Plan.from_json(comparison.plan.to_json()) == comparison.plan


def test_marks_of_averages_keep_the_limit_too():
    least, marks = least_bytes(hot_and_cold().shapes, 2), 51_000
    with pytest.raises(ConfigurationError, match="no plan for 2 replicas on 4 ranks"):
        compare_replicas(hot_and_cold(memory_limit_bytes=least + marks - 1), sync=AVERAGE, counts=[2])
    compare_replicas(hot_and_cold(memory_limit_bytes=least + marks - 1), counts=[2])  # exact sums need no marks
    chosen = compare_replicas(hot_and_cold(memory_limit_bytes=least + marks), sync=AVERAGE, counts=[2]).chosen
    assert chosen.needed_bytes == max(chosen.plan.memory_bytes) + marks == least + marks


def test_copies_never_take_the_memory_beyond_the_limit():
    limit = least_bytes(hot_and_cold().shapes, 4) + 40_000
    asked = hot_and_cold(memory_limit_bytes=limit, mode="infer")
    comparison = compare_replicas(asked, sync=AVERAGE)
    fitting = [candidate for candidate in comparison.candidates if candidate.fits]
    assert any(candidate.is_mixed for candidate in fitting)
    for candidate in fitting:
        candidate.plan.check(limit)


def test_with_memory_for_all_the_table_that_gains_nothing_may_still_join():
    comparison = compare_replicas(hot_and_cold(memory_limit_bytes=100 * LIMIT), sync=AVERAGE)
    totals = {(c.replicas, c.together, len(c.names)): c.total_s for c in comparison.candidates if c.fits}
    assert comparison.chosen.total_s == min(totals.values())


def test_replicas_of_a_shard_share_hosts_where_that_is_faster():
    """As the paper deploys it: one 400 Gbit/s port a GPU is far slower than what GPUs of a host share."""
    comparison = compare_replicas(problem(Topology.grouped(8, 4, 20.0), max_hops=1), "cyclic", counts=[4])
    costs = {candidate.together: candidate.cost for candidate in comparison.candidates}
    assert costs["replicas"].sync_s < costs["shards"].sync_s
    assert costs["shards"].exchange_s < costs["replicas"].exchange_s
    assert comparison.chosen.together == min(costs, key=lambda together: costs[together].total_s)
    other = next(candidate for candidate in comparison.candidates if candidate is not comparison.chosen)
    assert comparison.cost_text(other.total_s) in comparison.why


def test_only_what_is_asked_for_is_compared():
    comparison = compare_replicas(problem(Topology.uniform(8)), counts=[4, 2])
    assert [candidate.replicas for candidate in comparison.candidates] == [2, 4]
    assert comparison.plan.replica_counts in ((2,), (4,))


def test_one_rank_has_one_replica():
    comparison = compare_replicas(problem(Topology.uniform(1)))
    assert [candidate.replicas for candidate in comparison.candidates] == [1]
    assert comparison.why.startswith("M = 1: a step takes 0 B")


def test_the_plan_of_one_replica_is_the_plan_without_groups():
    """Where no rank waits: plans without groups are compared by bytes alone."""
    from rowmesh.placement.comparison import compare

    asked = problem(Topology.grouped(2, 4, 4.21))  # without latencies, by which replicas may be planned in one hop
    plan = compare_replicas(asked, counts=[1]).plan
    assert replace(plan, notes={}) == replace(compare(asked).plan, notes={})


def test_parts_are_compared_as_groups():
    comparison = compare_replicas(hot_and_cold(), sync=AVERAGE)
    assert set(comparison.parts) == {1, 2}
    for replicas, part in comparison.parts.items():
        assert part.plan.tables == comparison.plan.part(replicas).tables
        assert part.problem.topology.world_size == 4 // replicas


def test_a_group_has_the_mean_of_the_groups_links():
    cost = np.arange(1.0, 17).reshape(4, 4)
    topology = Topology("t", 1, 4, cost, memory_bytes=100)
    group = group_topology(topology, Grid(4, 2, "replicas"))
    assert group.cost.tolist() == [[(1 + 6) / 2, (3 + 8) / 2], [(9 + 14) / 2, (11 + 16) / 2]]
    assert (group.world_size, group.memory_bytes) == (2, 100)


def test_a_number_that_does_not_divide_lists_those_that_do():
    message = "8 ranks cannot form 3 replica groups of equal size; the number of replicas can be 1, 2, 4, 8"
    with pytest.raises(ConfigurationError, match=message):
        compare_replicas(problem(Topology.uniform(8)), counts=[1, 3])


def test_what_does_not_fit_says_what_is_missing_and_how_many_ranks_it_would_take():
    with pytest.raises(
        ConfigurationError, match=r"need [\d,]+ bytes .*, [\d,]+ more than the limit of 2,000,0"
    ) as error:
        compare_replicas(hot_and_cold(), counts=[2])
    text = str(error.value)
    assert "2 replicas on 4 ranks, each of them spread over 2, need 3,264,000 bytes" in text
    assert "form 1 replica group;" in text
    ranks = int(re.search(r"use (\d+) ranks", text)[1])
    shapes = hot_and_cold().shapes
    assert ranks % 2 == 0
    assert least_bytes(shapes, ranks // 2) <= LIMIT < least_bytes(shapes, ranks // 2 - 1)
    compare_replicas(hot_and_cold(Topology.uniform(ranks)), counts=[2])


def test_rows_that_do_not_fit_once_say_how_many_ranks_it_would_take():
    with pytest.raises(ConfigurationError, match=r"every row stored once on 4 ranks needs .* use 66 ranks"):
        compare_replicas(hot_and_cold(memory_limit_bytes=100_000))


def test_a_strategy_that_does_not_look_at_the_limit_is_told_apart():
    asked = hot_and_cold(memory_limit_bytes=2_000_000)
    with pytest.raises(
        ConfigurationError, match=r"hold 6,400,000 bytes .* 4,400,000 more .* needs 1,632,000, as 'cyclic'"
    ):
        compare_replicas(asked, "table_wise", counts=[1])


def test_a_strategy_that_does_not_exist_is_refused():
    with pytest.raises(ConfigurationError, match="no placement strategy 'deal'"):
        compare_replicas(hot_and_cold(), "deal")

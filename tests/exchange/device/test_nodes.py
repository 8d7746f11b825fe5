"""Plans over several nodes, on devices: one copy a node, and rows that were planned for two hops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rowmesh.collection.module import EmbeddingCollection
from rowmesh.exchange.shard_group import one_hop
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan
from rowmesh.tables import TableSpec, Uniform
from rowmesh.tables.update_rules import SGD
from tests.collection.test_equivalence import assert_close, assert_same_bits
from tests.support.devices import assert_same_counts, train_on_device
from tests.support.plans import RULES, make_plan
from tests.support.scenario import Scenario
from tests.support.tables import table
from tests.support.training import train
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
kernels_of("route")  # or all are skipped

TABLES = (table("tag", 7, 3, "adam"), table("item", 20, 3, "adam", pooling="mean"))


def scenario_of(rule, two_hop, **options):
    plan = make_plan(TABLES, 4, 2, lambda n: (RULES[n % 4] if rule == "mixed" else rule, n, 3 * n, two_hop))
    return Scenario(
        **{"tables": TABLES, "batch_sizes": (2, 1, 0, 2), "plan": plan, "ranks_per_node": 2, "num_steps": 2} | options
    )


def check(ranks, scenario):
    """What was planned for two hops goes in one, and is counted so."""
    parts = train_on_device(ranks, scenario)
    in_one_hop = replace(scenario, plan=one_hop(scenario.plan))
    counted = ranks.run(train, in_one_hop, "collective", world_size=scenario.world_size)
    for mine, expected in zip(parts, counted, strict=True):
        assert_same_counts(mine, expected)
    theirs = ranks.run(train, scenario, "collective", world_size=scenario.world_size)
    for mine, expected in zip(parts, theirs, strict=True):
        assert_close(scenario, mine, expected)
        assert mine.owned == expected.owned


def test_all_rules_across_two_nodes(ranks):
    check(ranks, scenario_of("mixed", two_hop=True, accumulate=2, num_steps=1))


@pytest.mark.slow
@pytest.mark.parametrize("two_hop", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_across_two_nodes(ranks, rule, two_hop):
    check(ranks, scenario_of(rule, two_hop, evaluates=True))


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 3])
def test_nodes_of_other_sizes(ranks, per_node):
    plan = make_plan(TABLES, 3, per_node, lambda n: (RULES[n % 4], n, n, False))
    check(ranks, scenario_of("mixed", False, plan=plan, batch_sizes=(2, 1, 2), ranks_per_node=per_node))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "average"])
def test_nodes_within_replica_groups(ranks, mode):
    of_group = make_plan(TABLES[:1], 2, 1, lambda n: (("node", "cyclic")[n % 2], n, n, True))
    plan = Plan(tuple(replace(each, replicas=2) for each in of_group.tables), 4, 1)
    check(
        ranks,
        scenario_of("", False, tables=TABLES[:1], plan=plan, ranks_per_node=1, synchronization=Synchronization(mode)),
    )


@pytest.mark.parametrize(("rule", "per_node"), [("node", 2), ("node", 1), ("cyclic", 2), ("replicated", 2)])
def test_sums_nodes_first(ranks, rule, per_node):
    """In one step of short rows differences of order are seen."""
    tables = (TableSpec(name="a", num_rows=3, dim=16, optimizer=SGD(lr=0.5), initializer=Uniform(bound=1e-3)),)
    plan = make_plan(tables, 4, per_node, lambda n: (rule, n, n, True))
    scenario = Scenario(
        tables=tables, plan=plan, batch_sizes=(3, 2, 4, 3), bag_sizes=(2, 2), num_steps=1, ranks_per_node=per_node
    )
    theirs = ranks.run(train, scenario, "collective", world_size=4)
    for mine, expected in zip(train_on_device(ranks, scenario), theirs, strict=True):
        assert_same_bits(mine, expected)


def say_why(mesh):
    mesh = replace(mesh, hosts=(0, 1))
    plan = make_plan(TABLES, 2, 1, lambda n: ("cyclic", n, n, True))
    return EmbeddingCollection(TABLES, mesh=mesh, plan=plan, device="cuda").transport_reason


def test_says_that_two_hops_are_one(ranks):
    assert all(reason.endswith("; rows planned for two hops go in one") for reason in ranks.run(say_why))

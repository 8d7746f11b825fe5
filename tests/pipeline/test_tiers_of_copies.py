"""Tiered tables under plans with copied rows, which stay in fast memory, train the model of dense tables."""

from dataclasses import replace

import pytest

from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan
from rowmesh.tables import Tiers
from tests.pipeline.test_pipeline import assert_same, in_turn
from tests.pipeline.test_tiers import DENSE, MIXED, TIERED
from tests.pipeline.test_tiers_of_replicas import make_refused, slow, whole
from tests.support.plans import make_plan
from tests.support.scenario import Scenario

TIERS = Tiers(fast_share=0.01, fast_rows=110, verify=True, poison=True, timeout_s=20.0)
RULES = ("replicated", "cyclic", "fixed")


def plan_of(tables, world_size, per_node=None, two_hop=False, replicas=1):
    """A third of each table under each rule."""
    shards = world_size // replicas
    choose = lambda number: (RULES[(number + number // 3) % 3], number, number, two_hop)  # noqa: E731
    plan = make_plan(tables, shards, min(per_node or shards, shards), choose)
    planned = tuple(replace(table, replicas=replicas) for table in plan.tables)
    return Plan(planned, world_size, per_node or world_size)


@pytest.mark.parametrize("batch_sizes", [(7, 5), slow((5, 0, 4, 3))])
@pytest.mark.parametrize("depth", [None, 0, 2])
def test_copied_rows_stay_in_fast_memory(ranks, batch_sizes, depth):
    options = None if depth is None else {"depth": depth, "micro_batches": 3, "verify": True}
    plan = plan_of(DENSE, len(batch_sizes))
    scenario = Scenario(
        tables=DENSE, batch_sizes=batch_sizes, num_steps=6, plan=plan, evaluates=True, sharing="hot", pipeline=options
    )
    dense = whole(ranks, scenario if depth is None else in_turn(scenario))
    for tables in (TIERED, MIXED):
        assert_same(whole(ranks, replace(scenario, tables=tables, tiers=TIERS)), dense)


@pytest.mark.parametrize("setting", [Synchronization(), slow(Synchronization("average", every=2))])
@pytest.mark.parametrize("depth", [None, 3])
def test_copied_rows_in_each_replica(ranks, setting, depth):
    options = None if depth is None else {"depth": depth, "micro_batches": 2, "verify": True}
    plan = plan_of(DENSE, 4, replicas=2)
    scenario = Scenario(
        tables=DENSE, batch_sizes=(5, 3, 4, 4), num_steps=6, plan=plan, synchronization=setting, pipeline=options
    )
    dense = whole(ranks, scenario if depth is None else in_turn(scenario))
    assert_same(whole(ranks, replace(scenario, tables=TIERED, tiers=TIERS)), dense)


def test_rows_planned_for_two_hops_go_in_one(ranks):
    plan = plan_of(DENSE, 4, per_node=2, two_hop=True)
    scenario = Scenario(tables=DENSE, batch_sizes=(5, 3, 4, 4), num_steps=4, plan=plan, ranks_per_node=2)
    assert_same(whole(ranks, replace(scenario, tables=TIERED, tiers=TIERS)), whole(ranks, scenario))


def test_rows_with_a_copy_on_each_node_are_refused(ranks):
    plan = make_plan(DENSE, 2, 1, lambda number: ("node", 0, 0, False))
    scenario = Scenario(tables=TIERED, batch_sizes=(5, 3), plan=plan, ranks_per_node=1)
    errors = ranks.run(make_refused, scenario, world_size=2)
    assert len(set(errors)) == 1
    assert "tiered tables ['user', 'tag', 'item'] have rows with a copy on each node" in errors[0]

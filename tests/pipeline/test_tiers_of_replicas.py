"""Tiered tables with replicas train the model of dense tables with as many, in the plain loop and in a pipeline."""

from dataclasses import replace

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.tables import Tiers
from tests.collection.test_equivalence import on_ranks
from tests.pipeline.test_pipeline import assert_same
from tests.pipeline.test_tiers import DENSE, MIXED, TIERED
from tests.support.scenario import Scenario
from tests.support.training import merged, train

EXACT, AVERAGE, SELDOM = Synchronization(), Synchronization("average"), Synchronization("average", every=3)
TIERS = Tiers(fast_share=0.01, fast_rows=60, verify=True, poison=True, timeout_s=20.0)  # a batch of a rank and no more


def whole(ranks, scenario):
    """The model, which is the same on all replicas."""
    return merged(scenario, on_ranks(ranks, scenario, "collective"))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "batch_sizes, replicas, setting",
    [
        ((7, 5), 2, EXACT),
        ((7, 5, 3, 4), 2, SELDOM),
        ((7, 5, 3), 3, AVERAGE),
        slow((7, 5, 3, 4), 2, EXACT),
        slow((7, 5, 3), 3, EXACT),
        slow((7, 5, 3, 4), 4, EXACT),
        slow((7, 5), 2, AVERAGE),
        slow((7, 5, 3, 4), 4, SELDOM),
    ],
)
def test_replicas_of_tiers_are_those_of_dense_rows(ranks, batch_sizes, replicas, setting):
    scenario = Scenario(
        tables=DENSE, batch_sizes=batch_sizes, num_steps=6, evaluates=True, replicas=replicas, synchronization=setting
    )
    plain = whole(ranks, scenario)
    for tables in (TIERED, MIXED):
        assert_same(whole(ranks, replace(scenario, tables=tables, tiers=TIERS)), plain)


def test_a_checkpoint_of_replicas_in_tiers(ranks, tmp_path):
    scenario = Scenario(tables=DENSE, batch_sizes=(5, 3), num_steps=4, replicas=2, max_norm=0.3)
    tiered = replace(scenario, tables=TIERED, tiers=TIERS, reloads=(2,), folder=tmp_path)
    assert_same(whole(ranks, tiered), whole(ranks, scenario))


def make_refused(mesh, scenario):
    try:
        train(mesh, scenario)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_averages_of_whole_tables_are_refused(ranks):
    setting = Synchronization("average", dense=True)
    scenario = Scenario(tables=TIERED, batch_sizes=(5, 3), replicas=2, synchronization=setting)
    errors = ranks.run(make_refused, scenario, world_size=2)
    assert len(set(errors)) == 1
    assert "would read all rows of the tiered tables ['user', 'tag', 'item']" in errors[0]

"""Tiered tables with replicas train the model of dense tables with as many, in the plain loop and in a pipeline."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rowmesh.errors import ConfigurationError
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.tables import Tiers
from tests.collection.test_equivalence import on_ranks
from tests.pipeline.test_pipeline import assert_same, in_turn
from tests.pipeline.test_tiers import DENSE, MIXED, TIERED
from tests.support.jobs import pipelined_jobs
from tests.support.plans import in_groups
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


# Through a pipeline


@st.composite
def tiered_jobs(draw, world_size, replicas):
    """Jobs with a pipeline, and the same with some tables in tiers, which have hardly more room than a batch."""
    job = draw(pipelined_jobs(world_size))
    mode = draw(st.sampled_from(["exact", "exact", "average"]))
    dense = in_groups(job, replicas, draw(st.sampled_from(["shards", "replicas"])), mode)
    is_tiered = draw(st.lists(st.booleans(), min_size=len(job.tables), max_size=len(job.tables)))
    tables = tuple(
        replace(table, storage="tiered") if yes else table for table, yes in zip(job.tables, is_tiered, strict=True)
    )
    options = {**(job.pipeline or {}), "depth": draw(st.integers(0, 4)), "verify": True}
    if options["exchange"] == "naive":
        options["exchange"] = "delta"
    fast_rows = sum(job.batch_sizes) * max(job.bag_sizes[1], 1) * len(tables)
    fast_rows = max(fast_rows, sum(job.last_sizes) * max(job.bag_sizes[1], 1) * len(tables), 1)
    dense = replace(dense, pipeline=options)
    return dense, replace(dense, tables=tables, tiers=replace(TIERS, fast_rows=fast_rows))


@pytest.mark.parametrize(
    "world_size, replicas, examples", [(2, 2, 4), (4, 2, 4), slow(2, 2, 60), slow(4, 2, 60), slow(3, 3, 30)]
)
def test_rows_that_other_replicas_change_are_read_when_they_have(ranks, world_size, replicas, examples):
    """Final rows, retrieval ahead and rows by micro-batch change no bit of what is done in turn over dense rows."""

    @settings(max_examples=examples)
    @given(jobs=tiered_jobs(world_size, replicas))
    def check(jobs):
        dense, tiered = jobs
        assert_same(whole(ranks, tiered), whole(ranks, in_turn(dense, verify=False)))

    check()


def test_rows_are_final_where_no_replica_changes_them(ranks):
    """Of batches that share no row all rows come before their window opens; of those that share all, none."""
    options = {"depth": 2, "micro_batches": 2, "verify": True}
    for sharing, tables in (("none", TIERED), ("any", TIERED), ("hot", DENSE)):
        scenario = Scenario(tables=DENSE, batch_sizes=(5, 3, 4, 4), num_steps=6, sharing=sharing, pipeline=options)
        scenario = in_groups(scenario, 2)
        job = replace(scenario, tables=tables, tiers=replace(TIERS, fast_rows=130))
        assert_same(whole(ranks, job), whole(ranks, in_turn(scenario)))

"""Placement of reordered tables: plans are complete, fit, cost what they are said to, and copy the hot rows."""

import numpy as np
import pytest

from rowmesh.data import ReorderOptions, reorder
from rowmesh.data.profile import profile_prepared
from rowmesh.placement import TableShape
from rowmesh.placement.cost import cost_of
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import QUICK, search
from rowmesh.placement.topology import Topology
from rowmesh.placement.unseen import smoothed
from tests.support.cooccurrence import BATCH, draw_batches, prepare_batches


@pytest.fixture(scope="module")
def reordered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("placed")
    prepared = prepare_batches(folder, draw_batches(600))
    options = ReorderOptions(batch_size=BATCH, max_edges=200_000, max_ids=3000)
    return reorder(prepared, folder / "out", tables=["item"], options=options)


def shapes(data):
    return [TableShape(t.name, t.num_rows, value_bytes=64, gradient_bytes=64, state_bytes=4) for t in data.tables]


def exact(data):
    """The profile with a run for every row."""
    counts = {table.name: data.counts(table.name) for table in data.tables}
    return Profile.from_counts(counts, shapes(data), data.splits["train"].samples)


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("strategy", QUICK)
def test_every_strategy_makes_a_plan_that_costs_what_it_says(reordered, strategy, mode):
    topology, request = Topology.grouped(2, 2, 4.0), Request(batch_size=32, mode=mode, extra_memory=0.1)
    profile = profile_prepared(reordered, shapes(reordered))
    plan = search(strategy, profile, topology, request)
    plan.check()
    for table in plan.tables:
        assert sum(len(part) for part in table.ranges) == table.shape.num_rows
    said, true = cost_of(plan, profile, request), cost_of(plan, exact(reordered), request)
    assert (said.memory_bytes == true.memory_bytes).all()
    assert said.total_bytes == pytest.approx(true.total_bytes, rel=0.01)
    assert np.allclose(said.link_bytes, true.link_bytes, rtol=0.05, atol=0.001 * true.total_bytes)


def test_hot_rows_are_copied_as_before(reordered):
    """Where the memory for copies ends within the hot rows, the plan is that of data that were not reordered."""
    request = Request(batch_size=32, mode="infer", extra_memory=0.005)
    data = {"item": np.concatenate([reordered.counts("item")]), "other": reordered.counts("other")}
    item = reordered.bijection("item").rows(np.arange(len(data["item"])))
    by_frequency = Profile.from_counts(data | {"item": data["item"][item]}, shapes(reordered), 600 * BATCH)
    plans = [
        search("cyclic", profile, Topology.uniform(4), request)
        for profile in (by_frequency, profile_prepared(reordered, shapes(reordered)))
    ]
    copied = [[len(p) for p in plan.table("item").ranges if p.rule == "replicated"] for plan in plans]
    assert copied[0] == copied[1]
    assert 0 < sum(copied[0]) <= reordered.unordered_rows("item").start


def test_few_runs(reordered, monkeypatch):
    monkeypatch.setattr("rowmesh.placement.profile.MAX_BANDS", 16)
    profile = profile_prepared(reordered, shapes(reordered))
    rows = reordered.unordered_rows("item")
    starts = profile.tables[0].starts
    assert ((starts >= rows.start) & (starts < rows.stop)).sum() <= 16
    assert profile.tables[0].total_accesses == reordered.counts("item").sum()
    assert smoothed(profile, rare_rows=True).tables[0].total_accesses == pytest.approx(profile.tables[0].total_accesses)


def test_counted_batches(reordered):
    profile = profile_prepared(reordered, shapes(reordered), batch_size=BATCH, shuffle=False)
    rank_rows = profile.tables[0]
    assert rank_rows.batches is not None
    assert rank_rows.lengths @ rank_rows.batches <= rank_rows.total_accesses

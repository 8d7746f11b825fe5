"""Tables that send sums train the model of tables whose rows travel, to the bit."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh import SGD, EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.errors import IdRangeError
from rowmesh.placement import Plan, TableShape
from tests.support.jobs import random_jobs
from tests.support.plans import in_groups, random_plans, summing
from tests.support.scenario import Scenario
from tests.support.tables import several
from tests.support.training import merged, train
from tests.test_plans import assert_equal, check


def rows_plan(scenario, replicas=1):
    shapes = [TableShape.of(spec) for spec in scenario.tables]
    return Plan.cyclic(shapes, scenario.world_size, scenario.ranks_per_node, replicas=replicas)


def summed(scenario):
    """The job under a plan in which all tables that can send sums."""
    names = [spec.name for spec in scenario.tables]
    return replace(scenario, plan=summing(rows_plan(scenario), scenario.tables, names))


JOBS = {
    "one look-up a step": {},
    "long bags": {"bag_sizes": (0, 40)},
    "bags of one id": {"bag_sizes": (1, 1)},
    "bags of three ids": {"bag_sizes": (3, 3)},
    "weights": {"is_weighted": True},
    "weights that are trained": {"is_weighted": True, "trains_weights": True},
    "several look-ups": {"accumulate": 2},
    "clipping": {"max_norm": 0.3, "accumulate": 2},
    "scaler": {"is_scaled": True, "evaluates": True},
}


@pytest.mark.parametrize("kind", JOBS)
def test_trains_as_rows_do(ranks, kind):
    check(ranks, summed(Scenario(tables=several("adam"), batch_sizes=(4, 0, 5), **JOBS[kind])))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_summed_node_by_node(ranks, accumulate):
    """Enough equal ids for a flat sum over ranks to have other bits."""
    job = Scenario(tables=several("adagrad"), batch_sizes=(7, 6, 9, 5), bag_sizes=(0, 12), skew=3.0, ranks_per_node=2)
    check(ranks, summed(replace(job, accumulate=accumulate)))


@st.composite
def jobs(draw):
    per_node, nodes = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 4), (3, 1), (1, 3)]))
    fewest = draw(st.sampled_from([0, 0, 0, 1, 2]))
    job = replace(
        draw(random_jobs(per_node * nodes)),
        ranks_per_node=per_node,
        bag_sizes=(fewest, fewest + draw(st.sampled_from([0, 1, 5, 200]))),
        is_weighted=draw(st.booleans()),
        trains_weights=draw(st.booleans()),
        max_norm=draw(st.sampled_from([None, None, 0.3])),
    )
    plans = [draw(random_plans(job.tables, job.world_size, per_node, sums=True)) for _ in range(2)]
    names = [spec.name for spec in job.tables if draw(st.booleans())]
    moves = ((draw(st.integers(0, job.num_steps)), plans[1]),) if draw(st.booleans()) else ()
    return replace(job, plan=summing(plans[0], job.tables, names), migrations=moves)


@settings(max_examples=8)
@given(job=jobs())
def test_random_jobs(ranks, job):
    check(ranks, job)


@pytest.mark.slow
@settings(max_examples=200)
@given(job=jobs())
def test_many_random_jobs(ranks, job):
    check(ranks, job)


def check_beside(ranks, sums, rows):
    """As `check`, of jobs that are not kept."""
    whole = merged(rows, ranks.run(train, rows, "collective", world_size=rows.world_size))
    assert_equal(sums, ranks.run(train, sums, "collective", world_size=sums.world_size), whole)


@pytest.mark.parametrize("mode", ["exact", "average"])
def test_replicas(ranks, mode):
    rows = in_groups(Scenario(tables=several("adam"), batch_sizes=(4, 0, 5, 3), accumulate=2), 2, mode=mode)
    check_beside(ranks, replace(rows, plan=summing(rows.plan, rows.tables, [each.name for each in rows.tables])), rows)


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"depth": 1, "micro_batches": 2}])
def test_pipelines_and_plain_steps_in_turn(ranks, options):
    """In a pipeline rows travel; sums do in the plain steps between."""
    rows = Scenario(tables=several("adam"), batch_sizes=(4, 3), num_steps=4, pipeline=options, plain=(1,))
    check_beside(ranks, summed(rows), rows)


def test_checkpoints(ranks, tmp_path):
    def job(name):
        return Scenario(tables=several("adam"), batch_sizes=(4, 3), num_steps=4, reloads=(2,), folder=tmp_path / name)

    check_beside(ranks, summed(job("sums")), job("rows"))


# A rank pushes other look-ups than another

ITEM = TableSpec(name="item", num_rows=20, dim=4, optimizer=SGD(lr=0.5), send="sums")
TAG = TableSpec(name="tag", num_rows=9, dim=4, optimizer=SGD(lr=0.5))


def push_unequally(mesh, send):
    tables = [replace(ITEM, send=send), TAG]
    embeddings = EmbeddingCollection(tables, mesh=mesh, transport="collective", seed=3)
    optimizer = EmbeddingOptimizer(embeddings)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + mesh.rank)
        found = []
        for _ in range(3):
            bags = torch.randint(9, (2, 5), generator=generator).tolist()
            found.append(embeddings(SparseBatch.from_bags({"item": bags, "tag": bags})).values)
        weights = torch.rand(len(found), 2, 8, generator=generator)
        used = found[: (0, 2, 3)[(step + mesh.rank) % 3]]
        for values, weight in zip(used, weights, strict=False):
            (values * weight).sum().backward()
        optimizer.step()
    last = embeddings(SparseBatch.from_bags({"item": [[i] for i in range(20)], "tag": [[i % 9] for i in range(20)]}))
    embeddings.close()
    return last.values.detach()


def test_ranks_may_push_other_look_ups(ranks):
    sums, rows = (ranks.run(push_unequally, send, world_size=3) for send in ("sums", "rows"))
    for mine, theirs in zip(sums, rows, strict=True):
        assert torch.equal(mine, theirs)


# What is refused, and what is counted


def look_up_beyond(mesh, policy):
    tables = [replace(ITEM, out_of_range=policy), TAG]
    embeddings = EmbeddingCollection(tables, mesh=mesh, transport="collective", seed=3)
    batch = SparseBatch.from_bags({"item": [[1, 20 + mesh.rank], []], "tag": [[0], [1]]})
    try:
        found = embeddings(batch).values.detach()
        right = embeddings(SparseBatch.from_bags({"item": [[1, 2], []], "tag": [[0], [1]]})).values.detach()
        return torch.equal(found, right), sum(each.out_of_range.get("item", 0) for each in embeddings.counters)
    except IdRangeError as error:
        return str(error)
    finally:
        embeddings.close()


def test_ids_that_are_no_rows(ranks):
    assert ranks.run(look_up_beyond, 2, world_size=2) == [(True, 1)] * 2
    for rank, text in enumerate(ranks.run(look_up_beyond, "error", world_size=2)):
        assert f"feature 'item': 1 of 2 ids are outside table 'item' (0 to 19), the first is {20 + rank}" in text


def ids_counted(mesh, send):
    tables = [replace(ITEM, send=send), TAG]
    embeddings = EmbeddingCollection(tables, mesh=mesh, transport="collective", seed=3)
    optimizer = EmbeddingOptimizer(embeddings)
    embeddings(SparseBatch.from_bags({"item": [[1, 2, 2], [7]], "tag": [[0], [1]]})).values.sum().backward()
    optimizer.step()
    (counters,) = embeddings.counters
    embeddings.close()
    return counters.ids, counters.table_accesses, counters.table_distinct


def test_ids_are_counted_alike(ranks):
    sums, rows = (ranks.run(ids_counted, send, world_size=2) for send in ("sums", "rows"))
    assert [each[0] for each in sums] == [each[0] for each in rows]
    for which in (1, 2):
        for name in ("item", "tag"):
            mine, theirs = (sum(each[which][name] for each in found) for found in (sums, rows))
            assert mine == theirs, name

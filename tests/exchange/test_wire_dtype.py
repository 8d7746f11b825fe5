"""Rows and gradients that travel as bfloat16: the steps of a transcription, alike in every way of sending them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rowmesh import SGD, EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.errors import ConfigurationError
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.placement.cost import cost_of
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from tests.support.plans import RULES, make_plan
from tests.support.scenario import Scenario
from tests.support.tables import several, table
from tests.support.training import merged, train
from tests.test_plans import assert_equal

ROWS, DIM, STEPS, BAGS = 11, 3, 3, 5
TABLE = TableSpec(name="item", num_rows=ROWS, dim=DIM, optimizer=SGD(lr=0.5))


def ids_of(step, rank):
    return torch.randint(ROWS, (BAGS, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def weights_of(rank):
    return torch.rand(BAGS, DIM, generator=torch.Generator().manual_seed(rank))


def steps(mesh, wire_dtype):
    embeddings = EmbeddingCollection([TABLE], mesh=mesh, transport="collective", wire_dtype=wire_dtype)
    optimizer = EmbeddingOptimizer(embeddings)
    first = [(view.rows, view.values.clone()) for view in embeddings.local_rows("item")]
    vectors = []
    for step in range(STEPS):
        bags = ids_of(step, mesh.rank)
        batch = SparseBatch.from_bags({"item": bags.tolist()})
        out = embeddings(batch).values
        (out * weights_of(mesh.rank)).sum().backward()
        optimizer.step()
        vectors.append(out.detach())
    last = [(view.rows, view.values.clone()) for view in embeddings.local_rows("item")]
    (counters,) = embeddings.counters
    embeddings.close()
    return first, vectors, last, counters.bytes_received, embeddings.transport_reason


def whole(parts, which):
    found = torch.empty(ROWS, DIM)
    for part in parts:
        for rows, values in part[which]:
            found[list(rows)] = values
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_a_transcription(ranks, world_size):
    parts = ranks.run(steps, torch.bfloat16, world_size=world_size)
    rows, owner = whole(parts, 0), torch.empty(ROWS, dtype=torch.int64)
    for rank, part in enumerate(parts):
        for owned, _ in part[0]:
            owner[list(owned)] = rank
    for step in range(STEPS):
        total = torch.zeros(ROWS, DIM)
        for rank in range(world_size):
            ids, away = ids_of(step, rank), (owner != rank)[:, None]
            read = torch.where(away, rows.bfloat16().float(), rows)
            torch.testing.assert_close(parts[rank][1][step], read[ids].sum(1))
            gradient = torch.zeros(ROWS, DIM)
            gradient.index_add_(0, ids.flatten(), weights_of(rank).repeat_interleave(3, 0))
            total += torch.where(away, gradient.bfloat16().float(), gradient)
        rows = rows - 0.5 * total / world_size
    torch.testing.assert_close(whole(parts, 2), rows, rtol=1e-6, atol=1e-6)


def train_on_all_rows(mesh, tables, plan):
    """Every rank reads every row: the bytes that it sent in a step, of all groups."""
    mesh = replace(mesh, hosts=tuple(f"host {rank // plan.ranks_per_node}" for rank in range(mesh.world_size)))
    collection = EmbeddingCollection(tables, mesh=mesh, transport="collective", plan=plan, wire_dtype=torch.bfloat16)
    optimizer = EmbeddingOptimizer(collection)
    batch = SparseBatch.from_bags({spec.name: [list(range(spec.num_rows))] for spec in tables})
    for _ in range(STEPS):
        collection(batch).values.sum().backward()
        optimizer.step()
    sent = sum(counters.bytes_sent for counters in collection.counters)
    collection.close()
    return sent / STEPS


@pytest.mark.parametrize(
    ("ranges", "num_nodes"),
    [
        ((RowRange(0, 1200), RowRange(1200, 2400, "replicated")), 1),
        ((RowRange(0, 1200, two_hop=True), RowRange(1200, 2400, "replicated", two_hop=True)), 2),
        ((RowRange(0, 1200, "node"), RowRange(1200, 2400)), 2),
    ],
)
def test_bytes_are_those_that_the_cost_model_predicts(ranks, ranges, num_nodes):
    """Values and gradients narrow, also of rows that are stored as bfloat16; sums of copies whole."""
    tables = (table("a", 2400, 16, "row_wise_adagrad"), table("b", 2400, 4, "sgd", dtype=torch.bfloat16))
    shapes = [TableShape.of(spec) for spec in tables]
    plan = Plan(tuple(TablePlan(shape, ranges) for shape in shapes), 2 * num_nodes, 2)
    counted = ranks.run(train_on_all_rows, tables, plan, world_size=plan.world_size)
    accesses = {spec.name: np.full(spec.num_rows, 100) for spec in tables}  # so many that every rank wants each
    profile = Profile.from_counts(accesses, shapes, num_samples=1)
    narrow, whole = (cost_of(plan, profile, Request(batch_size=1, wire_dtype=wire)) for wire in ("bfloat16", "float32"))
    assert counted == pytest.approx(narrow.link_bytes.sum(axis=0), rel=0.02)
    assert narrow.total_bytes < 0.9 * whole.total_bytes
    assert narrow.lookup_bytes.tolist() == whole.lookup_bytes.tolist()  # what stays on a rank is as wide as before


def test_half_the_bytes_travel(ranks):
    narrow, plain = (ranks.run(steps, wire_dtype, world_size=2) for wire_dtype in (torch.bfloat16, None))
    for (*_, fewer, reason), (*_, more, _) in zip(narrow, plain, strict=True):
        assert 0.5 < fewer / more < 0.6  # keys and counts are as wide as before
        assert "rounded to bfloat16" in reason
    assert not torch.equal(whole(narrow, 2), whole(plain, 2))


TABLES = several("adam")
PLAIN = Scenario(tables=TABLES, batch_sizes=(4, 3, 5), wire_dtype=torch.bfloat16)


@pytest.mark.parametrize("exchange", ["delta", "unsplit"])
def test_a_pipeline_is_the_plain_loop(ranks, exchange):
    plain = merged(PLAIN, ranks.run(train, PLAIN, "collective", world_size=3))
    piped = replace(PLAIN, pipeline={"depth": 2, "micro_batches": 2, "exchange": exchange})
    parts = ranks.run(train, piped, "collective", world_size=3)
    for name, rows in merged(piped, parts).rows.items():
        torch.testing.assert_close(rows, plain.rows[name], rtol=1e-6, atol=1e-6)


def test_copies_stay_equal_and_rows_go_in_two_hops(ranks):
    plan = make_plan(TABLES, 4, 2, lambda number: (RULES[number % 4], number, 3 * number, True))
    scenario = Scenario(tables=TABLES, batch_sizes=(4, 3, 2, 5), plan=plan, ranks_per_node=2, wire_dtype=torch.bfloat16)
    parts = ranks.run(train, scenario, "collective", world_size=4)
    assert_equal(scenario, parts, merged(scenario, parts))  # all copies of a row
    exact = merged(scenario, ranks.run(train, replace(scenario, wire_dtype=None), "collective", world_size=4))
    for name, rows in merged(scenario, parts).rows.items():
        torch.testing.assert_close(rows, exact.rows[name], rtol=0.05, atol=0.05)


def test_nothing_is_rounded_where_nothing_travels(ranks):
    parts = ranks.run(train, PLAIN, "one_sided", world_size=3)
    assert_equal(PLAIN, parts, merged(PLAIN, ranks.run(train, replace(PLAIN, wire_dtype=None), world_size=3)))


@pytest.mark.triton
def test_a_device_rounds_alike(ranks):
    scenario = Scenario(tables=TABLES[:2], batch_sizes=(3, 2), num_steps=2, wire_dtype=torch.bfloat16)
    on_device = merged(scenario, ranks.run(train, scenario, "auto", "cuda", world_size=2))
    for name, rows in merged(scenario, ranks.run(train, scenario, "collective", world_size=2)).rows.items():
        torch.testing.assert_close(on_device.rows[name], rows, rtol=1e-5, atol=1e-5)


def test_rows_that_it_would_ruin():
    with pytest.raises(ConfigurationError, match=r"tables \['wide'\] are of float64"):
        EmbeddingCollection([table("wide", 3, 2, "sgd", dtype=torch.float64)], wire_dtype=torch.bfloat16)
    with pytest.raises(ConfigurationError, match="must be torch"):
        EmbeddingCollection([TABLE], wire_dtype=torch.float16)

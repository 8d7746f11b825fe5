"""Bytes of bags, vectors and gradients are counted as they are predicted."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rowmesh import SGD, EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.placement import Plan, TablePlan, TableShape
from rowmesh.placement.cost import cost_of
from rowmesh.placement.profile import Profile, TableProfile
from rowmesh.placement.request import Request

SAMPLES = 4
BAGS = {"long": [9, 9, 9, 9], "jagged": [1, 0, 5, 2], "pair": [2, 2, 2, 2], "rows": [2, 2, 2, 2]}
TABLES = (
    TableSpec(name="long", num_rows=50, dim=4, optimizer=SGD(lr=0.1), send="sums"),
    TableSpec(name="shared", features=("jagged", "pair"), num_rows=40, dim=4, optimizer=SGD(lr=0.1), send="sums"),
    TableSpec(
        name="wide", features=("wide",), num_rows=30, dim=8, dtype=torch.bfloat16, optimizer=SGD(lr=0.1), send="sums"
    ),
    TableSpec(name="rows", num_rows=4, dim=4, optimizer=SGD(lr=0.1)),
)
LENGTHS = BAGS | {"wide": [3, 3, 3, 3]}


def profile(weight_bytes):
    """As of 4 samples a rank, all of whose batches read all rows of the last table."""
    tables = []
    for table in TABLES:
        ids = sum(sum(LENGTHS[feature]) for feature in table.features)
        tables.append(
            TableProfile(
                TableShape.of(table),
                np.array([table.num_rows]),
                np.array([ids / table.num_rows]),
                np.array([1.0]) if table.name == "rows" else None,
                num_features=len(table.features),
                num_jagged=table.features.count("jagged"),
                weight_bytes=weight_bytes,
            )
        )
    return Profile(tuple(tables), SAMPLES, SAMPLES)


def moved(mesh, plan, is_weighted):
    """Bytes that this rank sends and receives in a step."""
    embeddings = EmbeddingCollection(TABLES, mesh=mesh, plan=plan, transport="collective")
    draw = torch.Generator().manual_seed(mesh.rank)
    bags = {}
    for table in TABLES:
        for feature in table.features:
            ids = torch.randint(table.num_rows, (sum(LENGTHS[feature]),), generator=draw)
            ids[: min(len(ids), 4)] = torch.arange(min(len(ids), 4))
            bags[feature] = [each.tolist() for each in ids.split(LENGTHS[feature])]
    batch = SparseBatch.from_bags(bags)
    if is_weighted:
        batch = replace(batch, weights=torch.rand(batch.ids.numel(), generator=draw))
    embeddings(batch).values.sum().backward()
    EmbeddingOptimizer(embeddings).step()
    return tuple(sum(getattr(each, name) for each in embeddings.counters) for name in ("bytes_sent", "bytes_received"))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_what_the_plan_predicts_is_what_is_counted(ranks, is_weighted):
    shapes = [TableShape.of(table) for table in TABLES]
    owned = [TablePlan.of_sums(shape, 1 - number % 2) for number, shape in enumerate(shapes[:3])]
    plan = Plan((*owned, *Plan.cyclic(shapes[3:], 2).tables), 2, 2)
    counted = ranks.run(moved, plan, is_weighted, world_size=2)
    predicted = profile(4 * is_weighted)
    cost = cost_of(plan, predicted, Request(batch_size=SAMPLES))
    assert [sent for sent, _ in counted] == cost.links.sent.tolist()
    assert [received for _, received in counted] == cost.links.received.tolist()

"""What synchronisation is predicted to move is what runs count."""

import numpy as np
import pytest

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan, TableShape
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.topology import Topology
from rowmesh.placement.two_dimensional_cost import cost_with_replicas
from tests.support.tables import table

NUM_STEPS = 4


def train_on_all_rows(mesh, tables, plan, synchronization):
    """Every rank reads every row in every step; bytes that it sent in its shard group, and in its replicate group."""
    collection = EmbeddingCollection(
        tables, mesh=mesh, transport="collective", plan=plan, synchronization=synchronization
    )
    optimizer = EmbeddingOptimizer(collection)
    batch = SparseBatch.from_bags({spec.name: [list(range(spec.num_rows))] for spec in tables})
    for _ in range(NUM_STEPS):
        collection(batch).values.sum().backward()
        optimizer.step()
    collection.synchronize()
    sent = [(counters.bytes_sent, counters.synchronization.bytes_sent) for counters in collection.counters]
    collection.close()
    return np.array(sent).sum(axis=0) / NUM_STEPS


@pytest.mark.parametrize("together", ["shards", "replicas"])
@pytest.mark.parametrize("replicas", [2, 4, "mixed"])
@pytest.mark.parametrize(("mode", "every"), [("exact", 1), ("average", 1), ("average", 2)])
def test_bytes_are_those_that_are_counted(ranks, mode, every, replicas, together):
    tables = (table("a", 4800, 16, "row_wise_adagrad"), table("b", 2400, 3, "adam"))
    shapes = [TableShape.of(spec) for spec in tables]
    counts = {"a": 2, "b": 1} if replicas == "mixed" else replicas
    plan = Plan.cyclic(shapes, 4, replicas=counts, together=together)
    counted = np.array(ranks.run(train_on_all_rows, tables, plan, Synchronization(mode, every), world_size=4))
    accesses = {spec.name: np.full(spec.num_rows, 100) for spec in tables}  # so many that every rank wants each
    profile = Profile.from_counts(accesses, shapes, num_samples=1)
    cost = cost_with_replicas(plan, profile, Topology.uniform(4), Request(batch_size=1), Synchronization(mode, every))
    assert counted[:, 0] == pytest.approx(cost.exchange_bytes.sum(axis=0), rel=0.01)
    assert counted[:, 1] == pytest.approx(cost.sync_bytes.sum(axis=0), rel=0.01)


def marks(mesh, tables, plan):
    collection = EmbeddingCollection(tables, mesh=mesh, plan=plan, synchronization=Synchronization("average"))
    found = [exchange.replicated for part in collection.engine.shard_groups.stored for exchange in part.exchanges]
    num_bytes = sum(each.touched.marks.nbytes for each in found if each is not None)
    collection.close()
    return num_bytes


def test_marks_are_those_that_the_plan_counts(ranks):
    tables = (table("user", 30), table("item", 9, 16))
    plan = Plan.cyclic([TableShape.of(spec) for spec in tables], 4, replicas={"user": 2, "item": 1})
    assert tuple(ranks.run(marks, tables, plan, world_size=4)) == plan.mark_bytes

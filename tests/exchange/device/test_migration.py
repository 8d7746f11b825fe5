"""Migrations of rows on devices: training goes on, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.errors import IdRangeError
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan, TableShape
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec
from rowmesh.tables.update_rules import AdaGrad
from tests.collection.test_equivalence import assert_close
from tests.support.devices import train_again, train_on_device
from tests.support.plans import RULES, make_plan, with_copies
from tests.support.scenario import Scenario
from tests.support.tables import table
from tests.support.training import merged, train
from tests.support.triton import kernels_of
from tests.test_plans import assert_equal

pytestmark = pytest.mark.triton
kernels_of("route")  # or all are skipped

TABLES = (table("tag", 7, 3, "adam"), table("item", 20, 5, "row_wise_adagrad", pooling="mean"))


def cyclic(tables, world_size, replicas=1):
    return Plan.cyclic([TableShape.of(spec) for spec in tables], world_size, replicas=replicas)


def mixed(world_size):
    return make_plan(TABLES, world_size, world_size, lambda number: (RULES[number % 4], number, number, False))


def test_migrations_change_no_bit(ranks):
    plain = Scenario(tables=TABLES, batch_sizes=(2, 1), num_steps=2)
    scenario = replace(plain, migrations=((0, mixed(2)), (1, with_copies(TABLES, 2)), (2, cyclic(TABLES, 2))))
    stayed = merged(plain, train_on_device(ranks, plain))
    assert_equal(plain, train_on_device(ranks, scenario), stayed)
    assert_close(plain, stayed, merged(plain, ranks.run(train, scenario, "collective")))


def test_rows_that_others_read_migrate_too(ranks):
    plain = Scenario(tables=TABLES[:1], batch_sizes=(2, 2), num_steps=2)
    shifted = make_plan(TABLES[:1], 2, 2, lambda number: (("cyclic", "fixed")[number % 2], 1, number, False))
    moved = train_again(ranks, replace(plain, migrations=((0, with_copies(TABLES[:1], 2)), (1, shifted))))
    assert_equal(plain, moved, merged(plain, train_on_device(ranks, plain)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "average"])
def test_migrations_of_replicas(ranks, mode):
    scenario = Scenario(
        tables=TABLES[:1],
        batch_sizes=(2, 1, 2, 0),
        num_steps=2,
        plan=cyclic(TABLES[:1], 4, replicas=2),
        synchronization=Synchronization(mode),
    )
    plan = Plan(tuple(replace(of, replicas=2) for of in mixed(2).tables[:1]), 4, 4)
    moved = train_again(ranks, replace(scenario, migrations=((1, plan),)))
    assert_equal(scenario, moved, merged(scenario, train_on_device(ranks, scenario)))


def test_one_rank_migrates_and_says_what_was_wrong_before():
    tables = [
        TableSpec(name="a", num_rows=9, dim=4),
        TableSpec(name="b", num_rows=60, dim=4, optimizer=AdaGrad(), storage="tensor_train"),
    ]
    embeddings = EmbeddingCollection(tables, device="cuda")
    optimizer = EmbeddingOptimizer(embeddings)
    batch = SparseBatch.from_bags({"a": [[1, 2]], "b": [[59]]})
    embeddings(batch).values.sum().backward()
    optimizer.step()
    before = embeddings(batch).values.detach().clone()
    moved = embeddings.migrate(make_plan(tables[:1], 1, 1, lambda number: ("replicated", number, 0, False)))
    assert (moved.rows, embeddings.engine.num_migrations) == (0, 1)
    assert torch.equal(embeddings(batch).values, before)
    embeddings(SparseBatch.from_bags({"a": [[9]], "b": [[0]]}))
    with pytest.raises(IdRangeError, match="feature 'a'"):
        embeddings.migrate(embeddings.plan)
    assert embeddings.engine.num_migrations == 1

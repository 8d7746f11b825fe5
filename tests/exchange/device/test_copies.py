"""Rows that every rank has, on a device: the model that the CPU trains under the same plan, all copies equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.mesh import Mesh
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec
from tests.collection.test_equivalence import assert_close, assert_same_bits
from tests.support.devices import READ, assert_same_counts, device_of, train_again, train_on_device
from tests.support.plans import RULES, make_plan, with_copies
from tests.support.scenario import Scenario
from tests.support.tables import table
from tests.support.training import train
from tests.support.triton import kernels_of
from tests.test_plans import totals

pytestmark = pytest.mark.triton
kernels_of("route")  # or all are skipped


def mixed(tables, world_size):
    """Ranges of all rules beside each other; "node" is all the same on one."""
    return make_plan(tables, world_size, world_size, lambda number: (RULES[number % 4], number, number, number % 2))


TABLES = (table("tag", 7, 3, "adam", pooling="mean"), table("day", 1, 3, "adam"), table("item", 20, 5, "adam"))
SCENARIOS = {
    "all rules, accumulation": Scenario(
        tables=TABLES, plan=mixed(TABLES, 2), batch_sizes=(2, 1), accumulate=2, num_steps=1, is_weighted=True
    ),
    "three ranks, evaluations": Scenario(
        tables=TABLES[:2], plan=with_copies(TABLES[:2], 3), batch_sizes=(1, 0, 2), num_steps=1, evaluates=True
    ),
}
TRANSPORTS = ["collective", pytest.param("one_sided", marks=READ)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_trains_the_same_model(ranks, name):
    scenario = SCENARIOS[name]
    first = train_on_device(ranks, scenario)
    theirs = ranks.run(train, scenario, "collective", world_size=scenario.world_size)
    repeated = train_again(ranks, scenario)
    assert all(totals(repeated, field) == totals(theirs, field) for field in ("table_accesses", "table_distinct"))
    for mine, expected, again in zip(first, theirs, repeated, strict=True):
        assert_close(scenario, mine, expected)
        assert_same_counts(mine, expected)
        assert mine.owned == expected.owned
        assert_same_bits(mine, again)


def push_on_some(mesh: Mesh, transport, on_device):
    """Rank 0 uses both of two look-ups, rank 1 the second alone; then each another one; then neither."""
    tables = [TableSpec(name="a", num_rows=9, dim=3), TableSpec(name="b", num_rows=4, dim=3)]
    plan = with_copies(tables, 2)
    device = where(mesh, transport) if on_device else "cpu"
    embeddings = EmbeddingCollection(tables, mesh=mesh, transport=transport, plan=plan, device=device)
    optimizer = EmbeddingOptimizer(embeddings)
    batches = [SparseBatch.from_bags({"a": rows, "b": [[3], []]}) for rows in ([[1], [2, 8]], [[6], [0, mesh.rank]])]
    for used in (([0, 1], [1]), ([0], [1]), ([0, 1], [1])):
        found = [embeddings(batch) for batch in batches]
        for number in used[mesh.rank]:
            found[number].values.square().sum().backward()
        optimizer.step()
    optimizer.step()
    (counters,) = embeddings.counters
    rows = torch.cat([piece.values for table in tables for piece in embeddings.held_rows(table.name)])
    return rows, [list(counted.values()) for counted in (counters.table_accesses, counters.table_distinct)]


def where(mesh, transport):
    """A device that others can read, if they are to."""
    return device_of(mesh) if transport == "one_sided" else "cuda"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_need_not_push_the_same_routes(ranks, transport):
    found, expected = (ranks.run(push_on_some, transport, on_device) for on_device in (True, False))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine[0], theirs[0], rtol=1e-6, atol=1e-7)
        assert transport == "one_sided" or mine[1] == theirs[1]
    counted, counted_there = (np.sum([numbers for _, numbers in parts], axis=0) for parts in (found, expected))
    assert counted.tolist() == counted_there.tolist()  # one rank counts rows that all have, under one_sided another


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_evaluation_reads_copies_and_sends_no_rows(ranks, transport):
    """All rows are everywhere: at most keys are sent, which say which rows gradients would be for."""
    tables = (table("a", 9, 64),)
    plan = make_plan(tables, 2, 2, lambda _: ("replicated", 0, 0, False))
    found = ranks.run(look_up, tables, plan, transport)
    for vectors, expected, _ in found:
        assert torch.equal(vectors, expected)
    keys_of_owners = [0, 0] if transport == "one_sided" else [4 * 3, 4 * 6]
    assert sorted(counters.bytes_received for *_, counters in found) == keys_of_owners


def look_up(mesh, tables, plan, transport):
    on_cpu, embeddings = (
        EmbeddingCollection(tables, mesh=mesh, transport=transport, plan=plan, device=device)
        for device in ("cpu", where(mesh, transport))
    )
    batch = SparseBatch.from_bags({"a": [[row] for row in range(9)]})
    with torch.no_grad():
        return embeddings(batch).values.cpu(), on_cpu(batch).values, embeddings.counters[0]

"""What backward computes again (activation checkpointing) is no look-up: it decides nothing, and reads the same."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.mesh import Mesh
from rowmesh.tables import Dynamic, Uniform
from rowmesh.tables.update_rules import SGD

BATCHES = [[1, 2, 1], [3, 2, 4], [1, 3, 5], [4, 4, 6]]
RULES = {
    "admit_after": {"capacity": 20, "shards": 2, "admit_after": 2},
    "zero": {"capacity": 20, "admit_after": 2, "missing": "zero"},
    "error": {"capacity": 20, "admit_after": 3, "missing": "error"},
    "full": {"capacity": 3, "shards": 1},
    "demoted": {"capacity": 3, "shards": 1, "mode": "demote", "store": "memory"},
}


def made(mesh, transport="auto", **rules):
    start = {"initializer": Uniform(bound=0.5), "optimizer": SGD(lr=0.5)}
    missing = rules.pop("missing", "initial")
    table = TableSpec(name="item", dim=3, storage="dynamic", dynamic=Dynamic(missing=missing, **rules), **start)
    return EmbeddingCollection(
        [table, TableSpec(name="plain", num_rows=9, dim=3, **start)], mesh=mesh, transport=transport
    )


def batch_of(mesh, ids):
    bags = [[i] for i in ids][mesh.rank :: mesh.world_size]
    return SparseBatch.from_bags({"item": bags, "plain": [[i % 9] for (i,) in bags]})


def run(mesh, transport, use_reentrant, batches, overlaps=False, **rules):
    """Trains through a checkpoint; returns counts, counters, rows and losses."""
    embeddings, told = made(mesh, transport, **(rules or RULES["admit_after"])), []
    embeddings.register_decision_hook("item", lambda each: told.append(each.step))
    optimizer, weight = EmbeddingOptimizer(embeddings), torch.ones(6, requires_grad=True)
    losses = []

    def compute(batch, weight):
        return torch.sin((embeddings(batch).values * weight).sum(dim=1)).sum()

    def loss_of(ids):
        step = partial(compute, batch_of(mesh, ids))
        return step(weight) if use_reentrant is None else checkpoint(step, weight, use_reentrant=use_reentrant)

    groups = [batches[k : k + 2] for k in range(0, len(batches), 2)] if overlaps else [[each] for each in batches]
    for group in groups:
        found = [loss_of(ids) for ids in group]
        losses += [float(each.detach()) for each in found]
        torch.stack(found).sum().backward()
        del found
        optimizer.step()
    known = embeddings.known_rows("item")
    order = known.ids.argsort()
    statistics = embeddings.statistics("item", range(12))
    counters = vars(embeddings.dynamic_counters["item"])
    embeddings.close()
    if use_reentrant:  # which looks up without gradients first
        counters = counters | {"found": 0, "missing": 0}
    facts = [statistics.known.tolist(), statistics.count.tolist(), statistics.last_step.tolist()]
    return facts, counters, known.ids[order].tolist(), known.values[order].tolist(), losses, told, weight.grad.tolist()


@pytest.mark.parametrize("rules", RULES)
def test_it_decides_nothing_and_reads_the_same(rules):
    mesh = Mesh()
    expected = run(mesh, "auto", None, BATCHES, **RULES[rules])
    assert run(mesh, "auto", False, BATCHES, **RULES[rules]) == expected
    if rules not in ("zero", "error"):  # which hold for look-ups without gradients, the first ones there
        assert run(mesh, "auto", True, BATCHES, **RULES[rules]) == expected


def test_one_batch_admits_nobody_after_two():
    for use_reentrant in (False, True):
        (known, counts, _), *_ = run(Mesh(), "auto", use_reentrant, [[1, 2]], capacity=9, admit_after=2)
        assert not any(known)
        assert not any(counts)


@pytest.mark.parametrize("rules", ["full", "demoted"])
def test_rows_that_a_later_batch_evicts_are_read_again(rules):
    """Two batches are looked up, then both have their backward: the second has evicted ids of the first."""
    batches = [[1, 2, 3], [4, 5, 6]]
    expected = run(Mesh(), "auto", None, 2 * batches, True, **RULES[rules])
    assert run(Mesh(), "auto", False, 2 * batches, True, **RULES[rules]) == expected


@pytest.mark.parametrize("transport", ["collective", "one_sided"])
def test_on_several_ranks_it_decides_nothing_either(ranks, transport):
    expected = ranks.run(run, transport, None, BATCHES, world_size=2)
    for use_reentrant in (False, True):
        assert ranks.run(run, transport, use_reentrant, BATCHES, world_size=2) == expected

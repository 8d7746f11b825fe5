"""Tables of a part of the ranks: errors name ranks by their numbers in the run."""

import os
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch
from rowmesh._support.faults import arm
from rowmesh.data import Batch
from rowmesh.errors import DataError, IdRangeError, RowmeshError
from rowmesh.exchange.collective import CollectiveTransport
from rowmesh.mesh import liveness
from rowmesh.mesh import mesh as mesh_module
from rowmesh.pipeline import Pipeline
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from tests.support.tables import table

HALVES = [[0, 1], [2, 3]]
TABLES = [table("a", 60, 4), table("b", 60, 8)]


def collection_of(part, **options):
    return EmbeddingCollection(TABLES, mesh=part, transport="collective", **options)


def batch_of(last=59):
    return SparseBatch.from_dense(("a", "b"), torch.tensor([[0, 1, 2], [3, 4, last]]))


def disagree_about_tables(part):
    collection_of(part, seed=part.rank)


def lack_room(part):
    def rows_for(*_):
        raise MemoryError("no memory")

    with patch.object(CollectiveTransport, "rows_for", rows_for) if part.rank else nullcontext():
        collection_of(part)


def freeze_other_tables(part):
    collection_of(part).freeze("ab"[part.rank])


def freeze_before_the_step(part):
    embeddings = collection_of(part)
    vectors = embeddings(batch_of()).values
    if part.rank:
        vectors.sum().backward()
    embeddings.freeze("a")


def migrate_under_way(part):
    embeddings = collection_of(part)
    vectors = embeddings(batch_of()).values
    if part.rank == 0:
        del vectors
    embeddings.migrate(embeddings.plan)


def migrate_apart(part):
    ranges = RowRange(0, part.rank, "replicated"), RowRange(part.rank, 60)
    planned = [TablePlan(TableShape.of(each), ranges[1 - part.rank :]) for each in TABLES]
    collection_of(part).migrate(Plan(tuple(planned), 2, part.ranks_per_node))


def refuse_a_step(part):
    def refuse():
        raise RowmeshError("no")

    embeddings = collection_of(part)
    optimizer = EmbeddingOptimizer(embeddings)
    embeddings(batch_of()).values.sum().backward()
    with arm(point="engine.push", action=refuse) if part.rank else nullcontext():
        optimizer.step()


def fail_to_read(part):
    def batches():
        yield Batch(torch.zeros(3, 0), batch_of(), torch.zeros(3))
        if part.rank:
            raise DataError("line 7 is not a sample")
        yield Batch(torch.zeros(3, 0), batch_of(), torch.zeros(3))

    embeddings = collection_of(part)
    optimizer = EmbeddingOptimizer(embeddings)
    with Pipeline(embeddings) as pipeline:
        for window in pipeline.windows(batches()):
            for each in window:
                each.embeddings.values.sum().backward()
            optimizer.step()


def told(mesh, act):
    """The error of this rank's half, whose second rank differs from its first."""
    with pytest.raises((RowmeshError, MemoryError)) as raised:
        act(mesh.part(HALVES))
    return str(raised.value)


CASES = {
    disagree_about_tables: "ranks disagree about an EmbeddingCollection: rank {0} has seed 0, rank {1} has seed 1",
    lack_room: "rank {1} has no room for the ",
    freeze_other_tables: "rank {0} would freeze ['a'], rank {1} would freeze ['b']",
    freeze_before_the_step: "rank {1} has 1 batch(es) that had their backward and no step",
    migrate_under_way: "rank {1} cannot migrate while 1 batch(es) are under way",
    migrate_apart: "rank {1} would migrate to another plan than rank {0}",
    refuse_a_step: "rank {1} cannot take it: RowmeshError: no",
}


@pytest.mark.parametrize("act, text", CASES.items())
def test_all_ranks_of_a_part_name_the_same(ranks, act, text):
    found = ranks.run(told, act, world_size=4)
    for half in HALVES:
        named = text.format(*half)
        assert all(named in found[rank] for rank in half if found[rank] != "no"), found


def refuse_ids(mesh):
    embeddings = collection_of(mesh.part(HALVES))
    with pytest.raises(IdRangeError) as refused:
        embeddings.route(batch_of(last=60))
    return str(refused.value)


def test_the_rank_that_refuses_ids_is_named(ranks):
    for rank, text in enumerate(ranks.run(refuse_ids, world_size=4)):
        assert text.startswith(f"rank {rank}, look-up")


def test_a_pipeline_of_a_part_names_the_rank_that_failed(ranks):
    found = ranks.run(told, fail_to_read, world_size=4)
    for first, second in HALVES:
        assert found[first].startswith(f"rank {first}: rank {second} could not read batch 1 or make it ready"), found
        assert found[second].startswith(f"rank {second} in stage 'read' of batch 1: line 7"), found


class Group:
    group_name = "tables"


def test_ranks_that_do_not_come_are_named(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(liveness, "_get_default_store", lambda: store)
    monkeypatch.setattr(mesh_module, "_LATE_LOOK_S", 0.0)
    whole = Mesh(rank=2, world_size=4, hosts=(0,) * 4, pids=(os.getpid(),) * 4)
    part = Mesh(rank=0, world_size=2, hosts=(0, 0), pids=(os.getpid(),) * 2, group=Group(), whole=whole, members=(2, 3))

    def wait():
        raise RuntimeError("timed out")

    with pytest.raises(RowmeshError, match=r"^rank 2: waited in vain for rank 3 \(process"):
        part.run_interruptibly(wait, "connecting")

"""The one-sided transport's shared memory: what peers can still map, and how much a step may announce."""

import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.errors import RowmeshError
from rowmesh.exchange import one_sided
from tests.support import behaviour


def count_descriptors(mesh):
    """Open files before and after a collection was made, and after its first step."""
    before = behaviour.footprint()["files"]
    collection = EmbeddingCollection(behaviour.TABLES, mesh=mesh, transport="one_sided")
    made = behaviour.footprint()["files"]
    behaviour.one_step(collection, behaviour.EmbeddingOptimizer(collection), behaviour.batch_of(mesh.rank, 0))
    stepped = behaviour.footprint()["files"]
    collection.close()
    return made - before, stepped - made


def test_descriptors_are_closed_once_all_have_mapped(ranks):
    """Arenas and boards cost none; a send buffer keeps those of its two parts, since it may be mapped at any step."""
    for made, stepped in ranks.run(count_descriptors, world_size=3):
        assert made == 0
        assert stepped == 2 * len(behaviour.TABLES)


def accumulate(mesh, num_passes):
    """The error of a step after more backward passes than it can announce, on every rank."""
    one_sided.MAX_ROUTES = 3
    try:
        collection = EmbeddingCollection(behaviour.TABLES, mesh=mesh, transport="one_sided")
        for step in range(num_passes):
            collection(behaviour.batch_of(mesh.rank, step)).values.sum().backward()
        collection.push_pending([0.1, 0.1])
    except RowmeshError as error:
        return str(error)
    finally:
        one_sided.MAX_ROUTES = 1024
    return ""


@pytest.mark.parametrize("num_passes", [3, 4])
def test_passes_of_one_step_are_limited(ranks, num_passes):
    for rank, message in enumerate(ranks.run(accumulate, num_passes, world_size=2)):
        expected = f"rank {rank}: 4 forward passes were accumulated for one step; at most 3 can be"
        assert message == ("" if num_passes == 3 else expected)


def rows_after_batches_that_grow(mesh, transport):
    """Requests and gradients of the second batch have no room where those of the first were."""
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=20_000, dim=8)], mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(embeddings)
    for count in (4, 6000, 5):
        ids = torch.arange(count).unsqueeze(0) * 3 + mesh.rank
        embeddings(SparseBatch.from_dense(["item"], ids)).values.sum().backward()
        optimizer.step()
    rows = torch.cat([piece.values for piece in embeddings.local_rows("item")]).clone()
    embeddings.barrier()
    embeddings.close()
    return rows


def test_a_send_buffer_that_grew_is_read_where_it_is_now(ranks):
    one_sided = ranks.run(rows_after_batches_that_grow, "one_sided", world_size=2)
    collective = ranks.run(rows_after_batches_that_grow, "collective", world_size=2)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one_sided, collective, strict=True))

"""What other dynamic tables got wrong, each with a test that fails where we do."""

import contextlib
import gc

import numpy as np
import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.data import Batch
from rowmesh.errors import ConfigurationError, NoRoomError, PeerError
from rowmesh.exchange.route import Route
from rowmesh.mesh import Mesh
from rowmesh.pipeline import Pipeline
from rowmesh.tables import Dynamic, Uniform
from rowmesh.tables.update_rules import SGD, Adam
from tests.support.dynamic import initial_row


def item(optimizer=None, **rules):
    rule = optimizer or SGD(lr=1.0)
    options = {"initializer": Uniform(bound=0.5), "optimizer": rule}
    return TableSpec(name="item", dim=3, storage="dynamic", dynamic=Dynamic(**rules), **options)


def made(mesh=None, optimizer=None, transport="auto", replicas=1, **rules):
    table = item(optimizer, **rules)
    return EmbeddingCollection([table], mesh=mesh or Mesh(), transport=transport, replicas=replicas)


def train(embeddings, *batches):
    """A step a batch of ids, whose loss is the sum of their vectors; returns the vectors."""
    optimizer = EmbeddingOptimizer(embeddings)
    seen = []
    for ids in batches:
        out = embeddings(bags(ids))
        seen.append(out.values.detach().clone())
        out.values.sum().backward()
        optimizer.step()
    return seen


def bags(ids):
    return SparseBatch.from_bags({"item": [[i] for i in ids]})


def read(embeddings, ids):
    with torch.no_grad():
        return embeddings(bags(ids)).values


def initial(embeddings, ids):
    return torch.stack([initial_row(embeddings.tables[0], i) for i in ids])


def overfill(mesh):
    """Every rank brings other ids; only together they do not fit."""
    embeddings = made(mesh, capacity=4, shards=1)
    train(embeddings, [0])
    with pytest.raises(NoRoomError) as caught:
        embeddings(bags(range(10 * mesh.rank, 10 * mesh.rank + 3)))
    (after,) = train(embeddings, [0])
    known = embeddings.statistics("item", [0, 1, 10]).known.tolist()
    return str(caught.value), after, known


def test_ids_without_room_are_an_error_everywhere_and_change_nothing(ranks):
    for message, after, known in ranks.run(overfill, world_size=2):
        assert "shard 0 of dynamic table 'item'" in message
        assert "has 6 distinct ids" in message
        assert "raise capacity from 4 to 6" in message
        assert torch.equal(after[0], initial_row(item(capacity=4), 0) - 1)
        assert known == [True, False, False]


def num_routes():
    return sum(type(each) is Route for each in gc.get_objects())


def test_a_batch_without_room_gives_its_buffers_back_at_once():
    embeddings = made(capacity=4, shards=1)
    gc.collect()
    before = num_routes()
    gc.disable()  # an error that a frame of its traceback refers to would keep the route until the next collection
    try:
        with contextlib.suppress(NoRoomError):
            embeddings(bags(range(6)))
        assert num_routes() == before
    finally:
        gc.enable()


def test_a_new_id_inherits_nothing_of_the_evicted_one():
    embeddings = made(optimizer=Adam(lr=0.1), capacity=1)
    train(embeddings, [7], [7], [7])
    assert torch.equal(*train(embeddings, [8]), initial(embeddings, [8]))
    fresh = made(optimizer=Adam(lr=0.1), capacity=1)
    fresh.engine.step_count = 3  # of which Adam's correction of its moments depends
    train(fresh, [8])
    mine, other = embeddings.known_rows("item"), fresh.known_rows("item")
    assert torch.equal(mine.values, other.values)
    assert all(torch.equal(mine.state[name], other.state[name]) for name in mine.state)
    # Nor does the id that comes back.
    assert torch.equal(*train(embeddings, [7]), initial(embeddings, [7]))
    assert embeddings.statistics("item", [7]).count.tolist() == [1]


def test_frequencies_count_occurrences():
    embeddings = made(capacity=2, shards=1, eviction="lfu")
    train(embeddings, [1, 1, 1], [2], [2], [3])
    assert embeddings.statistics("item", [1, 2, 3]).count.tolist() == [3, 0, 1]


def count_together(mesh):
    embeddings = made(mesh, capacity=100, admit_after=3)
    train(embeddings, [5, 5] if mesh.rank else [5])
    return embeddings.statistics("item", [5]).count.tolist()


def test_occurrences_of_all_ranks_admit(ranks):
    assert ranks.run(count_together, world_size=2) == [[3], [3]]


def test_growth_keeps_rows():
    embeddings = made(capacity=8000, initial_capacity=1)
    parts = np.random.default_rng(3).permutation(5000).reshape(10, 500)
    train(embeddings, *parts.tolist())
    found = read(embeddings, range(5000))
    assert torch.equal(found, initial(embeddings, range(5000)) - 1)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_later_batches_do_not_take_the_rows_of_earlier_ones(depth):
    """Each batch evicts all ids of the one before, and a batch later they are back."""
    embeddings = made(capacity=2, shards=1)
    optimizer = EmbeddingOptimizer(embeddings)
    none = torch.zeros(2)
    ids = [[1, 2], [3, 4], [1, 2], [1, 2], [3, 4]]
    batches = [Batch(torch.zeros(2, 0), bags(each), none) for each in ids]
    seen = []
    with Pipeline(embeddings, depth=depth) as pipeline:
        for window in pipeline.windows(batches):
            for part in window:
                seen.append(part.embeddings.values.detach().clone())
                part.embeddings.values.sum().backward()
            optimizer.step()
    expected = [initial(embeddings, each) for each in ids]
    expected[3] = expected[3] - 1
    assert all(map(torch.equal, seen, expected))


def far_apart(mesh):
    """Groups of ranks that see ids of their own."""
    embeddings = made(mesh, capacity=10, shards=2, replicas=2)
    train(embeddings, [mesh.rank], [mesh.rank])
    known = embeddings.known_rows("item")
    return known.ids.tolist(), known.counts.tolist(), known.values


def test_replicas_know_the_ids_of_each_other(ranks):
    for ids, counts, values in ranks.run(far_apart, world_size=2):
        assert sorted(ids) == [0, 1]
        assert counts == [2, 2]
        for i, row in zip(ids, values, strict=True):
            assert torch.equal(row, initial_row(item(capacity=10), i) - 0.5 - 0.5)  # means over the ranks


def test_numbers_have_64_bits():
    embeddings = made(capacity=10, shards=1, eviction="lru_lfu")
    ids = [5, 5 + 2**32, -5, 5 - 2**63, 2**63 - 1]
    train(embeddings, ids, ids[:1])
    expected = initial(embeddings, ids) - 1
    expected[0] -= 1
    assert len(expected.unique(dim=0)) == 5
    assert torch.equal(read(embeddings, ids), expected)
    embeddings.engine.resolver.step = 2**40
    train(embeddings, ids[1:])
    assert embeddings.statistics("item", ids).last_step.tolist() == [2, *[2**40 + 1] * 4]


def even_ids(mesh):
    embeddings = made(mesh, capacity=4000, shards=64)
    train(embeddings, range(0, 2000, 2))
    return len(embeddings.known_rows("item").ids)


def test_ids_spread_over_ranks_whatever_their_remainders(ranks):
    numbers = ranks.run(even_ids, world_size=2)
    assert sum(numbers) == 1000
    assert min(numbers) > 400


def test_guests_learn_nothing_and_evict_nobody():
    embeddings = made(capacity=1, admit_after=3)
    train(embeddings, [1, 1, 1])
    seen = train(embeddings, [2], [2])
    assert all(torch.equal(each, initial(embeddings, [2])) for each in seen)
    assert torch.equal(*train(embeddings, [2]), initial(embeddings, [2])), "its third sighting: from where it starts"
    assert torch.equal(read(embeddings, [2]), initial(embeddings, [2]) - 1)
    assert not embeddings.statistics("item", [1]).known[0]


def test_evaluation_and_frozen_tables_change_nothing():
    embeddings = made(capacity=2, shards=1)
    train(embeddings, [1, 2])
    for _ in range(3):
        read(embeddings, [1, 1, 9])
    embeddings.freeze("item")
    embeddings(bags([1, 9]))
    found = embeddings.statistics("item", [1, 2, 9])
    assert found.known.tolist() == [True, True, False]
    assert (found.count.tolist(), found.last_step.tolist()) == ([1, 1, 0], [1, 1, 0])


def test_batches_that_are_dropped_give_their_frames_back():
    embeddings = made(capacity=2, shards=1, spare_frames=3)
    for step in range(20):
        embeddings(bags([2 * step, 2 * step + 1]))  # neither backward nor step
    for step in range(20):
        train(embeddings, [2 * step, 2 * step + 1])
        read(embeddings, [-1, -2, -3])


def some_evaluate(mesh):
    embeddings = made(mesh, capacity=10)
    with torch.set_grad_enabled(mesh.rank == 0), pytest.raises(PeerError, match=r"ranks .* look up with gradients"):
        embeddings(bags([1]))


def test_ranks_that_train_beside_ranks_that_evaluate_are_an_error(ranks):
    ranks.run(some_evaluate, world_size=2)


def migrates(mesh):
    """Refused on all ranks; training goes on."""
    plain = TableSpec(name="plain", num_rows=10, dim=3)
    embeddings = EmbeddingCollection([item(capacity=4), plain], mesh=mesh)
    batch = SparseBatch.from_bags({"item": [[7]], "plain": [[mesh.rank]]})
    optimizer = EmbeddingOptimizer(embeddings)
    for _ in range(2):
        with pytest.raises(
            ConfigurationError, match=r"tables \['item'\] are dynamic: .* no table beside them can migrate"
        ):
            embeddings.migrate(embeddings.plan)
        embeddings(batch).values.sum().backward()
        optimizer.step()
    return embeddings.statistics("item", [7]).count.tolist()


def test_a_collection_with_dynamic_tables_does_not_migrate(ranks):
    assert ranks.run(migrates, world_size=2) == [[4], [4]]

"""Tiered tables on a device train the model that dense ones there do, to the bit, however small fast memory is."""

from dataclasses import replace

import pytest
import torch

from rowmesh import checkpoint
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.errors import ConfigurationError, IdRangeError, NoRoomError
from rowmesh.mesh import Mesh
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec, Tiers
from tests.collection.test_equivalence import assert_close, assert_same_bits
from tests.support.devices import assert_same_counts
from tests.support.scenario import Scenario
from tests.support.tables import several, table
from tests.support.training import train
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
kernels_of("pool")  # or all are skipped


def tiered(tables):
    return tuple(replace(each, storage="tiered") for each in tables)


def small(rows, **options):
    return Tiers(fast_share=0.001, fast_rows=rows, verify=True, poison=True, timeout_s=20.0, **options)


def few(rule):
    """Two groups, one of a sequence."""
    return table("user", 50, 3, rule, features=("user", "friend")), table("history", 40, 4, rule, pooling="none")


PLAIN = Scenario(tables=few("row_wise_adagrad"), batch_sizes=(3,), num_steps=2)
SLOW = {
    "all kinds of tables": Scenario(tables=several("row_wise_adagrad"), batch_sizes=(4,), num_steps=5, evaluates=True),
    "bfloat16": Scenario(tables=several("sgd", torch.bfloat16), batch_sizes=(3,), bag_sizes=(2, 2), num_steps=1),
    "all kinds of tables, accumulation": Scenario(
        tables=several("adam", torch.float64), batch_sizes=(3,), is_weighted=True, accumulate=2, num_steps=3
    ),
}


def run_in_tiers(plain, tiers):
    return train(Mesh(), replace(plain, tables=tiered(plain.tables), tiers=tiers), device="cuda")


def test_tiers_change_nothing():
    in_tiers = run_in_tiers(PLAIN, small(20))
    on_cpu = train(Mesh(), PLAIN)
    assert_close(PLAIN, in_tiers, on_cpu)
    assert_same_counts(in_tiers, on_cpu)
    assert_same_bits(in_tiers, run_in_tiers(PLAIN, Tiers()))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_tiers_change_nothing_of_any_table(tmp_path, name):
    plain = SLOW[name]
    dense = train(Mesh(), plain, device="cuda")
    assert_close(plain, dense, train(Mesh(), plain))
    for tiers in (small(25), small(25, folder=tmp_path), Tiers()):
        assert_same_bits(run_in_tiers(plain, tiers), dense)
    assert list(tmp_path.iterdir()) == []


def test_tiers_change_nothing_beside_dense_tables_on_two_ranks(ranks):
    tables = few("row_wise_adagrad")
    plain = Scenario(tables=tables, num_steps=2)
    mixed = replace(plain, tables=tables[:1] + tiered(tables[1:]), tiers=small(25))
    dense = ranks.run(train, plain, "auto", "cuda", world_size=2)
    for mine, theirs in zip(ranks.run(train, mixed, "auto", "cuda", world_size=2), dense, strict=True):
        assert mine.transport == "collective"
        assert_same_bits(mine, theirs)
        assert mine.owned == theirs.owned


ITEM = TableSpec(name="item", num_rows=40, dim=3, storage="tiered")


def make(rows, device="cuda", **options):
    tiers = options.pop("tiers", None) or small(rows)
    collection = EmbeddingCollection([replace(ITEM, **options)], tiers=tiers, device=device)
    return collection, EmbeddingOptimizer(collection)


def batch(*ids):
    return SparseBatch.from_bags({"item": [[number] for number in ids]})


def rows_of(collection):
    return torch.cat([piece.values for piece in collection.local_rows("item")])


def train_ahead(rows, depth, device="cuda"):
    """Routes batches `depth` ahead of the one that is trained."""
    collection, optimizer = make(rows, device)
    batches = [batch(*(number * 3 + k for k in range(5)), number, 1) for number in range(6)]
    routes = []
    for number in range(6 + depth):
        if number < 6:
            routes.append(collection.route(batches[number]))
        if number >= depth:
            collection.pool(collection.fetch(routes.pop(0))).values.square().sum().backward()
            optimizer.step()
    found = rows_of(collection), collection.tier_counters[collection.groups[0].name]
    collection.close()
    return found


def test_batches_that_are_routed_early_are_forwarded_rows():
    """Rows begin to come when a batch is routed; what it shares with those before is not stale."""
    expected, _ = train_ahead(40, 0, device="cpu")
    for depth in (0, 1, 3):
        rows, counters = train_ahead(24, depth)
        torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-7)
        assert counters.pins == 6
        assert (counters.rows_forwarded > 0) == (depth > 0)
        if depth == 0:
            in_turn = rows
        assert torch.equal(rows, in_turn)


def accumulate(rows, device):
    """Two look-ups a step, which share rows."""
    collection, optimizer = make(rows, device)
    for step in range(3):
        for first in (step, step + 2):
            collection(batch(*range(first, first + 4))).values.square().sum().backward()
        optimizer.step()
    (counters,) = collection.counters
    found = rows_of(collection), (counters.table_accesses, counters.table_distinct)
    collection.close()
    return found


def test_gradients_of_several_look_ups_add_up():
    rows, counted = accumulate(6, "cuda")
    expected, counted_there = accumulate(6, "cpu")
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-7)
    assert counted == counted_there == ({"item": 24}, {"item": 18})
    assert torch.equal(rows, accumulate(40, "cuda")[0])


def test_what_does_not_fit_yet_comes_at_the_fetch():
    collection, optimizer = make(5)
    routes = [collection.route(batch(*range(first, first + 5))) for first in (0, 10)]
    for route in routes:
        collection.pool(collection.fetch(route)).values.sum().backward()
        optimizer.step()
    assert collection.tier_counters[collection.groups[0].name].peak_frames == 5
    with pytest.raises(NoRoomError, match="a batch of 6 rows needs 6 more slots of the cache, which has 5"):
        collection(batch(*range(6)))
    collection(batch(*range(5)))
    collection.close()


def test_a_route_may_be_fetched_again():
    """It holds its rows once, which are what the last update left."""
    collection, optimizer = make(6)
    first, second = collection.route(batch(1, 2, 3)), collection.route(batch(3, 4))
    collection.fetch(first)
    collection.pool(collection.fetch(second)).values.sum().backward()
    optimizer.step()
    found = collection.pool(collection.fetch(first)).values
    assert torch.equal(found.cpu(), rows_of(collection)[[1, 2, 3]])
    found.sum().backward()
    optimizer.step()
    collection(batch(*range(10, 16)))
    collection.close()


def test_ids_outside_are_what_the_device_makes_of_them():
    found = []
    for device in ("cpu", "cuda"):
        collection, optimizer = make(8, device, out_of_range=5)
        collection(batch(40, 7, -1, 2**40)).values.square().sum().backward()
        optimizer.step()
        collection.barrier()
        found.append((rows_of(collection), collection.counters[0].out_of_range))
        collection.close()
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=1e-7)
    assert found[0][1] == found[1][1] == {"item": 3}
    collection, optimizer = make(8)
    before = rows_of(collection)
    collection(batch(40, 7)).values.sum().backward()
    with pytest.raises(IdRangeError, match="feature 'item': 1 of 2 ids are outside table 'item'"):
        optimizer.step()
    assert torch.equal(rows_of(collection), before)
    collection.close()


def push_on_some(mesh, storage):
    """Rank 0 uses both of two look-ups, rank 1 the second alone."""
    tables = [replace(ITEM, storage=storage), TableSpec(name="b", num_rows=4, dim=3, storage=storage)]
    collection = EmbeddingCollection(tables, mesh=mesh, device="cuda", tiers=small(16))
    optimizer = EmbeddingOptimizer(collection)
    for step in range(3):
        bags = [{"item": [[1 + step], [2, 8]], "b": [[3], []]}, {"item": [[7], [mesh.rank]], "b": [[], [step]]}]
        first, second = (collection(SparseBatch.from_bags(each)) for each in bags)
        if mesh.rank == 0:
            first.values.square().sum().backward()
        second.values.square().sum().backward()
        optimizer.step()
    rows = [piece.values for name in ("item", "b") for piece in collection.local_rows(name)]
    counted = [(counters.table_accesses, counters.table_distinct) for counters in collection.counters]
    collection.close()
    return rows, counted


def test_ranks_need_not_push_the_same_routes(ranks):
    for mine, theirs in zip(ranks.run(push_on_some, "tiered"), ranks.run(push_on_some, "dense"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine[0], theirs[0], strict=True))
        assert mine[1] == theirs[1]


@pytest.mark.parametrize(("wrote", "reads"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_checkpoints_do_not_know_where_rows_were(tmp_path, wrote, reads):
    (one, optimizer), (other, _) = make(8, wrote), make(6, reads)
    for ids in ((1, 2, 3), (3, 4, 39), (2, 20, 30)):
        one(batch(*ids)).values.square().sum().backward()
        optimizer.step()
    checkpoint.save(tmp_path / "model", one, {})
    checkpoint.load(tmp_path / "model", other)
    for mine, theirs in zip(one.local_rows("item"), other.local_rows("item"), strict=True):
        assert torch.equal(mine.values, theirs.values)
        assert all(torch.equal(mine.state[name], theirs.state[name]) for name in mine.state)
    one.close()
    other.close()


def test_memory_is_that_of_fast_rows():
    collection, _ = make(10)
    assert collection.memory_bytes["rows"] == 10 * 3 * 4
    assert collection.memory_bytes["optimizer state"] == 10 * 4
    assert 0 < collection.memory_bytes["buffers"] < 10 << 20
    collection.close()


def refuse_copies(mesh):
    shape = TableShape.of(ITEM)
    plan = Plan((TablePlan(shape, (RowRange(0, 40, "replicated"),)),), 2, 2)
    with pytest.raises(ConfigurationError, match=r"tiered tables \['item'\] have copied rows"):
        EmbeddingCollection([ITEM], mesh=mesh, plan=plan, device="cuda")


def test_copied_rows_are_refused(ranks):
    ranks.run(refuse_copies)

"""Tensor-train tables in a collection: beside dense ones, on any number of ranks, against cores in plain torch."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh import AdaGrad, EmbeddingCollection, EmbeddingOptimizer, Mesh, Plan, SparseBatch, TableSpec
from rowmesh.errors import ConfigurationError, IdRangeError
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import TableShape
from rowmesh.tables import Constant, Normal, TensorTrain
from rowmesh.tensor_train import TensorTrainEmbeddingBag, TensorTrainOptimizer
from tests.collection.test_equivalence import assert_close, assert_same_bits, on_ranks
from tests.support.scenario import Scenario
from tests.support.tables import OPTIMIZERS as RULES
from tests.support.tables import several
from tests.support.training import merged, train, train_reference
from tests.support.triton import kernels_of


def cored(name, num_rows, dim=3, rule="sgd", rank=None, **options):
    """A tensor-train table."""
    options.setdefault("initializer", Normal(std=0.5))
    return TableSpec(
        name=name,
        num_rows=num_rows,
        dim=dim,
        optimizer=RULES[rule],
        storage="tensor_train",
        tensor_train=TensorTrain(rank=rank),
        **options,
    )


def mixed(rule, dtype=torch.float32):
    """Two groups of cores among groups of rows, every pooling, tables of one row and of few."""
    dense = several(rule, dtype)
    return (
        cored("place", 300, 3, rule, rank=(2, 3), dtype=dtype),
        *dense[:2],
        cored("shop", 11, 3, rule, rank=(2, 3), pooling="mean", features=("shop", "origin"), dtype=dtype),
        *dense[2:],
        cored("page", 1000, 16, rule, pooling="none", dtype=dtype),
        cored("unit", 1, 3, rule, dtype=dtype),
    )


SIZES = {1: (6,), 2: (5, 3), 4: (4, 0, 3, 6)}


@pytest.mark.parametrize(
    ("rule", "transport", "world_size"),
    [
        ("adam", "auto", 1),
        ("adagrad", "one_sided", 2),
        ("sgd", "collective", 4),
        *(
            pytest.param(*job, marks=pytest.mark.slow)
            for job in [("sgd", "auto", 1), ("adagrad", "auto", 1), ("sgd", "one_sided", 2), ("adam", "one_sided", 2)]
        ),
        pytest.param("adam", "collective", 4, marks=pytest.mark.slow),
        pytest.param("adagrad", "collective", 4, marks=pytest.mark.slow),
    ],
)
def test_equals_plain_torch(ranks, rule, transport, world_size):
    """Also what several forward passes before one step add up to, weights, and learning rates that change."""
    scenario = Scenario(
        tables=mixed(rule, torch.float64),
        batch_sizes=SIZES[world_size],
        is_weighted=True,
        accumulate=2,
        decay=0.7,
        evaluates=True,
    )
    assert_close(scenario, merged(scenario, on_ranks(ranks, scenario, transport)), train_reference(scenario))


def test_transports_are_equal_to_the_bit(ranks):
    scenario = Scenario(tables=mixed("adam"), batch_sizes=(4, 3, 0, 6), accumulate=2)
    runs = [merged(scenario, on_ranks(ranks, scenario, name)) for name in ("one_sided", "collective")]
    assert_same_bits(*runs)


# Kernels are compiled for the dim and ranks of cores, so there are few; `None` is the default rank.
FEW_SHAPES = [(1, 3, None), (13, 3, (2, 3)), (200, 3, (2, 3)), (5000, 16, None)]
MORE_SHAPES = [(rows, dim, None) for rows in (1, 2, 13, 200, 5000) for dim in (1, 3, 16)]


@st.composite
def scenarios(draw, shapes):
    tables = []
    for index in range(draw(st.integers(1, 4))):
        is_cored = index == 0 or draw(st.booleans())
        pooling, rule = (
            draw(st.sampled_from(["sum", "mean", "none"])),
            draw(st.sampled_from(["sgd", "adagrad", "adam"])),
        )
        options = {"pooling": pooling, "optimizer": RULES[rule], "dtype": torch.float64, "initializer": Normal(std=0.5)}
        rows, dim, rank = draw(st.sampled_from(shapes))
        if is_cored:
            options |= {"storage": "tensor_train", "tensor_train": TensorTrain(rank=rank)}
        tables.append(TableSpec(name=f"t{index}", num_rows=rows, dim=dim, **options))
    world_size = draw(st.sampled_from([1, 2, 4]))
    sizes = st.lists(st.integers(0, 6), min_size=world_size, max_size=world_size)
    return Scenario(
        tables=tuple(tables),
        batch_sizes=tuple(draw(sizes)),
        bag_sizes=draw(st.sampled_from([(0, 3), (1, 1), (2, 2)])),
        skew=draw(st.sampled_from([1.0, 3.0, 1e9])),
        is_weighted=draw(st.booleans()),
        num_steps=draw(st.integers(1, 3)),
        accumulate=draw(st.sampled_from([1, 2])),
        evaluates=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=5)
@given(scenario=scenarios(FEW_SHAPES))
def test_random_mixtures(ranks, scenario):
    check_mixture(ranks, scenario)


@pytest.mark.slow
@settings(max_examples=60)
@given(scenario=scenarios(MORE_SHAPES))
def test_many_random_mixtures(ranks, scenario):
    check_mixture(ranks, scenario)


def check_mixture(ranks, scenario):
    runs = [merged(scenario, on_ranks(ranks, scenario, name)) for name in ("one_sided", "collective")]
    assert_same_bits(*runs)
    assert_close(scenario, runs[0], train_reference(scenario))


@pytest.mark.parametrize("mode", ["exact", "average"])
def test_replicas_of_others_change_nothing(ranks, mode):
    """Cores are summed over all ranks, whatever replica groups of dense tables do (averaged ones: nothing)."""
    frozen = TableSpec(name="frozen", num_rows=9, dim=3, optimizer=replace(RULES["sgd"], lr=0.0), dtype=torch.float64)
    tables = tuple(
        spec for spec in mixed("adagrad", torch.float64) if spec.storage == "tensor_train" or mode == "exact"
    )
    tables = (*tables, frozen)
    plan = Plan.cyclic([TableShape.of(spec) for spec in tables if spec.storage == "dense"], 4, replicas=2)
    scenario = Scenario(tables=tables, batch_sizes=(4, 3, 1, 6), plan=plan, synchronization=Synchronization(mode))
    for transport in ("one_sided", "collective"):
        mine = merged(scenario, ranks.run(train, scenario, transport, world_size=4))
        assert_close(scenario, mine, train_reference(scenario))


@pytest.mark.parametrize("transport", ["one_sided", "collective"])
def test_pipelines_train_the_same(ranks, transport):
    scenario = Scenario(tables=mixed("adagrad", torch.float64), batch_sizes=(6, 4), num_steps=4)
    pipelined = replace(scenario, pipeline={"depth": 2, "micro_batches": 3})
    assert_close(scenario, merged(scenario, on_ranks(ranks, pipelined, transport)), train_reference(scenario))


def test_migrations_take_cores_along(ranks):
    tables = mixed("adam")
    shapes = [TableShape.of(spec) for spec in tables if spec.storage == "dense"]
    plain = Scenario(tables=tables, batch_sizes=(4, 3))
    other = Plan.cyclic(shapes[::-1], 2)
    moved = replace(plain, migrations=((1, replace(other, tables=other.tables[::-1])),))
    runs = [merged(each, on_ranks(ranks, each, "auto")) for each in (plain, moved)]
    assert_same_bits(*runs)


def test_large_gradients_are_added_in_parts(ranks):
    """From some size on ranks add a part each; the bits are those of the other transport."""
    wide = TableSpec(
        name="wide",
        num_rows=100_000,
        dim=64,
        optimizer=RULES["sgd"],
        storage="tensor_train",
        tensor_train=TensorTrain(rank=32),
        dtype=torch.float64,
    )
    scenario = Scenario(tables=(wide,), batch_sizes=(5, 4, 3, 2), num_steps=2)
    runs = [merged(scenario, on_ranks(ranks, scenario, name)) for name in ("one_sided", "collective")]
    assert_same_bits(*runs)
    assert_close(scenario, runs[0], train_reference(scenario))


def rule_and_bag(rule, rank=2):
    table = cored("item", 1000, 4, rule, rank)
    bag = TensorTrainEmbeddingBag(1000, 4, mode="sum", rank=rank, seed=0, name="item", initializer=table.initializer)
    return table, bag


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_equals_the_module_to_the_bit(rule):
    table, bag = rule_and_bag(rule)
    collection = EmbeddingCollection([table])
    optimizers = EmbeddingOptimizer(collection), TensorTrainOptimizer(bag, RULES[rule])
    for step in range(4):
        ids = torch.tensor([1, 2, 999, 1, 400 + step])
        vectors = collection(SparseBatch(("item",), ids, 3, jagged_offsets=torch.tensor([0, 2, 3, 5])))["item"]
        expected = bag(ids, torch.tensor([0, 2, 3]))
        assert torch.equal(vectors, expected)
        weights = torch.arange(12.0).view(3, 4)
        (vectors * weights).sum().backward()
        (expected * weights).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        for mine, theirs in zip(collection.cores("item").cores, bag.cores, strict=True):
            assert torch.equal(mine, theirs)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.triton)])
def device(request):
    """Where cores are: on the CPU, or on a GPU, whose kernels are interpreted where there is none."""
    if request.param == "cuda":
        kernels_of("tensor_train")  # or the test is skipped
    return request.param


def train_beside_idle_ranks(mesh, rule, device):
    """Rank 0 has all samples, so that sums over ranks have one term; returns its cores."""
    tables = [cored("item", 1000, 3, rule, (2, 3)), cored("place", 99, 4, rule, 2), cored("shop", 77, 4, "adagrad", 2)]
    collection = EmbeddingCollection(tables, mesh=mesh, device=device)
    optimizer = EmbeddingOptimizer(collection)
    bags = {"item": [[1, 2], [999, 1]], "place": [[], [3]], "shop": [[1], [1]]} if mesh.rank == 0 else {}
    batch = SparseBatch.from_bags({table.name: bags.get(table.name, []) for table in tables})
    for _ in range(3 if device == "cpu" else 2):
        vectors = collection(batch).values
        (vectors.square().sum() * mesh.world_size).backward()
        optimizer.step()
    return [tensor.cpu().clone() for table in tables for tensor in collection.cores(table.name).tensors.values()]


@pytest.mark.parametrize(
    "rule", [pytest.param("sgd", marks=pytest.mark.slow), pytest.param("adagrad", marks=pytest.mark.slow), "adam"]
)
def test_separate_and_fused_updates_are_equal_to_the_bit(ranks, rule, device):
    """Two ranks sum gradients and then update; one does both in a pass. Times two and half are exact."""
    alone = train_beside_idle_ranks(Mesh(), rule, device)
    for found in ranks.run(train_beside_idle_ranks, rule, device):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, alone, strict=True))


def test_gradients_of_an_earlier_look_up_go_through_the_cores_as_they_are(device):
    table = cored("item", 50, 4, "sgd", rank=2, dtype=torch.float64)
    collection = EmbeddingCollection([table], device=device)
    optimizer = EmbeddingOptimizer(collection)
    batch = SparseBatch.from_bags({"item": [[3], [7]]})
    first, second = collection(batch)["item"], collection(batch)["item"]
    first.sum().backward()
    optimizer.step()
    before = [core.clone().requires_grad_() for core in collection.cores("item").cores]
    second.sum().backward()
    optimizer.step()
    replace(collection.cores("item"), cores=tuple(before)).rows(torch.tensor([3, 7])).sum().backward()
    for core, start in zip(collection.cores("item").cores, before, strict=True):
        assert start.grad is not None
        torch.testing.assert_close(core, (start - table.optimizer.lr * start.grad).detach(), rtol=1e-12, atol=1e-12)


def test_a_transport_that_there_is_not_is_refused(device):
    with pytest.raises(ConfigurationError, match=r"transport must be .* got 'one-sided'"):
        EmbeddingCollection([cored("item", 50, 4)], transport="one-sided", device=device)


def test_looks_up_after_no_grad_and_routes_without_ids():
    collection = EmbeddingCollection([cored("item", 50, 4, rank=2)])
    batch = SparseBatch.from_bags({"item": [[3], []]})
    with torch.no_grad():
        rows = collection.fetch(collection.route(batch))
        expected = collection.cores("item").rows(torch.tensor([3]))[0]
    vectors = collection.pool(rows)["item"]
    torch.testing.assert_close(vectors[0], expected)
    assert not vectors[1].any()
    vectors.sum().backward()
    EmbeddingOptimizer(collection).step()
    assert collection(SparseBatch.from_bags({"item": []}))["item"].shape == (0, 4)


def test_ids_outside_the_table():
    collection = EmbeddingCollection([cored("item", 50, 4), cored("page", 50, 4, out_of_range=7)])
    with pytest.raises(IdRangeError, match=r"feature 'item': 1 of 1 ids are outside table 'item'"):
        collection(SparseBatch.from_bags({"item": [[50]], "page": [[0]]}))
    out = collection(SparseBatch.from_bags({"item": [[5]], "page": [[-1]]}))
    torch.testing.assert_close(out["page"][0], collection.cores("page").rows(torch.tensor([7]))[0])


def test_says_what_is_kept_where():
    dense = TableSpec(name="user", num_rows=50, dim=4)
    collection = EmbeddingCollection([cored("item", 50, 4, "adagrad"), dense])
    cores = collection.cores("item")
    assert collection.memory_bytes["rows"] >= sum(core.nbytes for core in cores.cores)
    assert list(collection.plan.replicas) == ["user"]
    assert [group.name for group in collection.groups] == ["dim4_adagrad_tensor_train", "dim4_row_wise_adagrad"]
    with pytest.raises(ConfigurationError, match=r"'item' is a tensor-train table: .*cores\('item'\) gives"):
        collection.local_rows("item")
    with pytest.raises(ConfigurationError, match=r"'user' is dense and has no cores; held_rows\('user'\)"):
        collection.cores("user")
    with pytest.raises(KeyError, match=r"no table 'itm'; there are \['item', 'user'\]"):
        collection.cores("itm")


def test_initial_rows_of_another_mean_are_refused():
    with pytest.raises(ConfigurationError, match=r"table 'item': a tensor-train table starts from rows of mean 0"):
        EmbeddingCollection([replace(cored("item", 50, 4), initializer=Constant(value=1.0))])


def test_more_rows_than_can_be_told_apart():
    tables = [cored(f"t{number}", 2_000_000_000, 4, rank=1) for number in range(3)]
    with pytest.raises(ConfigurationError, match=r"dim4_sgd_tensor_train .* has 6,000,000,000 rows, and at most 4,29"):
        EmbeddingCollection(tables)
    EmbeddingCollection([*tables[:2], replace(tables[2], optimizer=AdaGrad())])

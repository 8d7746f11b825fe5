"""Tensor-train tables on a device train the model that they train on the CPU; on the GPU, or interpreted."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from rowmesh import checkpoint
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.errors import ConfigurationError, IdRangeError, PeerError
from rowmesh.mesh import Mesh
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec
from tests.collection.test_equivalence import assert_close, assert_same_bits
from tests.support.devices import assert_same_counts
from tests.support.scenario import Scenario
from tests.support.tables import table
from tests.support.training import merged, train
from tests.support.triton import kernels_of, refusing_waits
from tests.test_tensor_train_tables import MORE_SHAPES, cored, scenarios

pytestmark = pytest.mark.triton
kernels_of("tensor_train")  # or all are skipped


def mixed(rule, dtype=torch.float32):
    """A group of several tables of cores, one of sequences, and dense tables among them."""
    return (
        cored("place", 300, 3, rule, rank=(2, 3), dtype=dtype),
        table("user", 50, 3, rule, dtype=dtype),
        cored("shop", 11, 3, rule, pooling="mean", features=("shop", "origin"), dtype=dtype),
        cored("page", 60, 4, rule, pooling="none", rank=2, dtype=dtype),
    )


def only_cores(rule, dtype=torch.float32):
    return tuple(each for each in mixed(rule, dtype) if each.storage == "tensor_train")[:2]


ONE_RANK = {
    "weights, accumulation, float64": Scenario(
        tables=mixed("adam", torch.float64), batch_sizes=(3,), is_weighted=True, accumulate=2, num_steps=1
    ),
    "no dense table, evaluations": Scenario(
        tables=only_cores("adagrad"), batch_sizes=(3,), bag_sizes=(1, 1), evaluates=True, num_steps=2
    ),
    "no samples": Scenario(tables=only_cores("sgd"), batch_sizes=(0,), num_steps=1),
}
TWO_RANKS = {
    "beside dense tables": Scenario(tables=mixed("adagrad")[:3], batch_sizes=(3, 2), num_steps=1),
    "no dense table, a rank without samples": Scenario(
        tables=only_cores("adam", torch.float64), batch_sizes=(0, 3), is_weighted=True, accumulate=2, num_steps=1
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "no dense table, evaluations" else ()) for n in ONE_RANK]
)
def test_trains_the_same_model(name):
    scenario = ONE_RANK[name]
    on_device = train(Mesh(), scenario, device="cuda")
    on_cpu = train(Mesh(), scenario)
    assert_close(scenario, on_device, on_cpu)
    assert_same_counts(on_device, on_cpu)


def test_replays_are_equal_to_the_bit():
    scenario = replace(ONE_RANK["no dense table, evaluations"], evaluates=False, num_steps=1)
    assert_same_bits(*(train(Mesh(), scenario, device="cuda") for _ in range(2)))


@pytest.mark.parametrize("name", TWO_RANKS)
def test_trains_the_same_model_on_two_ranks(ranks, name):
    """Cores are equal on both ranks to the bit, which merging asserts."""
    scenario = TWO_RANKS[name]
    on_device = ranks.run(train, scenario, "auto", "cuda", world_size=2)
    on_cpu = ranks.run(train, scenario, "collective", world_size=2)
    assert on_device[0].transport == "collective"
    assert_close(scenario, merged(scenario, on_device), merged(scenario, on_cpu))
    for mine, theirs in zip(on_device, on_cpu, strict=True):
        assert_same_counts(mine, theirs)


@pytest.mark.slow
def test_trains_the_same_model_beside_rows_of_each_others_memory(ranks):
    scenario = TWO_RANKS["beside dense tables"]
    runs = [merged(scenario, ranks.run(train, scenario, name, "cuda", world_size=2)) for name in ("one_sided", "auto")]
    assert runs[0].transport == "one_sided+collective"
    assert_same_bits(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_rules_on_four_ranks(ranks, rule, dtype):
    scenario = Scenario(tables=mixed(rule, dtype), batch_sizes=(4, 0, 3, 6), is_weighted=True, num_steps=2)
    on_device = merged(scenario, ranks.run(train, scenario, "auto", "cuda", world_size=4))
    assert_close(scenario, on_device, merged(scenario, ranks.run(train, scenario, "collective", world_size=4)))


@pytest.mark.slow
@settings(max_examples=40)
@given(scenario=scenarios(MORE_SHAPES))
def test_random_mixtures(ranks, scenario):
    sizes = scenario.batch_sizes[:2]
    scenario = replace(scenario, batch_sizes=sizes)
    on_device = ranks.run(train, scenario, "auto", "cuda", world_size=len(sizes))
    on_cpu = ranks.run(train, scenario, "collective", world_size=len(sizes))
    assert_close(scenario, merged(scenario, on_device), merged(scenario, on_cpu))


def two_tables(**options):
    return [cored("a", 9, 3, **options), cored("b", 4, 3, "adagrad")]


def batch(**bags):
    return SparseBatch.from_bags({"a": [[1], [2, 8]], "b": [[3], []]} | bags)


def step(embeddings, optimizer, sparse):
    embeddings(sparse).values.square().sum().backward()
    optimizer.step()


def cores_of(embeddings):
    return [tensor.cpu().clone() for name in "ab" for tensor in embeddings.cores(name).tensors.values()]


def same(cores, others):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(cores, others, strict=True))


def test_starts_as_the_cpu_does_and_says_what_is_kept_where():
    on_device, on_cpu = (EmbeddingCollection(two_tables(), seed=3, device=device) for device in ("cuda", "cpu"))
    assert same(cores_of(on_device), cores_of(on_cpu))
    assert {core.device for core in on_device.cores("a").cores} == {on_device.device}
    assert on_device.cores("a").rows(torch.tensor([8, 0])).shape == (2, 3)
    kept = ("rows", "optimizer state")
    assert [on_device.memory_bytes[use] for use in kept] == [on_cpu.memory_bytes[use] for use in kept]
    with pytest.raises(ConfigurationError, match=r"'a' is a tensor-train table: .*cores\('a'\) gives"):
        on_device.local_rows("a")


@pytest.mark.parametrize(("wrote", "reads"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_checkpoints_do_not_know_where_cores_were(tmp_path, wrote, reads):
    one, other = (
        EmbeddingCollection(two_tables(), seed=seed, device=where) for seed, where in ((0, wrote), (1, reads))
    )
    step(one, EmbeddingOptimizer(one), batch())
    checkpoint.save(tmp_path / "model", one, {})
    checkpoint.load(tmp_path / "model", other)
    assert same(cores_of(one), cores_of(other))


def test_ids_outside_are_mapped_and_counted():
    found = []
    for device in ("cpu", "cuda"):
        embeddings = EmbeddingCollection(two_tables(out_of_range=5), device=device)
        step(embeddings, EmbeddingOptimizer(embeddings), batch(a=[[9, -1], [1, 2**40]]))
        embeddings.barrier()
        found.append((cores_of(embeddings), embeddings.counters))
    for mine, theirs in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert [counters.out_of_range for counters in found[1][1]] == [{"a": 3}, {}]
    assert [counters.unique_ids for counters in found[0][1]] == [counters.unique_ids for counters in found[1][1]]


MESSAGE = r"rank 0, look-up \d \(after \d steps\): feature 'b': 1 of 2 ids .* table 'b' \(0 to 3\), the first is 4"


@pytest.mark.parametrize("beside", [[], [TableSpec(name="user", num_rows=5, dim=3)]])
def test_a_refused_batch_changes_nothing(beside):
    """And is refused once, whichever of the two parts of a collection looks first."""
    embeddings = EmbeddingCollection([*two_tables(), *beside], device="cuda")
    optimizer, users = EmbeddingOptimizer(embeddings), {each.name: [[1], [2]] for each in beside}
    before = cores_of(embeddings)
    with pytest.raises(IdRangeError, match=MESSAGE):
        step(embeddings, optimizer, batch(b=[[4], [1]], **users))
    assert same(before, cores_of(embeddings))
    step(embeddings, optimizer, batch(**users))
    assert not same(before, cores_of(embeddings))


def test_evaluations_refuse_at_once_and_look_ups_at_the_next_one():
    embeddings = EmbeddingCollection(two_tables(), device="cuda")
    with torch.no_grad(), pytest.raises(IdRangeError, match=MESSAGE):
        embeddings(batch(b=[[4], [1]]))
    embeddings(batch(b=[[4], [1]]))
    with pytest.raises(IdRangeError, match=MESSAGE):
        embeddings(batch())


def refuse_on_rank_1(mesh):
    embeddings = EmbeddingCollection(two_tables(), mesh=mesh, device="cuda")
    with pytest.raises((IdRangeError, PeerError)) as raised:
        embeddings(batch(b=[[4], [1]]) if mesh.rank == 1 else batch())
    embeddings(batch())  # goes on
    with pytest.raises(PeerError, match="rank 0 is in forward 3, rank 1 is in step 1"):
        embeddings(batch()) if mesh.rank == 0 else embeddings.push([], [0.1, 0.1])
    return f"{type(raised.value).__name__}: {raised.value}", embeddings.counters[0].unique_ids


def test_all_ranks_learn_of_a_refused_batch_and_of_ranks_that_do_different_things(ranks):
    """Where there is no dense table, whose messages would carry them."""
    (first, unique), (second, _) = ranks.run(refuse_on_rank_1)
    assert first.startswith(("PeerError: rank 0: rank 1 refused", "RefusedError: rank 0: rank 1 refused"))
    assert second.startswith("IdRangeError: rank 1, look-up 1 (after 0 steps): feature 'b'")
    assert unique == 3


def test_a_step_on_one_rank_does_not_wait_for_the_gpu(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU: only torch's sync debug mode sees waits")
    embeddings = EmbeddingCollection(two_tables(), device="cuda")
    optimizer = EmbeddingOptimizer(embeddings)
    for watch in (nullcontext, refusing_waits, refusing_waits):  # kernels are compiled in the first step
        with watch():
            step(embeddings, optimizer, batch())

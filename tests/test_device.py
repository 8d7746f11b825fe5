"""Rows on a device train the model that rows on the CPU train; on the GPU where there is one, else interpreted."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace

import pytest
import torch

from rowmesh import checkpoint
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.errors import ConfigurationError, IdRangeError, PeerError
from rowmesh.mesh import Mesh, devices
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from tests.collection.test_equivalence import assert_close, assert_same_bits
from tests.support.devices import assert_same_counts, batch, push_on_some, two_tables
from tests.support.scenario import Scenario
from tests.support.tables import several, table
from tests.support.training import train
from tests.support.triton import kernels_of, refusing_waits

pytestmark = pytest.mark.triton
kernels_of("pool")  # or all are skipped

ONE_RANK = {
    "bags": Scenario(tables=several("row_wise_adagrad"), batch_sizes=(4,), decay=0.5),
    "weights, evaluations": Scenario(
        tables=several("adam"), batch_sizes=(3,), is_weighted=True, evaluates=True, num_steps=2
    ),
    "float64, accumulation": Scenario(
        tables=several("adagrad", torch.float64), batch_sizes=(3,), is_weighted=True, accumulate=2, num_steps=2
    ),
    # One step: the interpreter cuts numbers off where bfloat16 is stored, a GPU rounds them.
    "bfloat16, fixed bags": Scenario(
        tables=several("sgd", torch.bfloat16), batch_sizes=(3,), bag_sizes=(2, 2), num_steps=1
    ),
    "no samples": Scenario(tables=several("adagrad"), batch_sizes=(0,), num_steps=1),
    "a hot row": Scenario(
        tables=(table("a", 3, 5, "adam", dtype=torch.float64),),
        batch_sizes=(300,),
        bag_sizes=(1, 1),
        skew=1e9,
        num_steps=2,
    ),
}
TWO_RANKS = {
    "bags": Scenario(tables=several("row_wise_adagrad"), num_steps=2),
    "a rank without samples, accumulation": Scenario(
        tables=several("adam", torch.float64), batch_sizes=(0, 3), is_weighted=True, accumulate=2, num_steps=2
    ),
    "bfloat16": Scenario(tables=(table("b", 9, 3, "adagrad", dtype=torch.bfloat16),), bag_sizes=(2, 2), num_steps=1),
}


@pytest.mark.parametrize("name", ONE_RANK)
def test_trains_the_same_model(name):
    scenario = ONE_RANK[name]
    on_device = train(Mesh(), scenario, device="cuda")
    on_cpu = train(Mesh(), scenario)
    assert_close(scenario, on_device, on_cpu)
    assert_same_counts(on_device, on_cpu)
    assert_same_bits(on_device, train(Mesh(), scenario, device="cuda"))


@pytest.mark.parametrize("name", TWO_RANKS)
def test_trains_the_same_model_on_two_ranks(ranks, name):
    scenario = TWO_RANKS[name]
    on_device = ranks.run(train, scenario, "auto", "cuda", world_size=2)
    for mine, theirs in zip(on_device, ranks.run(train, scenario, "collective", world_size=2), strict=True):
        assert mine.transport == "collective"
        assert_close(scenario, mine, theirs)
        assert_same_counts(mine, theirs)
        assert mine.owned == theirs.owned
    for mine, again in zip(on_device, ranks.run(train, scenario, "auto", "cuda", world_size=2), strict=True):
        assert_same_bits(mine, again)


def test_sums_nodes_first(ranks):
    """Four ranks on two pretended hosts, two look-ups, one step: differences of order would be seen."""
    tables = (table("a", 2, 3, "sgd"),)
    sizes = {"batch_sizes": (3, 2, 4, 3), "bag_sizes": (2, 2), "ranks_per_node": 2}
    scenario = Scenario(tables=tables, **sizes, num_steps=1, accumulate=2)
    on_device = ranks.run(train, scenario, "auto", "cuda", world_size=4)
    for mine, theirs in zip(on_device, ranks.run(train, scenario, "collective", world_size=4), strict=True):
        assert_same_bits(mine, theirs)


def step(embeddings, optimizer, sparse):
    embeddings(sparse).values.square().sum().backward()
    optimizer.step()


def values_of(embeddings, name):
    return torch.cat([piece.values for piece in embeddings.local_rows(name)])


def test_ids_outside_are_mapped_and_counted():
    found = []
    for device in ("cpu", "cuda"):
        embeddings = EmbeddingCollection(two_tables(out_of_range=5), device=device)
        optimizer = EmbeddingOptimizer(embeddings)
        for _ in range(2):
            step(embeddings, optimizer, batch(a=[[9, -1], [1, 2**40]]))
        embeddings.barrier()
        found.append((values_of(embeddings, "a"), embeddings.counters[0]))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1].out_of_range == found[1][1].out_of_range == {"a": 6}
    assert found[0][1].unique_ids == found[1][1].unique_ids == 6


MESSAGE = r"rank 0, look-up \d \(after \d steps\): feature 'b': 1 of 2 ids .* table 'b' \(0 to 3\), the first is 4"


def test_a_refused_batch_changes_nothing():
    """What is wrong is known by the time of the update, which is not made."""
    embeddings = EmbeddingCollection(two_tables(), device="cuda")
    optimizer = EmbeddingOptimizer(embeddings)
    before = values_of(embeddings, "a"), values_of(embeddings, "b")
    with pytest.raises(IdRangeError, match=MESSAGE):
        step(embeddings, optimizer, batch(b=[[4], [1]]))
    assert torch.equal(before[0], values_of(embeddings, "a"))
    assert torch.equal(before[1], values_of(embeddings, "b"))
    assert embeddings.step_count == 0
    step(embeddings, optimizer, batch())
    assert not torch.equal(before[0], values_of(embeddings, "a"))


def test_evaluations_refuse_at_once_and_look_ups_at_the_next_one():
    embeddings = EmbeddingCollection(two_tables(), device="cuda")
    with torch.no_grad(), pytest.raises(IdRangeError, match=MESSAGE):
        embeddings(batch(b=[[4], [1]]))
    embeddings(batch(b=[[4], [1]]))
    with pytest.raises(IdRangeError, match=MESSAGE):
        embeddings(batch())
    embeddings(batch())


def refuse_on_rank_1(mesh):
    embeddings = EmbeddingCollection(two_tables(), mesh=mesh, device="cuda")
    try:
        embeddings(batch(b=[[4], [1]]) if mesh.rank == 1 else batch())
    except (IdRangeError, PeerError) as error:
        refused = f"{type(error).__name__}: {error}"
    embeddings(batch())  # goes on
    return refused


def test_all_ranks_learn_of_a_refused_batch(ranks):
    first, second = ranks.run(refuse_on_rank_1)
    assert first.startswith("RefusedError: rank 0: rank 1 refused a batch")
    assert second.startswith("IdRangeError: rank 1, look-up 1 (after 0 steps): feature 'b'")


def push_unlike(mesh, device):
    """Rank 0 uses both of two look-ups, rank 1 the second alone."""
    embeddings = EmbeddingCollection(two_tables(), mesh=mesh, transport="collective", device=device)
    optimizer = EmbeddingOptimizer(embeddings)
    push_on_some(embeddings, optimizer, mesh.rank)
    (counters,) = embeddings.counters
    return [values_of(embeddings, name) for name in ("a", "b")], (counters.table_accesses, counters.table_distinct)


def test_ranks_need_not_push_the_same_routes(ranks):
    for mine, theirs in zip(ranks.run(push_unlike, "cuda"), ranks.run(push_unlike, "cpu"), strict=True):
        torch.testing.assert_close(mine[0], theirs[0], rtol=1e-6, atol=1e-7)
        assert mine[1] == theirs[1]


def out_of_step(mesh):
    embeddings = EmbeddingCollection(two_tables(), mesh=mesh, device="cuda")
    with pytest.raises(PeerError, match="rank 0 is in forward 1, rank 1 is in step 1"):
        embeddings(batch()) if mesh.rank == 0 else embeddings.push([], [0.1])


def test_ranks_that_do_different_things_are_named(ranks):
    ranks.run(out_of_step)


@pytest.mark.parametrize(("wrote", "reads"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_checkpoints_do_not_know_where_rows_were(tmp_path, wrote, reads):
    tables = several("adam")
    scenario = Scenario(tables=tables, batch_sizes=(3,))
    one, other = (EmbeddingCollection(tables, seed=seed, device=where) for seed, where in ((0, wrote), (1, reads)))
    sparse = scenario.local_batch(0, 0, 0).sparse
    step(one, EmbeddingOptimizer(one), sparse)
    checkpoint.save(tmp_path / "model", one, {})
    checkpoint.load(tmp_path / "model", other)
    for each in tables:
        for mine, theirs in zip(one.local_rows(each.name), other.local_rows(each.name), strict=True):
            assert torch.equal(mine.values, theirs.values)
            assert all(torch.equal(mine.state[name], theirs.state[name]) for name in mine.state)


SHAPES = [TableShape.of(each) for each in two_tables()]


def test_rows_may_be_fixed_to_ranks(ranks):
    ranges = [(RowRange(0, 5, "fixed", rank=1), RowRange(5, 9, shift=1)), (RowRange(0, 4, "fixed", rank=0),)]
    plan = Plan(tuple(TablePlan(*pair) for pair in zip(SHAPES, ranges, strict=True)), 2, 2)
    scenario = Scenario(tables=tuple(two_tables()), plan=plan, num_steps=2)
    on_device = ranks.run(train, scenario, "auto", "cuda")
    for mine, theirs in zip(on_device, ranks.run(train, scenario, "collective"), strict=True):
        assert_close(scenario, mine, theirs)
        assert mine.owned == theirs.owned


def under_default_device(mesh, device):
    torch.set_default_device(device)
    try:
        embeddings = EmbeddingCollection(two_tables(), mesh=mesh, device="cuda")
        optimizer = EmbeddingOptimizer(embeddings)
        for _ in range(2):
            step(embeddings, optimizer, batch())
        embeddings.barrier()
    finally:
        torch.set_default_device("cpu")
    return values_of(embeddings, "a")


def test_where_torch_makes_tensors_by_default_does_not_matter_on_any_ranks(ranks):
    assert torch.equal(under_default_device(Mesh(), "meta"), under_default_device(Mesh(), "cpu"))
    for mine, theirs in zip(*(ranks.run(under_default_device, where) for where in ("meta", "cpu")), strict=True):
        assert torch.equal(mine, theirs)


def test_says_what_is_missing(monkeypatch):
    with pytest.raises(ConfigurationError, match="device must be 'cpu' or 'cuda'"):
        EmbeddingCollection(two_tables(), device="meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigurationError, match=r"is_available\(\) is false\. Install .* or use device 'cpu'"):
        EmbeddingCollection(two_tables(), device="cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"needs triton, which is not installed.*'\.\[gpu\]'"):
        EmbeddingCollection(two_tables(), device="cuda")


def test_says_what_it_runs_on(caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with caplog.at_level(logging.WARNING, "rowmesh"):
        assert devices.usable_device("cuda") == torch.device("cpu")
    assert "kernels are interpreted, slowly" in caplog.text


@pytest.mark.parametrize("storage", ["dense", "tiered"])
def test_a_step_on_one_rank_does_not_wait_for_the_gpu(device, storage):
    if device.type != "cuda":
        pytest.skip("needs a GPU: only torch's sync debug mode sees waits")
    embeddings = EmbeddingCollection(two_tables(storage=storage), device="cuda")
    optimizer = EmbeddingOptimizer(embeddings)
    step(embeddings, optimizer, batch())  # kernels are compiled
    with refusing_waits():
        for _ in range(3):
            step(embeddings, optimizer, batch())


def test_tables_on_a_device_send_rows():
    item = table("item", 9, 4, "sgd")
    with pytest.raises(ConfigurationError, match=r"tables \['item'\] are to send sums, and on .* tables send rows"):
        EmbeddingCollection([replace(item, send="sums")], device="cuda")
    plan = Plan((TablePlan.of_sums(TableShape.of(item), 0),), 1, 1)
    with pytest.raises(ConfigurationError, match=r"tables \['item'\] are to send sums, and on .* tables send rows"):
        EmbeddingCollection([item], plan=plan, device="cuda")
    EmbeddingCollection([replace(item, send="auto")], device="cuda")

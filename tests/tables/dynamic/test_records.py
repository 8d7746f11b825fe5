"""What dynamic tables know is saved, and read again on any number of ranks: training goes on as if nothing had been."""

import logging
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import rowmesh
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, TableSpec
from rowmesh.checkpoint import CheckpointError, read_manifest
from rowmesh.mesh import Mesh
from rowmesh.sparse import take
from rowmesh.tables import Dynamic, Uniform
from rowmesh.tables.dynamic.demoted_records import PREFIX
from tests.exchange.resolve.test_resolver import RULES
from tests.support.dynamic import Stream, known_of, make
from tests.support.dynamic_streams import streams
from tests.support.shards import shard_of

DEMOTE = {"mode": "demote", "store": "memory"}
RULES = RULES | {
    "demoting": Dynamic(capacity=24, shards=2, **DEMOTE),
    "demoting, lfu": Dynamic(capacity=24, shards=3, eviction="lfu", decay_steps=3, **DEMOTE),
    "forgetting": Dynamic(capacity=24, shards=2, store_capacity=12, **DEMOTE),
}


def in_store(stream, url):
    """The same with the records elsewhere."""
    rules = [
        (name, replace(each, store=url) if each.mode == "demote" and each.store_capacity else each)
        for name, each in stream.rules
    ]
    return replace(stream, rules=tuple(rules))


def run_first(mesh, stream, folder, count):
    embeddings = make(mesh, stream)
    optimizer = train_on(embeddings, stream, range(count), mesh)
    rowmesh.save(folder, {"embeddings": embeddings, "optimizer": optimizer})
    return whole(embeddings, stream, range(count, stream.num_steps), mesh)


def train_on(embeddings, stream, steps, mesh):
    """On one or two ranks, the same global batches; a third has none."""
    optimizer = EmbeddingOptimizer(embeddings)
    for step in steps:
        own = [rank for rank in range(2) if rank % mesh.world_size == mesh.rank]
        batches = [stream.batch(step, rank, is_dynamic=True) for rank in own] or [
            take(stream.batch(step, 0, is_dynamic=True), torch.empty(0, dtype=torch.int64))
        ]
        batch = batches[0] if len(batches) == 1 else joined(batches)
        (mesh.world_size * embeddings(batch).values ** 2).sum().backward()  # gradients are averaged over ranks
        optimizer.step()
    return optimizer


def joined(batches):
    bags = {}
    for name in batches[0].features:
        bags[name] = [bag for batch in batches for bag in bags_of(batch, name)]
    scores = None
    if batches[0].scores is not None:
        places = range(len(batches[0].features))
        scores = torch.cat([batch.scores[slice(*batch.feature_range(i))] for i in places for batch in batches])
    time = max(batch.time for batch in batches)
    return replace(rowmesh.SparseBatch.from_bags(bags), time=time, scores=scores)


def bags_of(batch, name):
    number = batch.features.index(name)
    offsets = batch.jagged_offsets[number * batch.batch_size : (number + 1) * batch.batch_size + 1].tolist()
    return [batch.ids[first:last].tolist() for first, last in pairwise(offsets)]


def whole(embeddings, stream, steps, mesh):
    """What is known at the end, in fast memory or demoted."""
    train_on(embeddings, stream, steps, mesh)
    return {name: known_of(embeddings, name) | demoted_of(embeddings, name) for name, _ in stream.rules}


def demoted_of(embeddings, name):
    """The same of demoted ids: rows and states, and last of all facts, as bytes."""
    found = {}
    for piece in shard_of(embeddings, name, "held").pieces.get(PREFIX, ()):
        tensors = [piece.values, *(tensor for kind, tensor in piece.state.items() if kind != "facts")]
        for place, i in enumerate(piece.rows.tolist()):
            found[i] = (*(each[place].numpy().tobytes() for each in tensors), *piece.state["facts"][place].tolist())
    return found


def run_rest(mesh, stream, folder, count):
    embeddings = make(mesh, stream)
    optimizer = EmbeddingOptimizer(embeddings)
    rowmesh.load(folder, {"embeddings": embeddings, "optimizer": optimizer})
    return whole(embeddings, stream, range(count, stream.num_steps), mesh)


def of_all(parts, name):
    found = {}
    for part in parts:
        assert not found.keys() & part[name].keys()
        found |= part[name]
    return found


def facts(known):
    """Counts, last steps and scores by id."""
    return {i: values[-3:] for i, values in known.items()}


STREAMS = streams(RULES, num_steps=st.just(6))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stream=STREAMS, count=st.integers(1, 5))
def test_training_goes_on_to_the_bit(tmp_path_factory, stream, count):
    folder = tmp_path_factory.mktemp("saved") / "model"
    untouched = run_first(Mesh(), stream, folder, count)
    assert run_rest(Mesh(), stream, folder, count) == untouched


@pytest.mark.parametrize(
    ("writers", "readers", "user", "item"),
    [
        (2, 2, "sketch", "ttl"),
        (2, 3, "seconds", "lru"),
        (2, 1, "both", "lfu"),
        (1, 2, "window", "one shard"),
        (2, 3, "lru", "sketch"),
        (2, 2, "forgetting", "demoting"),
        (2, 3, "demoting", "forgetting"),
        (1, 2, "forgetting", "demoting, lfu"),
        (3, 1, "score", "demoting, lfu"),
    ],
)
def test_any_number_of_ranks_reads_it(ranks, tmp_path, writers, readers, user, item):
    stream = Stream(rules=(("user", RULES[user]), ("item", RULES[item])), seed=readers, num_steps=6)
    untouched = ranks.run(run_first, stream, tmp_path / "model", 3, world_size=writers)
    elsewhere = in_store(stream, f"file:{tmp_path / 'records'}")
    gone_on = ranks.run(run_rest, elsewhere, tmp_path / "model", 3, world_size=readers)
    for name, _ in stream.rules:
        before, after = of_all(untouched, name), of_all(gone_on, name)
        assert before
        assert facts(after) == facts(before)  # to the bit on any number of ranks
        if writers == readers:
            assert after == before
        for i, values in before.items():
            rows = [np.frombuffer(each[0], np.float32) for each in (values, after[i])]
            np.testing.assert_allclose(*rows, rtol=1e-5, atol=1e-6)


def spec(**options):
    rules = {"capacity": 40, "shards": 4} | options.pop("rules", {})
    shape = {"name": "user", "dim": 3, "storage": "dynamic", "initializer": Uniform(bound=0.1)}
    return TableSpec(**{**shape, "dynamic": Dynamic(**rules), **options})


def saved(folder, table):
    embeddings = EmbeddingCollection([table])
    optimizer = EmbeddingOptimizer(embeddings)
    embeddings(rowmesh.SparseBatch.from_bags({"user": [[5, -7, 2**62]]})).values.sum().backward()
    optimizer.step()
    rowmesh.save(folder, {"embeddings": embeddings})
    return embeddings


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (spec(rules={"shards": 2}), "shards is 4 in the checkpoint and 2 here"),
        (spec(rules={"admit_after": 3}), "admit_after is 1 in the checkpoint and 3 here"),
        (spec(rules={"capacity": 39}), "its capacity is 40 in the checkpoint and 39 here; .* capacity of 40 or more"),
        (spec(rules={"capacity": 2000, "shards": None}), r"shards is 4 .* and 2 here; .* give Dynamic\(shards=4\)"),
        (spec(rules={"eviction": "lfu"}), "eviction is lru in the checkpoint and lfu here"),
        (spec(dim=4), "dim is 3 in the checkpoint and 4 here"),
        (
            TableSpec(name="user", num_rows=40, dim=3),
            "'user' is dynamic in the checkpoint and dense here; use the configuration",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, table, message):
    saved(tmp_path / "model", spec())
    embeddings = EmbeddingCollection([table])
    with pytest.raises(CheckpointError, match=message):
        rowmesh.load(tmp_path / "model", {"embeddings": embeddings})


@pytest.mark.parametrize(
    ("before", "now", "advice"),
    [
        (20, 40, r"give Dynamic\(store_capacity=20\), or tables\.dynamic\.store_capacity=20 in a configuration"),
        (20, None, r"give Dynamic\(store_capacity=20\)"),
        (None, 20, "leave store_capacity out"),
    ],
)
def test_the_capacity_of_a_store_stays_as_it_was(tmp_path, before, now, advice):
    saved(tmp_path / "model", spec(rules={**DEMOTE, "store_capacity": before}))
    embeddings = EmbeddingCollection([spec(rules={**DEMOTE, "store_capacity": now, "capacity": 50})])
    message = (
        f"'user': store_capacity is {before or 0} .* and {now or 0} here; .* grows in its capacity alone: {advice}"
    )
    with pytest.raises(CheckpointError, match=message):
        rowmesh.load(tmp_path / "model", {"embeddings": embeddings})


GROWN = {"lru": {}, "sketch": {"admit_after": 2, "sketch_width": 8}, "ttl": {"ttl_steps": 3}, "demoting": DEMOTE}


def grown(mesh, stream, rules, folder, count):
    """What is known at the end where the table had all its room from the start, and where it got it half way."""
    large = replace(stream, rules=(("user", rules),))
    expected = run_first(mesh, large, folder / "large", count)
    small = replace(stream, rules=(("user", replace(rules, capacity=300)),))
    run_first(mesh, small, folder / "small", count)
    return expected, run_rest(mesh, large, folder / "small", count)


@pytest.mark.parametrize("kind", GROWN)
def test_a_table_that_grows_is_as_if_it_had_been_as_large(tmp_path, kind):
    """As long as no id had to leave for want of room."""
    stream = Stream(rules=(("user", RULES["lru"]),), seed=3, num_steps=6)
    expected, found = grown(Mesh(), stream, Dynamic(capacity=900, shards=2, **GROWN[kind]), tmp_path, 3)
    assert found == expected
    assert found["user"]


def test_a_full_table_that_grows_keeps_its_ids_and_takes_others(tmp_path):
    def looked_up(embeddings, ids):
        optimizer = EmbeddingOptimizer(embeddings)
        embeddings(rowmesh.SparseBatch.from_bags({"user": [ids]})).values.sum().backward()
        optimizer.step()

    small = EmbeddingCollection([spec(rules={"capacity": 4, "shards": 1})])
    looked_up(small, [1, 2, 3, 4])
    looked_up(small, [3, 4, 5, 6])
    before = known_of(small, "user")
    assert before.keys() == {3, 4, 5, 6}
    rowmesh.save(tmp_path / "model", {"embeddings": small, "optimizer": EmbeddingOptimizer(small)})
    large = EmbeddingCollection([spec(rules={"capacity": 8, "shards": 1})])
    rowmesh.load(tmp_path / "model", {"embeddings": large, "optimizer": EmbeddingOptimizer(large)})
    assert known_of(large, "user") == before
    looked_up(large, [7, 8])
    assert known_of(large, "user").keys() == {3, 4, 5, 6, 7, 8}
    rowmesh.save(tmp_path / "model", {"embeddings": large}, overwrite=True)
    with pytest.raises(CheckpointError, match="its capacity is 8 in the checkpoint and 4 here"):
        rowmesh.load(tmp_path / "model", {"embeddings": small})


def test_another_seed_is_said_once(tmp_path, caplog):
    embeddings = EmbeddingCollection([spec(), spec(name="item")], seed=5)
    rowmesh.save(tmp_path / "model", {"embeddings": embeddings})
    assert {part.seed for part in read_manifest(tmp_path / "model").tables["user"].known.parts} == {5}
    rowmesh.load(tmp_path / "model", {"embeddings": embeddings})
    assert not caplog.messages
    rowmesh.load(tmp_path / "model", {"embeddings": EmbeddingCollection([spec(), spec(name="item")], seed=6)})
    (line,) = caplog.messages
    assert "tables user, item of" in line
    assert "trained with seed 5 and are here made with seed 6" in line


def said_of_seeds(mesh, folder):
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("rowmesh").addHandler(handler)
    try:
        rowmesh.load(folder, {"embeddings": EmbeddingCollection([spec()], mesh=mesh, seed=6)})
    finally:
        logging.getLogger("rowmesh").removeHandler(handler)
    return [line for line in lines if "seed" in line]


def test_another_seed_is_said_by_one_rank(ranks, tmp_path):
    rowmesh.save(tmp_path / "model", {"embeddings": EmbeddingCollection([spec()], seed=5)})
    said = ranks.run(said_of_seeds, tmp_path / "model", world_size=2)
    assert sum(map(len, said)) == 1


def test_a_dense_table_is_no_dynamic_one(tmp_path):
    rowmesh.save(tmp_path / "model", {"embeddings": EmbeddingCollection([TableSpec(name="user", num_rows=40, dim=3)])})
    with pytest.raises(CheckpointError, match="'user' is stored by row in the checkpoint and dynamic here"):
        rowmesh.load(tmp_path / "model", {"embeddings": EmbeddingCollection([spec()])})


def test_rows_alone_are_read_without_an_optimizer(tmp_path):
    before = saved(tmp_path / "model", spec())
    assert read_manifest(tmp_path / "model").format == 3
    embeddings = EmbeddingCollection([spec(rules={"missing": "zero"})])
    rowmesh.load(tmp_path / "model", {"embeddings": embeddings})
    batch = rowmesh.SparseBatch.from_bags({"user": [[5, -7, 2**62], [6]]})
    with torch.no_grad():
        found, expected = embeddings(batch).values, before(batch).values
    assert torch.equal(found[0], expected[0])
    assert not found[1].any()


def test_a_damaged_file_is_named(tmp_path):
    saved(tmp_path / "model", spec())
    (file,) = (tmp_path / "model").glob("*/user.0.ids.npy")
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"table 'user': .*user.0.ids.npy"):
        rowmesh.load(tmp_path / "model", {"embeddings": EmbeddingCollection([spec()])})

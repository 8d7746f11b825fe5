"""Dynamic tables with rows on a device do as the rules say: on the GPU where there is one, else interpreted."""

from dataclasses import replace

import pytest
import torch

from rowmesh import checkpoint
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.errors import ConfigurationError, IdRangeError, NoRoomError
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.ops.dynamic_index.device import DeviceIndex
from rowmesh.sparse import SparseBatch
from rowmesh.tables import Dynamic
from tests.exchange.resolve.test_averages import AVERAGED, assert_as_expected
from tests.exchange.resolve.test_resolver import RULES, at_the_end
from tests.pipeline.test_accumulated_dynamic import Job, compare
from tests.support.dynamic import (
    IDS,
    Stream,
    assert_near,
    assert_same,
    known_of,
    make,
    run_dynamic,
    run_oracle,
    run_pipeline,
)
from tests.support.dynamic_average import run_average_oracle
from tests.support.refused import known_of as known_by_rules
from tests.support.triton import find_device, kernels_of
from tests.tables.dynamic.test_demoted import DEMOTE
from tests.tables.dynamic.test_demoted import RULES as DEMOTED

pytestmark = pytest.mark.triton
kernels_of("pool")  # or all are skipped

STREAM = Stream(
    rules=(("user", RULES["lru"]), ("item", RULES["both"])),
    num_steps=3,
    rule="exact",
    is_linear=True,
    evaluates=True,
    device="cuda",
)


def demoting(world_size):
    """Such that ids of both tables come back."""
    user, item = Dynamic(capacity=8 + 6 * world_size, **DEMOTE), Dynamic(capacity=4 + 4 * world_size, **DEMOTE)
    rules = (("user", user), ("item", replace(item, eviction="lru_lfu")))
    return replace(STREAM, rules=rules, num_steps=4, seed=9)


MORE = {
    "a sequence, ids refused in evaluation": replace(STREAM, pooling="none", missing="error", seed=1),
    "one row of zeros for unknown ids": replace(STREAM, missing="zero", seed=2),
    "scores": replace(STREAM, rules=(("user", RULES["score"]), ("item", RULES["lru"]))),
    "demoted and forgotten": replace(
        STREAM, rules=(("user", DEMOTED["forgetting"]), ("item", DEMOTED["ttl too"])), missing="zero", num_steps=5
    ),
    "told of all ids": replace(STREAM, is_hooked=True, seed=3),
    "time to live": replace(STREAM, rules=(("user", RULES["ttl"]), ("item", RULES["sketch"])), num_steps=5),
}


def test_one_rank_does_as_the_rules_say():
    assert_same([run_dynamic(Mesh(), STREAM)], [run_oracle(Mesh(), STREAM)])


def test_known_ids_are_found_and_counted_on_the_device(monkeypatch):
    """The host gets none of them, in training and in evaluation; another table may ask it meanwhile."""
    rules = (("user", Dynamic(capacity=40, shards=2, eviction="lfu")), ("item", RULES["ttl"]))
    stream = replace(STREAM, rules=rules)
    embeddings, batch = make(Mesh(), stream), stream.batch(0, 0, is_dynamic=True)
    assert embeddings.engine.resolver.device_tables == ("user",)
    embeddings(batch)
    before = embeddings.statistics("user", IDS)
    with monkeypatch.context() as patched:
        for name in ("find", "seen", "all_ids", "read"):
            patched.setattr(DeviceIndex, name, None)
        embeddings(batch)
        with torch.no_grad():
            embeddings(batch)
    after, known = embeddings.statistics("user", IDS), before.known
    assert after.known.tolist() == known.tolist()
    assert after.count.tolist() == (2 * before.count).tolist()
    assert after.score.tolist() == (2 * before.score).tolist()
    assert (after.last_step[known] == before.last_step[known] + 1).all()
    counters = embeddings.dynamic_counters["user"]
    assert counters.admitted == counters.hits == counters.found == known.sum()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_pipeline_that_accumulates_does_as_a_plain_loop(ranks, world_size):
    job = Job(replace(STREAM, num_steps=5), accumulate=2, pipeline={"depth": 1, "micro_batches": 2})
    compare(None if world_size == 1 else ranks, job, world_size)


def test_where_the_index_is_is_said(caplog):
    caplog.set_level("INFO")
    make(Mesh(), replace(STREAM, rules=(("user", RULES["lru"]), ("item", RULES["score"]))))
    assert f"index of dynamic tables user: on {find_device().type}" in caplog.text
    assert "index of dynamic tables item: in the host's memory, which reads the caller's scores" in caplog.text


def test_demoted_ids_come_back():
    stream = demoting(1)
    (found,) = expected = [run_oracle(Mesh(), stream)]
    assert all(found.counters[name][4] for name, _ in stream.rules), "some are promoted"
    assert_same([run_dynamic(Mesh(), stream)], expected)


def test_a_refused_batch_decides_nothing():
    """Of two tables on the device, of which the second has no room; and where an id of the dense one is no row."""
    full = Dynamic(capacity=2, shards=1, admit_after=2, sketch_width=7, sketch_depth=2)
    embeddings = make(Mesh(), replace(STREAM, rules=(("user", RULES["lru"]), ("item", full))))
    assert embeddings.engine.resolver.device_tables == ("user", "item")

    def look_up(users, items, row=0):
        bags = {"user": [users], "user_too": [[]], "item": [items], "plain": [[row]]}
        return embeddings(SparseBatch.from_bags(bags))

    look_up([1, 2], [5, 5, 6])
    before = known_by_rules(embeddings)
    with pytest.raises(NoRoomError, match="'item'"):
        look_up([1, 3], [6, 7, 7, 8, 8])
    assert known_by_rules(embeddings) == before
    with pytest.raises(IdRangeError, match="'plain'"):
        look_up([1, 3], [6], 7)
    assert known_by_rules(embeddings) == before
    look_up([1, 3], [6])
    after = embeddings.statistics("user", [1, 2, 3]), embeddings.statistics("item", [5, 6, 7])
    assert [each.count.tolist() for each in after] == [[2, 1, 1], [2, 2, 0]]
    assert after[0].last_step.tolist() == [2, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_rules(name):
    assert_same([run_dynamic(Mesh(), MORE[name])], [run_oracle(Mesh(), MORE[name])])


@pytest.mark.parametrize("rule", ["row_wise_adagrad", pytest.param("adam", marks=pytest.mark.slow)])
def test_the_rows_are_those_of_the_host_but_for_rounding(rule):
    stream = replace(STREAM, rule=rule, is_linear=False, num_steps=2)
    assert_near([run_dynamic(Mesh(), stream)], [run_dynamic(Mesh(), replace(stream, device="cpu"))])


@pytest.mark.parametrize("depth, parts", [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_pipeline_does_as_the_rules_say(depth, parts):
    expected = at_the_end([run_oracle(Mesh(), STREAM, every_step=False)])
    assert_same([run_pipeline(Mesh(), STREAM, "auto", depth, parts)], expected)


def test_two_ranks_do_as_the_rules_say(ranks):
    stream = replace(STREAM, num_steps=2)
    found = ranks.run(run_dynamic, stream, "auto", world_size=2)
    assert {each.transport for each in found} == {"collective"}
    assert_same(found, ranks.run(run_oracle, stream, world_size=2))


@pytest.mark.slow
def test_exact_replicas_know_the_same(ranks):
    expected = ranks.run(run_oracle, STREAM, 2, world_size=2)
    assert_same(ranks.run(run_dynamic, STREAM, "auto", 2, world_size=2), expected, replicas=2)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_pipelines_of_ranks_do_as_the_rules_say(ranks, world_size):
    expected = at_the_end(ranks.run(run_oracle, STREAM, world_size=world_size))
    for depth, parts in ((0, 1), (1, 2), (2, 1)):
        assert_same(ranks.run(run_pipeline, STREAM, "auto", depth, parts, world_size=world_size), expected)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_demoted_ids_come_back_to_pipelines_of_ranks(ranks, world_size):
    stream = demoting(world_size)
    expected = at_the_end(ranks.run(run_oracle, stream, world_size=world_size))
    assert all(expected[0].counters[name][4] for name, _ in stream.rules), "some are promoted"
    for depth in (0, 2):
        assert_same(ranks.run(run_pipeline, stream, "auto", depth, world_size=world_size), expected)


def saved_and_loaded(mesh, folder):
    """What is known before and after, on the device and on the host."""
    stream, found = replace(STREAM, num_steps=2), []
    embeddings = make(mesh, stream)
    optimizer = EmbeddingOptimizer(embeddings)
    for step in range(2):
        embeddings(stream.batch(step, mesh.rank, is_dynamic=True)).values.sum().backward()
        optimizer.step()
    checkpoint.save(folder, embeddings, {})
    for each in (embeddings, make(mesh, stream), make(mesh, replace(stream, device="cpu"))):
        if each is not embeddings:
            checkpoint.load(folder, each)
        found.append({name: known_of(each, name) for name, _ in stream.rules})
        each.close()
    return found


def test_saved_rows_are_loaded_on_a_device_and_on_the_host(tmp_path):
    on_device, again, on_host = saved_and_loaded(Mesh(), tmp_path / "model")
    assert on_device["user"]
    assert on_device == again == on_host


def test_a_table_without_room_changes_nothing():
    stream = replace(STREAM, rules=(("user", Dynamic(capacity=2, shards=1)), STREAM.rules[1]))
    embeddings = make(Mesh(), stream)
    with pytest.raises(NoRoomError, match="user"):
        embeddings(stream.batch(0, 0, is_dynamic=True))
    assert len(embeddings.known_rows("user").ids) == 0
    assert not embeddings.engine.resolver.pins.ahead


def test_what_cannot_be_is_refused():
    specs = STREAM.specs(is_dynamic=True)
    with pytest.raises(ConfigurationError, match="transport='collective'"):
        EmbeddingCollection(specs, device="cuda", transport="one_sided")


RULES_OF_AVERAGES = {
    "drop": (("user", AVERAGED["lru"]), ("item", AVERAGED["frequent"])),
    "demote": (("user", DEMOTED["forgetting"]), ("item", DEMOTED["score"])),
}
SLOW_AVERAGES = [
    pytest.param(*case, marks=pytest.mark.slow) for case in (("drop", 4, 2), ("demote", 2, 0), ("demote", 4, 2))
]


@pytest.mark.parametrize("mode, world_size, depth", [("drop", 2, 0), *SLOW_AVERAGES])
def test_averaged_replicas_do_as_the_rules_say(ranks, mode, world_size, depth):
    rules, how = RULES_OF_AVERAGES[mode], Synchronization("average", every=2)
    stream = replace(STREAM, rules=rules, num_steps=4, synchronization=how)
    expected = run_average_oracle(stream, world_size, 2)
    assert_as_expected(ranks.run(run_dynamic, stream, "auto", 2, world_size=world_size), expected)
    seen = ranks.run(run_pipeline, stream, "auto", depth, 1, 2, world_size=world_size)
    assert_as_expected(seen, expected, knows_the_end_alone=True)

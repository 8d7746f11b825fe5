"""Dynamic tables with averaged replicas, on real ranks, against dictionaries and dense rows, to the bit."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

import rowmesh
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.data import Batch
from rowmesh.dynamic.event_clock import EventClock
from rowmesh.dynamic.hashing import shard_of
from rowmesh.dynamic.merging import merge_facts
from rowmesh.dynamic.shards import DynamicShards
from rowmesh.dynamic.state import MAX, MergedFacts
from rowmesh.errors import ConfigurationError, NoRoomError
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.optim import Adam
from rowmesh.pipeline import Pipeline
from rowmesh.placement import Plan, TableShape
from rowmesh.tables import Dynamic, Uniform
from tests.dynamic.test_resolver import RULES
from tests.support.dynamic import _bits, initial_row, run_dynamic, run_pipeline
from tests.support.dynamic_average import mean_of, run_average_oracle
from tests.support.dynamic_streams import streams

AVERAGED = {
    # So tight that what two groups know does not fit into one.
    **{name: replace(rules, capacity=20, shards=1) for name, rules in RULES.items() if name != "ttl"},
    "ttl": RULES["ttl"],
    "ttl by time": Dynamic(capacity=400, shards=3, eviction="ttl", ttl_seconds=12),
    "roomy, by time": Dynamic(capacity=400, shards=3, ttl_seconds=12, ttl_steps=3),
    "shards": Dynamic(capacity=36, shards=3),
    "frequent": Dynamic(capacity=20, shards=1, eviction="lru_lfu", decay_steps=2),
    "time": Dynamic(capacity=40, shards=3, ttl_steps=2),
    "roomy": Dynamic(capacity=400, shards=3, eviction="lfu"),
}


STREAMS = streams(
    AVERAGED,
    pooling=st.sampled_from(["sum", "mean", "none"]),
    synchronization=st.builds(lambda every: Synchronization("average", every=every), st.integers(1, 4)),
)


def assert_as_expected(seen, expected, *, knows_the_end_alone=False):
    """What each group knows, and, where a group is a rank, what it looked up."""
    size = len(seen) // len(expected)
    for number, of_group in enumerate(expected):
        ranks = seen[number * size : (number + 1) * size]
        if size == 1:
            assert [_bits(each) for each in ranks[0].vectors] == [_bits(each) for each in of_group.vectors]
        known = of_group.known[-1:] if knows_the_end_alone else of_group.known
        for step, by_table in enumerate(known):
            for name, rows in by_table.items():
                found = {}
                for rank in ranks:
                    assert not found.keys() & rank.known[step][name].keys()
                    found |= rank.known[step][name]
                assert found == rows


@pytest.mark.parametrize(
    "world_size, num_groups, examples",
    [(2, 2, 6), pytest.param(4, 2, 12, marks=pytest.mark.slow), pytest.param(4, 4, 12, marks=pytest.mark.slow)],
)
def test_groups_do_as_the_rules_say(ranks, world_size, num_groups, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(stream=STREAMS, transport=st.sampled_from(["collective", "auto"]), depth=st.integers(0, 3))
    def check(stream, transport, depth):
        if world_size > num_groups:  # sums of gradients must be exact in any order
            stream = replace(stream, is_linear=True, pooling="sum" if stream.pooling == "mean" else stream.pooling)
        assume(stream.fits(world_size))
        expected = run_average_oracle(stream, world_size, num_groups)
        seen = ranks.run(run_dynamic, stream, transport, num_groups, world_size=world_size)
        assert_as_expected(seen, expected)
        seen = ranks.run(run_pipeline, stream, transport, depth, 1, num_groups, world_size=world_size)
        assert_as_expected(seen, expected, knows_the_end_alone=True)

    check()


def merged(of_groups, **rules):
    return merge_facts(np.array(of_groups)[:, None], Dynamic(capacity=9, **rules))[0].tolist()


def test_facts_of_groups_add_up():
    """Group 0 saw the id in step 9, group 1 in step 5; frequencies halve at multiples of 4."""
    of_groups = [[10, 7, 900, 3, 4, 400], [6, 5, 300, 3, 4, 400]]
    # As of step 9, two halvings after step 2 and one after step 5: 100 in common, 800 and 50 more.
    assert merged(of_groups, eviction="lfu", decay_steps=4) == [10, 8, 950]
    most = [[10, MAX, MAX, 0, 0, 0], [10, 1, 1, 0, 0, 0]]
    assert merged(most, eviction="lfu") == [10, MAX, MAX]


def test_scores_are_the_largest_of_the_last_step():
    of_groups = [[10, 7, -5, 3, 4, 8], [6, 5, 9, 3, 4, 8], [10, 6, -7, 3, 4, 8]]
    assert merged(of_groups, eviction="score") == [10, 4 + 3 + 1 + 2, -5]
    assert merged([[0, 0, 0, 0, 0, 0], [6, 5, -9, 3, 4, 8]], eviction="score") == [6, 5, -9], "one group alone knows it"


def merged_facts(i, facts):
    return MergedFacts(np.array([i]), np.array([facts]), EventClock(0), np.array([i]))


def test_what_other_groups_bring_is_evicted_in_its_turn():
    shards = DynamicShards("item", Dynamic(capacity=4, shards=1), range(1), num_frames=20)
    for step, i in ((1, 1), (10, 2), (20, 3), (30, 4), (40, 5)):
        shards.open(np.array([i]), np.array([1]), step)
    united = shards.unite(merged_facts(6, [16, 1, 0]))
    assert united.left_ids.tolist() == [2]
    assert shards.unite(merged_facts(7, [13, 1, 0])).frames.tolist() == [-1], "it is itself seen longest ago"
    for step, i in ((50, 8), (60, 9)):
        evicted = shards.open(np.array([i]), np.array([1]), step).evicted_ids.tolist()
        assert evicted == [6 if step == 50 else 3]


def table(**rules):
    options = {"initializer": Uniform(bound=0.5), "optimizer": Adam(lr=0.1)}
    return TableSpec(name="item", dim=3, storage="dynamic", dynamic=Dynamic(**rules), **options)


def made(mesh, every, **rules):
    how = Synchronization("average", every=every)
    return EmbeddingCollection([table(**rules)], mesh=mesh, replicas=2, synchronization=how)


def train(embeddings, ids):
    embeddings(SparseBatch.from_bags({"item": [ids]})).values.sum().backward()
    EmbeddingOptimizer(embeddings).step()


def rows_of(embeddings):
    known = embeddings.known_rows("item")
    rows = zip(known.values, *known.state.values(), known.counts.tolist(), strict=True)
    return dict(zip(known.ids.tolist(), rows, strict=True))


def one_group_knows(mesh):
    """Group 0 alone sees id 7; group 1 sees 8 and learns of 7 by the average."""
    averaged, alone = made(mesh, 2, capacity=10), made(mesh, 3, capacity=10)
    for embeddings in (averaged, alone):
        train(embeddings, [7 + mesh.rank])
        train(embeddings, [7 + mesh.rank])
    return rows_of(alone), rows_of(averaged)


def test_a_row_that_one_group_lacks_is_half_way_to_its_initial_row_and_never_zero(ranks):
    (first, after), (second, other) = ranks.run(one_group_knows, world_size=2)
    assert (list(first), list(second)) == ([7], [8])
    assert sorted(after) == sorted(other) == [7, 8]
    for i, (row, *state, count) in (first | second).items():
        start = initial_row(table(capacity=10), i)
        groups = [(row, *state), (start, *map(torch.zeros_like, state))]
        expected = [mean_of(pair) for pair in zip(*(groups if i == 7 else groups[::-1]), strict=True)]
        for found in (after[i], other[i]):
            assert all(map(torch.equal, found[:-1], expected))
            assert found[-1] == count == 2
        assert not torch.equal(start, expected[0])


def one_group_evicts(mesh):
    """Both know 1; then group 0 needs its room for others, and group 1 does not."""
    embeddings = made(mesh, 2, capacity=2, shards=1)
    train(embeddings, [1])
    train(embeddings, [1])
    before = rows_of(embeddings)
    train(embeddings, [1, 1] if mesh.rank else [2, 3])
    known = sorted(rows_of(embeddings))
    train(embeddings, [1] if mesh.rank else [3])
    return before, known, rows_of(embeddings)


def test_an_id_that_one_group_has_evicted_goes_on_with_what_was_counted(ranks):
    (before, known, after), (_, other_known, other) = ranks.run(one_group_evicts, world_size=2)
    assert (known, other_known) == ([2, 3], [1])
    assert sorted(after) == sorted(other) == [1, 3], "2 was seen longest ago"
    assert before[1][-1] == 4
    assert after[1][-1] == other[1][-1] == 4 + 3
    assert all(map(torch.equal, after[1][:-1], other[1][:-1]))


def leaves_a_pipeline(mesh):
    """Before the step of an average, which the batches read ahead have prepared."""
    embeddings = made(mesh, 3, capacity=10)
    optimizer = EmbeddingOptimizer(embeddings)
    batch = Batch(torch.zeros(1, 0), SparseBatch.from_bags({"item": [[mesh.rank]]}), torch.zeros(1))
    with Pipeline(embeddings, depth=3) as pipeline:
        for window in pipeline.windows([batch] * 4):
            for part in window:
                part.embeddings.values.sum().backward()
            optimizer.step()
            break
    embeddings.synchronize()
    return rows_of(embeddings)


def test_an_average_that_was_prepared_in_vain_is_made_up_for(ranks):
    first, second = ranks.run(leaves_a_pipeline, world_size=2)
    assert sorted(first) == sorted(second) == [0, 1]
    for i in first:
        assert all(map(torch.equal, first[i][:-1], second[i][:-1]))
        assert not torch.equal(first[i][0], initial_row(table(capacity=10), i))


def resumed(mesh, folder):
    """A checkpoint of averaged replicas goes on as if nothing had been."""
    ids = [[1, 2], [3, 1], [4], [2, 2], [5, 1], [6]]
    first = made(mesh, 2, capacity=4, shards=1, eviction="lfu", admit_after=2)
    for step in range(4):
        train(first, [i + mesh.rank for i in ids[step]])
    rowmesh.save(folder, {"embeddings": first, "optimizer": EmbeddingOptimizer(first)})
    second = made(mesh, 2, capacity=4, shards=1, eviction="lfu", admit_after=2)
    rowmesh.load(folder, {"embeddings": second, "optimizer": EmbeddingOptimizer(second)})
    for embeddings in (first, second):
        for step in range(4, 6):
            train(embeddings, [i + mesh.rank for i in ids[step]])
    return rows_of(first), rows_of(second)


def test_a_checkpoint_goes_on_to_the_bit(ranks, tmp_path):
    for first, second in ranks.run(resumed, tmp_path / "model", world_size=2):
        assert first.keys() == second.keys()
        assert len(first) > 1
        for i in first:
            assert first[i][-1] == second[i][-1]
            assert all(map(torch.equal, first[i][:-1], second[i][:-1]))


def refused(mesh):
    average = Synchronization("average")
    item, other = table(capacity=9), replace(table(capacity=9), name="other", features=("other",))
    for tables, replicas, how, message in [
        ([item, other], {"item": 2}, average, "must have equally many, got {'item': 2, 'other': 1}"),
        ([item], 2, Synchronization("average", dense=True), "leave dense out"),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            EmbeddingCollection(tables, mesh=mesh, replicas=replicas, synchronization=how)
        assert message in str(caught.value)


def test_what_cannot_be_averaged_is_refused(ranks):
    ranks.run(refused, world_size=2)


def train_what_does_not_fit(mesh, depth):
    """Each group has room for its own ids; together they are too many in the shard of ranks 1 and 3 alone."""
    full, other = table(capacity=9, shards=2, eviction="ttl", ttl_steps=9), table(capacity=90)
    tables = [replace(full, name="full", features=("full",)), other]
    embeddings = EmbeddingCollection(tables, mesh=mesh, replicas=2, synchronization=Synchronization("average", every=2))
    group, of_shards = mesh.rank // 2, shard_of("full", np.arange(100), 2)
    ids = [0, *(np.flatnonzero(of_shards == 1)[3 * group :][:3]).tolist()]
    batch = Batch(torch.zeros(1, 0), SparseBatch.from_bags({"full": [ids], "item": [ids]}), torch.zeros(1))
    with pytest.raises(NoRoomError) as caught:
        run_to_the_end(embeddings, [batch] * 4, depth)
    known = {each.name: embeddings.known_rows(each.name).ids.tolist() for each in tables} if depth is None else {}
    return str(caught.value), set(ids), known


def run_to_the_end(embeddings, batches, depth):
    optimizer = EmbeddingOptimizer(embeddings)
    if depth is None:
        for batch in batches:
            embeddings(batch.sparse).values.sum().backward()
            optimizer.step()
        return
    with Pipeline(embeddings, depth=depth) as pipeline:
        for window in pipeline.windows(batches):
            for part in window:
                part.embeddings.values.sum().backward()
            optimizer.step()


@pytest.mark.parametrize(
    "depth", [None, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_ids_within_their_time_that_do_not_fit_together_are_refused_on_all_ranks(ranks, depth):
    found = ranks.run(train_what_does_not_fit, depth, world_size=4)
    for message, _, _ in found:
        assert (
            "shard 1 of dynamic table 'full' is full, and too few ids are past their time to live, 9 steps" in message
        )
        assert "raise capacity from 9 to 12 or more, or shorten it" in message
    for group in (found[:2], found[2:]) if depth is None else ():
        for name in ("full", "item"):
            known = [i for _, _, by_table in group for i in by_table[name]]
            assert sorted(known) == sorted(group[0][1]), "nothing has changed, in no table"


def plans_have_replicas(mesh):
    spec = table(capacity=9)
    plan = Plan.cyclic([TableShape.of(spec)], 2, 2, replicas=2)
    embeddings = EmbeddingCollection([spec], mesh=mesh, plan=plan)
    return embeddings.plan.table("item").replicas


def test_replicas_of_a_plan_are_those_of_dynamic_tables(ranks):
    assert ranks.run(plans_have_replicas, world_size=2) == [2, 2]

"""Dynamic tables with averaged replicas, on real ranks, against dictionaries and dense rows, to the bit."""

from dataclasses import replace
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

import rowmesh
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.data import Batch
from rowmesh.errors import ConfigurationError, NoRoomError, StoreError
from rowmesh.exchange.resolve.merging import merge_facts
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.pipeline import Pipeline
from rowmesh.placement import Plan, TableShape
from rowmesh.tables import Dynamic, Uniform
from rowmesh.tables.dynamic.changes import Change
from rowmesh.tables.dynamic.event_clock import EventClock
from rowmesh.tables.dynamic.hashing import shard_of
from rowmesh.tables.dynamic.owned import OwnedTable
from rowmesh.tables.dynamic.shards import DynamicShards
from rowmesh.tables.dynamic.state import MAX, MergedFacts
from rowmesh.tables.update_rules import Adam
from tests.exchange.resolve.test_resolver import RULES
from tests.support.dynamic import _bits, demoted_of, initial_row, run_dynamic, run_pipeline
from tests.support.dynamic_average import mean_of, run_average_oracle
from tests.support.dynamic_streams import streams
from tests.tables.dynamic.test_demoted import RULES as DEMOTED

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


LOOKED_AT = {
    "pooling": st.sampled_from(["sum", "mean", "none"]),
    "evaluates": st.booleans(),
    "missing": st.sampled_from(["initial", "zero", "error"]),
    "synchronization": st.builds(lambda every: Synchronization("average", every=every), st.integers(1, 4)),
}
STREAMS = {"drop": streams(AVERAGED, **LOOKED_AT), "demote": streams(DEMOTED, **LOOKED_AT)}


def assert_as_expected(seen, expected, *, knows_the_end_alone=False):
    """What each group knows, and, where a group is a rank, what it looked up."""
    size = len(seen) // len(expected)
    for number, of_group in enumerate(expected):
        ranks = seen[number * size : (number + 1) * size]
        if size == 1:
            assert [_bits(each) for each in ranks[0].vectors] == [_bits(each) for each in of_group.vectors]
        assert all(rank.statistics == of_group.statistics for rank in ranks)
        for name, records in of_group.demoted.items():
            assert [record for rank in ranks for record in rank.demoted[name]] == records
        known = of_group.known[-1:] if knows_the_end_alone else of_group.known
        for step, by_table in enumerate(known):
            for name, rows in by_table.items():
                found = {}
                for rank in ranks:
                    assert not found.keys() & rank.known[step][name].keys()
                    found |= rank.known[step][name]
                assert found == rows


SLOW = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
        ("drop", 4, 2, 12),
        ("drop", 4, 4, 12),
        ("demote", 2, 2, 30),
        ("demote", 4, 2, 20),
        ("demote", 4, 4, 12),
    )
]


@pytest.mark.parametrize("mode, world_size, num_groups, examples", [("drop", 2, 2, 6), ("demote", 2, 2, 3), *SLOW])
def test_groups_do_as_the_rules_say(ranks, mode, world_size, num_groups, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(stream=STREAMS[mode], transport=st.sampled_from(["collective", "auto"]), depth=st.integers(0, 3))
    def check(stream, transport, depth):
        if world_size > num_groups:  # sums of gradients must be exact in any order
            stream = replace(stream, is_linear=True, pooling="sum" if stream.pooling == "mean" else stream.pooling)
        assume(stream.fits(world_size))
        expected = run_average_oracle(stream, world_size, num_groups)
        seen = ranks.run(run_dynamic, stream, transport, num_groups, world_size=world_size)
        assert_as_expected(seen, expected)
        evaluated = [[_bits(each) for each in rank.evaluated] for rank in seen]
        seen = ranks.run(run_pipeline, stream, transport, depth, 1, num_groups, world_size=world_size)
        assert_as_expected(seen, expected, knows_the_end_alone=True)
        assert [[_bits(each) for each in rank.evaluated] for rank in seen] == evaluated

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


@given(
    times=st.lists(st.tuples(*[st.integers(0, 40)] * 3), min_size=1, max_size=12), averages=st.sets(st.integers(1, 12))
)
def test_a_joined_clock_is_that_of_all_events(times, averages):
    of_all, *clocks = (EventClock(12) for _ in range(4))
    last = 0
    for step, of_groups in enumerate(times, 1):
        of_all.advance(step, max(of_groups))
        for clock, time in zip(clocks, of_groups, strict=True):
            clock.advance(step, time)
        if step in averages or step == len(times):
            since = np.concatenate([clock.since(last) for clock in clocks])
            clocks, last = [clock.joined(since) for clock in clocks], step
    for clock in clocks:
        assert clock.now == of_all.now
        assert clock.since(0).tolist() == of_all.since(0).tolist()


def merged_facts(i, facts):
    return MergedFacts(np.array([i]), np.array([facts]), np.array([True]), EventClock(0), np.array([i]))


def test_what_other_groups_bring_is_evicted_in_its_turn():
    shards = DynamicShards("item", Dynamic(capacity=4, shards=1), range(1), num_frames=20)
    for step, i in ((1, 1), (10, 2), (20, 3), (30, 4), (40, 5)):
        shards.open(np.array([i]), np.array([1]), step)
    united = shards.unite(merged_facts(6, [16, 1, 0]), None)
    assert united.left_ids.tolist() == [2]
    assert shards.unite(merged_facts(7, [13, 1, 0]), None).frames.tolist() == [-1], "it is itself seen longest ago"
    for step, i in ((50, 8), (60, 9)):
        evicted = shards.open(np.array([i]), np.array([1]), step).evicted_ids.tolist()
        assert evicted == [6 if step == 50 else 3]


@pytest.mark.parametrize("num_late", [4, 5])
def test_an_average_needs_frames_for_ids_that_enter_alone(num_late):
    shards = DynamicShards("user", Dynamic(capacity=10, shards=1), range(1), num_frames=14)
    shards.open(np.arange(10), np.ones(10, np.int64), step=5)
    ids = np.arange(20)  # of a group that has seen the last ones later, and others before
    seen = np.where(ids < 10, 6, np.where(ids < 20 - num_late, 1, 8))
    facts = np.stack([seen, np.ones(20, np.int64), np.zeros(20, np.int64)], axis=1)
    merged = MergedFacts(ids, facts, np.ones(20, bool), EventClock(0), ids)
    if num_late > 4:
        with pytest.raises(NoRoomError, match="needs 5 frames, and 4 of 14 are free"):
            shards.check_merged(merged, None)
        return
    shards.check_merged(merged, None)
    united = shards.unite(merged, None)
    assert ids[united.entered].tolist() == [16, 17, 18, 19]
    assert sorted(united.left_ids.tolist()) == [0, 1, 2, 3]


def test_an_average_judges_ids_by_what_groups_know_together():
    shards = DynamicShards("user", Dynamic(capacity=2, shards=1), range(1), num_frames=3)
    shards.open(np.array([1]), np.ones(1, np.int64), step=5)
    shards.open(np.array([2]), np.ones(1, np.int64), step=6)
    merged = MergedFacts(
        np.array([1, 3]), np.array([[9, 1, 0], [8, 1, 0]]), np.ones(2, bool), EventClock(0), np.array([1, 3])
    )
    shards.check_merged(merged, None)
    assert shards.unite(merged, None).left_ids.tolist() == [2], "the other group has seen 1 since"


def table(**rules):
    options = {"initializer": Uniform(bound=0.5), "optimizer": Adam(lr=0.1)}
    return TableSpec(name="item", dim=3, storage="dynamic", dynamic=Dynamic(**rules), **options)


def made(mesh, every, **rules):
    how = Synchronization("average", every=every)
    return EmbeddingCollection([table(**rules)], mesh=mesh, replicas=2, synchronization=how)


def train(embeddings, ids, time=None):
    batch = SparseBatch.from_bags({"item": [ids]})
    if embeddings.tables[0].takes_scores:
        batch = replace(batch, scores=batch.ids * 3 % 5)
    embeddings(replace(batch, time=time)).values.sum().backward()
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


def both_groups_demote(mesh, every):
    """Id 1 leaves in both groups, with other rows; 2 leaves in group 1, the other one does not know it."""
    embeddings = made(mesh, every, capacity=1, shards=1, mode="demote", store="memory", store_capacity=9)
    for ids in ([1], [2] if mesh.rank else [1, 1], [3]):
        train(embeddings, ids)
    with torch.no_grad():
        read = embeddings(SparseBatch.from_bags({"item": [[1], [2]]})).values
    found = demoted_of(embeddings, "item"), read.tolist()
    embeddings.close()
    return found


def test_records_of_ids_that_all_groups_have_demoted_are_averaged(ranks):
    alone = ranks.run(both_groups_demote, 9, world_size=2)
    assert [[record[0] for record in records] for records, _ in alone] == [[1], [1, 2]]
    (mine, rows), (others, other_rows) = ranks.run(both_groups_demote, 3, world_size=2)
    assert mine == others
    assert rows == other_rows
    assert [(record[0], record[-2]) for record in mine] == [(1, 1 + 2 + 1), (2, 1)]
    first, second = (torch.tensor(rows) for _, rows in alone)
    expected = [mean_of([first[0], second[0]]), mean_of([initial_row(table(capacity=1), 2), second[1]])]
    assert not torch.equal(first[0], second[0])
    assert torch.equal(torch.tensor(rows), torch.stack(expected))
    assert [record[1] for record in mine] == [row.numpy().tobytes() for row in expected]


def has_room_for_a_demoted_id(mesh):
    """Id 2 leaves for 3, and 3 for 4; then 1 is past its time."""
    embeddings = made(mesh, 5, capacity=2, shards=1, eviction="lfu", ttl_steps=4, mode="demote", store="memory")
    for ids in ([1] * 5, [2] * 3, [3], [4], [4]):
        train(embeddings, ids)
    return sorted(rows_of(embeddings)), sorted(record[0] for record in demoted_of(embeddings, "item"))


def test_ids_that_are_demoted_in_all_groups_stay_so_where_there_is_room(ranks):
    assert ranks.run(has_room_for_a_demoted_id, world_size=2) == [([4], [1, 2, 3])] * 2


def a_store_is_gone(mesh):
    """That of rank 1, when its records are to be averaged."""
    embeddings = made(mesh, 2, capacity=40, shards=2, mode="demote", store="memory")
    train(embeddings, [*range(2 * mesh.rank, 2 * mesh.rank + 3)])
    if mesh.rank == 1:
        with patch.object(OwnedTable, "held", side_effect=StoreError("the store of rank 1 is gone")):
            return try_to_average(embeddings)
    return try_to_average(embeddings)


def try_to_average(embeddings):
    before = embeddings.statistics("item", [*range(9)]).count.tolist()
    with pytest.raises(StoreError) as caught:
        embeddings.synchronize()
    return str(caught.value), before == embeddings.statistics("item", [*range(9)]).count.tolist()


def test_all_ranks_refuse_an_average_for_which_a_store_does_not_answer(ranks):
    assert ranks.run(a_store_is_gone, world_size=4) == [("the store of rank 1 is gone", True)] * 4


def test_ids_that_an_average_has_brought_and_demoted_are_unknown_before_it():
    change = Change(number=3, admitted_ids=np.array([5]), evicted_ids=np.array([5, 7]), evicted_frames=np.array([1, 2]))
    frames = np.full(2, -1)
    change.undo(np.array([5, 7]), frames)
    assert frames.tolist() == [-1, 2]


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


GOES_ON = {
    "candidates": {"eviction": "lfu", "admit_after": 2},
    "scores": {"eviction": "score"},
    "seconds": {"ttl_seconds": 15},
    "demoted": {"eviction": "lfu", "mode": "demote", "store": "memory"},
    "forgotten": {"mode": "demote", "store": "memory", "store_capacity": 2},
}


def resumed(mesh, folder, rules):
    """A checkpoint of averaged replicas goes on as if nothing had been; one step after an average, it makes another."""
    ids = [[1, 2], [3, 1], [4], [2, 2], [5, 1], [6], [7, 8], [1, 9]]
    options = {"capacity": 4, "shards": 1, **rules}

    def go_on(embeddings, steps):
        for step in steps:
            train(embeddings, [i + mesh.rank for i in ids[step]], 10 * step + 7 * mesh.rank * (step % 3))

    first = made(mesh, 2, **options)
    go_on(first, range(5))
    rowmesh.save(folder, {"embeddings": first, "optimizer": EmbeddingOptimizer(first)})
    second = made(mesh, 2, **options)
    rowmesh.load(folder, {"embeddings": second, "optimizer": EmbeddingOptimizer(second)})
    found = []
    for embeddings in (first, second):
        go_on(embeddings, range(5, 8))
        known = {i: (*map(torch.Tensor.tolist, row), count) for i, (*row, count) in rows_of(embeddings).items()}
        records = demoted_of(embeddings, "item") if "mode" in rules else []
        found.append((known, records, embeddings.statistics("item", [*range(20)]).last_step.tolist()))
    return found


@pytest.mark.parametrize("rules", [*GOES_ON.values()], ids=[*GOES_ON])
def test_a_checkpoint_goes_on_to_the_bit(ranks, tmp_path, rules):
    for first, second in ranks.run(resumed, tmp_path / "model", rules, world_size=2):
        assert first == second
        known, records, _ = first
        assert len(known) > 1
        assert bool(records) == ("mode" in rules)


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

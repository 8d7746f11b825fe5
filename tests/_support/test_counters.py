"""What a collection counts: the same under every transport, and what owners know of their tables."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rowmesh import Mesh, TableSpec
from rowmesh._support.counters import GroupCounters
from tests.support.scenario import Scenario, ids_by_table
from tests.support.training import train

TRANSPORTS = ["one_sided", "collective"]
COUNTED = (
    TableSpec(name="user", num_rows=50, dim=3, features=("user", "friend")),
    TableSpec(name="tag", num_rows=7, dim=3, pooling="mean"),
    TableSpec(name="item", num_rows=200, dim=16),
    TableSpec(name="one", num_rows=1, dim=3),
)


def counted_by_hand(scenario, owned):
    """(accesses, distinct) of every table on a rank that owns these rows."""
    accesses = dict.fromkeys(owned, 0)
    distinct = dict.fromkeys(owned, 0)
    for step in range(scenario.num_steps):
        for name, rows in owned.items():
            asked = [
                row
                for part in range(scenario.accumulate)
                for rank in range(scenario.world_size)
                for row in ids_by_table(scenario, step, part, rank)[name]
                if row in rows
            ]
            accesses[name] += len(asked)
            distinct[name] += len(set(asked))
    return accesses, distinct


@settings(max_examples=12)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    accumulate=st.integers(1, 2),
    skew=st.sampled_from([1.0, 4.0, 1e9]),
    transport=st.sampled_from(TRANSPORTS),
)
def test_owners_know_accesses_and_distinct_ids_of_every_table(ranks, sizes, accumulate, skew, transport):
    scenario = Scenario(tables=COUNTED, batch_sizes=tuple(sizes), accumulate=accumulate, skew=skew)
    if len(sizes) == 1:
        trained = [train(Mesh(), scenario)]
    else:
        trained = ranks.run(train, scenario, transport, world_size=len(sizes))
    for rank, part in enumerate(trained):
        accesses, distinct = counted_by_hand(scenario, part.owned)
        for counters in part.counters.values():
            assert counters.table_accesses == {name: accesses[name] for name in counters.table_accesses}
            assert counters.table_distinct == {name: distinct[name] for name in counters.table_distinct}
        check_local_counters(scenario, rank, part.counters)


def check_local_counters(scenario, rank, counters):
    of_group = {"dim3_row_wise_adagrad": ("user", "tag", "one"), "dim16_row_wise_adagrad": ("item",)}
    passes = [(step, part) for step in range(scenario.num_steps) for part in range(scenario.accumulate)]
    assert set(counters) == set(of_group)
    for name, tables in of_group.items():
        asked = [ids_by_table(scenario, step, part, rank)[table] for step, part in passes for table in tables]
        assert counters[name].ids == sum(map(len, asked))
        assert counters[name].unique_ids == sum(len(set(ids)) for ids in asked)
        assert counters[name].routes == len(passes)


def count(ranks, transport, world_size, **options):
    """The counters of every rank after a job."""
    scenario = Scenario(tables=COUNTED, batch_sizes=(30,) * world_size, bag_sizes=(1, 3), **options)
    if world_size == 1:
        return scenario, [train(Mesh(), scenario)]
    return scenario, ranks.run(train, scenario, transport, world_size=world_size)


def of_group(trained, name, *fields):
    return [[getattr(part.counters[name], field) for field in fields] for part in trained]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_transports_count_the_same(ranks, world_size, accumulate):
    """Bytes are those of slots, rows and gradients, whether they are sent or read."""
    fields = ("routes", "pushes", "ids", "unique_ids", "bytes_received", "table_accesses", "table_distinct")
    _, one_sided = count(ranks, "one_sided", world_size, accumulate=accumulate)
    scenario, collective = count(ranks, "collective", world_size, accumulate=accumulate)
    for name in one_sided[0].counters:
        assert of_group(one_sided, name, *fields) == of_group(collective, name, *fields)
        assert {part.counters[name].pushes for part in one_sided} == {scenario.num_steps}
        assert sum(part.counters[name].bytes_sent for part in collective) == sum(
            part.counters[name].bytes_received for part in collective
        )
        assert of_group(one_sided, name, "bytes_sent", "all_to_all_rounds") == [[0, 0]] * world_size


def test_one_rank_counts_like_several(ranks):
    fields = ("routes", "pushes", "all_to_all_rounds", "bytes_sent", "bytes_received")
    scenario, trained = count(ranks, "auto", 1)
    for name in trained[0].counters:
        assert of_group(trained, name, *fields) == [[scenario.num_steps, scenario.num_steps, 0, 0, 0]]


@pytest.mark.parametrize("evaluates", [False, True])
def test_rounds_do_not_grow_with_tables(ranks, evaluates):
    """Slots, rows and gradients of each group; for all groups together, counts and what is pushed."""
    world_size, width = 2, 1 + (2 * 3 + 1) + (2 * 1 + 1)
    scenario, trained = count(ranks, "collective", world_size, evaluates=evaluates)
    fetches = scenario.num_steps * (2 if evaluates else 1)
    for name in trained[0].counters:
        assert of_group(trained, name, "all_to_all_rounds") == [[2 * fetches + scenario.num_steps]] * world_size
    for part in trained:
        assert part.common.all_to_all_rounds == fetches + scenario.num_steps
        num_bytes = part.common.all_to_all_rounds * 8 * width * (world_size - 1)
        assert part.common.bytes_sent == part.common.bytes_received == num_bytes
    _, one_sided = count(ranks, "one_sided", world_size, evaluates=evaluates)
    assert {part.common.all_to_all_rounds for part in one_sided} == {0}


def test_slots_of_look_ups_without_an_update(ranks):
    """The one difference: under the collective transport owners hear of them, under one-sided they never do."""
    (_, plain), (_, collective) = (count(ranks, "collective", 2, evaluates=e) for e in (False, True))
    _, one_sided = count(ranks, "one_sided", 2, evaluates=True)
    for name in plain[0].counters:
        assert of_group(plain, name, "table_accesses") == of_group(collective, name, "table_accesses")
        slots = [
            mine.counters[name].bytes_received - theirs.counters[name].bytes_received
            for mine, theirs in zip(collective, one_sided, strict=True)
        ]
        assert all(num_bytes > 0 and num_bytes % 4 == 0 for num_bytes in slots)


def test_tables_are_counted_by_name():
    counters = GroupCounters("g", tables=("a", "b"))
    assert counters.table_accesses == counters.table_distinct == {"a": 0, "b": 0}
    counters.count_tables(np.array([5, 0]), np.array([0, 3, 3]))
    counters.count_tables(np.array([1, 2]), np.array([0, 1, 3]))
    assert counters.table_accesses == {"a": 6, "b": 2}
    assert counters.table_distinct == {"a": 4, "b": 2}

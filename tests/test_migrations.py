"""A migration between two steps: the same model to the bit, all copies equal, nothing left of the old plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh import EmbeddingCollection, EmbeddingOptimizer
from rowmesh._support.faults import arm
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan, TableShape
from tests.support import behaviour
from tests.support.plans import RULES, make_plan, random_plans
from tests.support.scenario import Scenario
from tests.support.tables import several
from tests.test_plans import check, check_plan, scenarios

TRANSPORTS = ["one_sided", "collective"]


def a_plan(number, world_size=2, ranks_per_node=None, tables=behaviour.TABLES):
    """Of the ranges of these plans, no two neighbours follow one rule."""
    per_node = ranks_per_node or world_size
    return make_plan(tables, world_size, per_node, lambda i: (RULES[(i + number) % 4], i, i + number, i % 2 == 0))


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adam"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_migrations_on_one_host(ranks, transport, optimizer):
    tables = several(optimizer)
    plans = [a_plan(number, 3, 3, tables) for number in range(4)]
    check(
        ranks,
        Scenario(
            tables=tables,
            batch_sizes=(4, 0, 5),
            num_steps=4,
            accumulate=2,
            evaluates=True,
            plan=plans[0],
            migrations=((1, plans[1]), (1, plans[2]), (3, plans[3]), (4, plans[0])),
        ),
        transport,
    )


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_migrations_across_nodes(ranks, ranks_per_node):
    tables = several("row_wise_adagrad")
    plans = [a_plan(number, 4, ranks_per_node, tables) for number in range(3)]
    scenario = Scenario(
        tables=tables,
        batch_sizes=(4, 3, 0, 5),
        ranks_per_node=ranks_per_node,
        plan=plans[0],
        migrations=((1, plans[1]), (2, plans[2])),
    )
    check(ranks, scenario)


@st.composite
def migrating(draw):
    scenario = draw(scenarios())
    another = random_plans(scenario.tables, scenario.world_size, scenario.ranks_per_node, sums=True)
    steps = draw(st.lists(st.integers(0, scenario.num_steps), min_size=1, max_size=2))
    return replace(scenario, migrations=tuple((step, draw(another)) for step in sorted(steps)))


@settings(max_examples=6)
@given(scenario=migrating(), one_sided=st.booleans())
def test_random_migrations(ranks, scenario, one_sided):
    check_plan(ranks, scenario, one_sided)


@pytest.mark.slow
@settings(max_examples=60)
@given(scenario=migrating(), one_sided=st.booleans())
def test_many_random_migrations(ranks, scenario, one_sided):
    check_plan(ranks, scenario, one_sided)


def test_one_rank_may_migrate():
    tables = several("sgd")
    scenario = Scenario(tables=tables, batch_sizes=(6,), plan=a_plan(0, 1, 1, tables))
    check(Alone(), replace(scenario, migrations=((1, a_plan(1, 1, 1, tables)),)), "auto")


class Alone:
    """Runs in this process."""

    def run(self, function, *args, world_size):
        return [function(Mesh(), *args)]


def migrate_often(mesh, transport, warm_up, times):
    """Footprints and threads before and after many migrations; and what the counters had and got."""
    collection = EmbeddingCollection(behaviour.TABLES, mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    seen = []
    for number in range(warm_up + times):
        behaviour.one_step(collection, optimizer, behaviour.batch_of(mesh.rank, number))
        collection.migrate(a_plan(number % 2))
        if number + 1 in (warm_up, warm_up + times):
            seen.append({**behaviour.footprint(), "threads": len(list(Path("/proc/self/task").iterdir()))})
    counted = [(counters.pushes, counters.ids) for counters in collection.counters]
    common = collection.common_counters.all_to_all_rounds
    collection.close()
    return seen, counted, common


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_of_old_plans(ranks, transport):
    for (before, after), counted, common in ranks.run(migrate_often, transport, 4, 10, world_size=2):
        assert {key: after[key] for key in ("files", "mapped", "threads")} == {
            key: before[key] for key in ("files", "mapped", "threads")
        }
        assert after["resident"] - before["resident"] < 4 * 2**20
        assert counted == [(14, 14 * 20)] * 2
        # Once more in the first step under a plan where ranks make room for sums of copied rows.
        assert common == (0 if transport == "one_sided" else 28 + 13)


def count_replicas(mesh, mode, dense):
    """Rows that this rank sent to other replicas, after one step, and after a migration and another one."""
    collection = EmbeddingCollection(
        behaviour.TABLES, mesh=mesh, replicas=2, synchronization=Synchronization(mode, dense=dense)
    )
    optimizer, sent = EmbeddingOptimizer(collection), []
    for _ in range(2):
        behaviour.one_step(collection, optimizer, behaviour.batch_of(mesh.rank, 0))
        collection.barrier()
        sent.append([counters.synchronization.rows for counters in collection.counters])
        collection.migrate(collection.plan)
    collection.close()
    return sent


@pytest.mark.parametrize(("mode", "dense"), [("exact", False), ("average", False), ("average", True)])
def test_counters_of_replicas_go_on(ranks, mode, dense):
    """Whole tables are averaged once more before rows migrate."""
    for before, after in ranks.run(count_replicas, mode, dense, world_size=2):
        assert all(before)
        assert after == [(3 if dense else 2) * count for count in before]


def refuse(mesh, transport):
    """Errors of migrations that cannot be, while rank 1 alone is at fault; then a step and one that can."""
    collection = EmbeddingCollection(behaviour.TABLES, mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    before, errors = collection.plan, []

    def attempt(plan):
        with pytest.raises((RowmeshError, MemoryError)) as caught:
            collection.migrate(plan)
        errors.append(f"{caught.type.__name__}: {caught.value}")
        assert collection.plan is before

    vectors = collection(behaviour.batch_of(mesh.rank, 0)).values
    if mesh.rank == 0:
        del vectors
        attempt(a_plan(0))
    else:
        attempt(a_plan(0))
        vectors.square().sum().backward()
        del vectors
        collection.engine.discard_pending()
    attempt(a_plan(mesh.rank))
    attempt(Plan.cyclic([TableShape.of(table) for table in behaviour.TABLES], 4))
    kind = type(collection.engine.shard_groups.stored[0].transport)
    rows_for = kind.rows_for
    if mesh.rank == 1:
        kind.rows_for = out_of_memory
    try:
        attempt(a_plan(0))
    finally:
        kind.rows_for = rows_for
    behaviour.one_step(collection, optimizer, behaviour.batch_of(mesh.rank, 1))
    rows = behaviour.rows_of(collection)
    collection.close()
    return errors, rows


def lack_buffers(mesh, options, point):
    """Rank 1 has no memory for buffers of a migration; then a step, and a migration that can be."""
    collection = EmbeddingCollection(behaviour.TABLES, mesh=mesh, **options)
    optimizer = EmbeddingOptimizer(collection)
    before, errors = collection.plan, []
    plan = before if "replicas" in options else a_plan(0)

    def lack():
        if mesh.rank == 1:
            raise MemoryError("no memory")

    for _ in range(2):
        with pytest.raises(MemoryError) as caught, arm(point=point, action=lack):
            collection.migrate(plan)
        errors.append(str(caught.value))
        assert collection.plan is before
    behaviour.one_step(collection, optimizer, behaviour.batch_of(mesh.rank, 1))
    collection.migrate(plan)
    behaviour.one_step(collection, optimizer, behaviour.batch_of(mesh.rank, 2))
    with torch.no_grad():
        vectors = collection(behaviour.batch_of(0, 1)).values.clone()
    collection.close()
    return errors, vectors


def train_two_steps(mesh, options):
    collection = EmbeddingCollection(behaviour.TABLES, mesh=mesh, **options)
    optimizer = EmbeddingOptimizer(collection)
    for step in (1, 2):
        behaviour.one_step(collection, optimizer, behaviour.batch_of(mesh.rank, step))
    with torch.no_grad():
        vectors = collection(behaviour.batch_of(0, 1)).values.clone()
    collection.close()
    return vectors


@pytest.mark.parametrize("point", ["migration.buffers", "migration.put"])
@pytest.mark.parametrize(
    "options",
    [
        {"transport": "one_sided"},
        {"transport": "collective"},
        pytest.param({"replicas": 2}, marks=pytest.mark.slow),
    ],
)
def test_without_memory_for_buffers_on_one_rank_the_old_plan_goes_on_everywhere(ranks, options, point):
    if "replicas" in options and point == "migration.put":
        pytest.skip("a replica on one rank sends nothing")
    plain = ranks.run(train_two_steps, options)
    for (errors, vectors), expected in zip(ranks.run(lack_buffers, options, point), plain, strict=True):
        assert (
            errors
            == ["rank 1 has no memory for the buffers of a migration: MemoryError: no memory; the old plan goes on"] * 2
        )
        assert torch.equal(vectors, expected)


def out_of_memory(self, group, num_slots, rank):
    raise MemoryError(f"no {num_slots[rank] * group.dim * group.dtype.itemsize} bytes")


def train_a_step(mesh, transport):
    collection = EmbeddingCollection(behaviour.TABLES, mesh=mesh, transport=transport)
    behaviour.one_step(collection, EmbeddingOptimizer(collection), behaviour.batch_of(mesh.rank, 1))
    rows = behaviour.rows_of(collection)
    collection.close()
    return rows


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_refused_migrations_leave_the_old_plan(ranks, transport):
    refused = ranks.run(refuse, transport, world_size=2)
    expected = ranks.run(train_a_step, transport, world_size=2)
    for (errors, rows), plain in zip(refused, expected, strict=True):
        assert errors == refused[0][0]
        waiting, differing, another, memory = errors
        assert waiting.startswith("RowmeshError: rank 1 cannot migrate while 1 batch(es) are under way")
        assert differing.startswith("ConfigurationError: rank 1 would migrate to another plan than rank 0")
        assert another.startswith("ConfigurationError: the plan is for 4 ranks, but 2 take part")
        assert memory.startswith("MemoryError: rank 1 has no room for the ")
        assert all(torch.equal(rows[name], plain[name]) for name in plain)


def test_a_migration_says_what_moved(ranks):
    (first, second) = ranks.run(move_one_range, world_size=2)
    assert first == second == (50, 50 * (64 + 4))


def move_one_range(mesh):
    tables = behaviour.TABLES[1:]
    collection = EmbeddingCollection(tables, mesh=mesh, plan=make_plan(tables, 2, 2, lambda i: ("fixed", 0, 0, False)))
    shape = TableShape.of(tables[0])
    plan = Plan.cyclic([shape], 2)
    ranges = plan.tables[0].ranges
    halves = (replace(ranges[0], stop=100), replace(ranges[0], start=100, rule="fixed", rank=0))
    moved = collection.migrate(replace(plan, tables=(replace(plan.tables[0], ranges=halves),)))
    collection.close()
    return moved.rows, moved.num_bytes


def test_views_of_old_rows_stay_readable():
    collection = EmbeddingCollection(behaviour.TABLES)
    optimizer = EmbeddingOptimizer(collection)
    view = collection.local_rows("b")[0].values
    before = view.clone()
    collection.migrate(a_plan(1, 1))
    behaviour.one_step(collection, optimizer, behaviour.batch_of(0, 0))
    assert torch.equal(view, before)
    assert Path("/proc/self/maps").read_text().count("memfd:rowmesh") == 0


def test_a_plan_for_other_tables_is_refused():
    collection = EmbeddingCollection(behaviour.TABLES)
    with pytest.raises(ConfigurationError, match="the plan has no table 'a'"):
        collection.migrate(Plan.cyclic([TableShape.of(behaviour.TABLES[1])], 1))

"""Any plan trains the same model, to the bit, and keeps all copies of a row equal."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch, checkpoint
from rowmesh.errors import ConfigurationError
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.placement.cost import cost_of
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import search
from rowmesh.placement.topology import Topology
from tests.support.jobs import random_jobs
from tests.support.plans import RULES, make_plan, random_plans
from tests.support.scenario import Scenario, ids_by_table
from tests.support.tables import several, table
from tests.support.training import merged, train


def assert_equal(scenario, parts, whole):
    """Same losses, outputs, rows and states to the bit, and so are all copies."""
    mine = merged(scenario, parts)
    assert mine.losses == whole.losses
    for a, b in zip(mine.outputs + mine.head, whole.outputs + whole.head, strict=True):
        assert torch.equal(a, b)
    for spec in scenario.tables:
        assert torch.equal(mine.rows[spec.name], whole.rows[spec.name]), spec
        for name, state in whole.state[spec.name].items():
            assert torch.equal(mine.state[spec.name][name], state)
        for part in parts:
            rows, held = part.copies[spec.name]
            for kind, values in held.items():
                expected = whole.rows[spec.name] if kind == "values" else whole.state[spec.name][kind]
                assert torch.equal(values, expected[torch.tensor(rows, dtype=torch.int64)])


def check(ranks, scenario, transport="collective"):
    world_size = scenario.world_size
    plain = replace(scenario, plan=None, migrations=())
    whole = train_plain(ranks, plain, transport)
    assert_equal(scenario, ranks.run(train, scenario, transport, world_size=world_size), whole)


@cache  # many plans are compared with the same run
def train_plain(ranks, plain, transport):
    return merged(plain, ranks.run(train, plain, transport, world_size=plain.world_size))


@pytest.mark.parametrize("two_hop", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_rule_across_two_nodes(ranks, rule, two_hop, accumulate):
    tables = several("adam")
    plan = make_plan(tables, 4, 2, lambda number: (rule, number, 3 * number, two_hop))
    check(ranks, Scenario(tables=tables, batch_sizes=(4, 3, 0, 5), plan=plan, ranks_per_node=2, accumulate=accumulate))


def test_every_rule_across_three_nodes(ranks):
    """A node leader replies to two others."""
    tables = several("adam")
    plan = make_plan(tables, 3, 1, lambda number: (RULES[number % 4], number, number, True))
    check(ranks, Scenario(tables=tables, batch_sizes=(5, 4, 5), plan=plan, ranks_per_node=1))


@pytest.mark.parametrize("transport", ["one_sided", "collective"])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_on_one_host(ranks, rule, transport):
    tables = several("row_wise_adagrad")
    plan = make_plan(tables, 3, 3, lambda number: (rule if number % 2 else "cyclic", number, number, True))
    check(ranks, Scenario(tables=tables, batch_sizes=(4, 3, 5), plan=plan, accumulate=2, evaluates=True), transport)


@pytest.mark.parametrize("rule", ["adagrad", "adam"])
@pytest.mark.parametrize("two_hop", [False, True])
def test_rows_of_64_bits(ranks, rule, two_hop):
    tables = several(rule, torch.float64)
    plan = make_plan(tables, 4, 2, lambda number: (RULES[number % 4], number, 3 * number, two_hop))
    check(ranks, Scenario(tables=tables, batch_sizes=(4, 3, 0, 5), plan=plan, ranks_per_node=2, accumulate=2))


@st.composite
def scenarios(draw):
    ranks_per_node, num_nodes = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 4), (1, 3), (3, 1)]))
    world_size = ranks_per_node * num_nodes
    job = draw(random_jobs(world_size))
    plan = draw(random_plans(job.tables, world_size, ranks_per_node, sums=True))
    return replace(job, plan=plan, ranks_per_node=ranks_per_node)


@settings(max_examples=5)
@given(scenario=scenarios(), one_sided=st.booleans())
def test_random_plans(ranks, scenario, one_sided):
    check_plan(ranks, scenario, one_sided)


@pytest.mark.slow
@settings(max_examples=200)
@given(scenario=scenarios(), one_sided=st.booleans())
def test_many_random_plans(ranks, scenario, one_sided):
    check_plan(ranks, scenario, one_sided)


def check_plan(ranks, scenario, one_sided):
    is_one_host = scenario.ranks_per_node == scenario.world_size
    check(ranks, scenario, "one_sided" if one_sided and is_one_host else "collective")


def totals_by_hand(scenario):
    """Accesses of every table, and its distinct rows in each step; what node leaders merge counts once a node."""
    accesses, distinct = Counter(), Counter()
    passes = [(part, rank) for part in range(scenario.accumulate) for rank in range(scenario.world_size)]
    plain = replace(scenario, plan=None)  # a plan cannot be hashed
    per_node = scenario.ranks_per_node or scenario.world_size
    for step in range(scenario.num_steps):
        found = set()
        for part, rank in passes:
            for name, rows in ids_by_table(plain, step, part, rank).items():
                accesses[name] += len(rows)
                for row in rows:
                    where = scenario.plan.table(name).range_of(row)
                    is_relayed = per_node < scenario.world_size and (where.rule == "node" or where.two_hop)
                    found.add((name, row, rank // per_node if is_relayed else 0))
        distinct.update(name for name, _, _ in found)
    return accesses, distinct


def totals(parts, field):
    """A counter of tables, summed over the ranks."""
    return sum((Counter(getattr(each, field)) for part in parts for each in part.counters.values()), Counter())


COUNTED = [("one_sided", 3, False), ("collective", 3, False), ("collective", 2, False), ("collective", 2, True)]


@pytest.mark.parametrize("rule", [*RULES, "mixed"])
@pytest.mark.parametrize("transport, ranks_per_node, two_hop", COUNTED)
def test_any_plan_counts_the_same(ranks, rule, transport, ranks_per_node, two_hop):
    tables, world_size = several("adagrad"), 3 if ranks_per_node == 3 else 4
    plan = make_plan(
        tables,
        world_size,
        ranks_per_node,
        lambda number: (RULES[number % 4] if rule == "mixed" else rule, number, 3 * number, two_hop),
    )
    scenario = Scenario(
        tables=tables, batch_sizes=(40, 30, 0, 50)[:world_size], plan=plan, ranks_per_node=ranks_per_node, accumulate=2
    )
    parts, plain = (
        ranks.run(train, each, transport, world_size=world_size) for each in (scenario, replace(scenario, plan=None))
    )
    for mine, theirs in zip(parts, plain, strict=True):
        for name, counters in mine.counters.items():
            for field in ("routes", "pushes", "ids", "unique_ids"):
                assert getattr(counters, field) == getattr(theirs.counters[name], field), field
    accesses, distinct = totals_by_hand(scenario)
    assert totals(parts, "table_accesses") == accesses == totals(plain, "table_accesses")
    assert totals(parts, "table_distinct") == distinct


def look_up_outside(mesh, tables, plan, ranks_per_node, transport, is_mapped):
    """Trains on ids of which some are outside their table, or already mapped; vectors, rows and what was counted."""
    mesh = replace(mesh, hosts=tuple(rank // ranks_per_node for rank in range(mesh.world_size)))
    collection = EmbeddingCollection(tables, mesh=mesh, transport=transport, plan=plan)
    optimizer = EmbeddingOptimizer(collection)
    vectors, refused = [], Counter()
    for step in range(3):
        bags = {}
        for spec in tables:
            ids = [mesh.rank, -1 - mesh.rank, step, spec.num_rows, spec.num_rows - 1, 2**40 + step]
            outside = [not 0 <= i < spec.num_rows for i in ids]
            refused[spec.name] += sum(outside)
            if is_mapped:
                ids = [spec.out_of_range if is_out else i for i, is_out in zip(ids, outside, strict=True)]
            bags[spec.name] = [ids[:4], ids[4:]]
        values = collection(SparseBatch.from_bags(bags)).values
        values.square().sum().backward()
        optimizer.step()
        vectors.append(values.detach().clone())
    rows = {spec.name: _by_row(collection.held_rows(spec.name)) for spec in tables}
    counted = sum((Counter(counters.out_of_range) for counters in collection.counters), Counter())
    collection.close()
    assert counted == (Counter() if is_mapped else refused)
    return vectors, rows


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("transport, ranks_per_node", [("one_sided", 4), ("collective", 4), ("collective", 2)])
def test_ids_outside_their_table_read_the_same_row_under_any_plan(ranks, rule, transport, ranks_per_node):
    """The row they are mapped to is in the first, the middle or the last range of its table."""
    tables = tuple(table(f"t{row}", 30, dim, "adagrad", out_of_range=row) for row, dim in ((0, 3), (15, 3), (29, 16)))
    plan = make_plan(tables, 4, ranks_per_node, lambda number: (rule, number, number, True))
    mine = ranks.run(look_up_outside, tables, plan, ranks_per_node, transport, False, world_size=4)
    plain = ranks.run(look_up_outside, tables, None, ranks_per_node, transport, True, world_size=4)
    for (vectors, _), (expected, _) in zip(mine, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(vectors, expected, strict=True))
    for spec in tables:
        trained = {row: values for _, held in plain for row, values in held[spec.name].items()}
        for _, held in mine:
            for row, values in held[spec.name].items():
                assert all(torch.equal(a, b) for a, b in zip(values, trained[row], strict=True)), row


def fetch_all_then_pool(mesh, tables, plan, ranks_per_node):
    """The vectors of several batches, each pooled at once or all after the last was fetched."""
    mesh = replace(mesh, hosts=tuple(rank // ranks_per_node for rank in range(mesh.world_size)))
    collection = EmbeddingCollection(tables, mesh=mesh, transport="collective", plan=plan)
    batches = [
        SparseBatch.from_bags({spec.name: [[(7 * mesh.rank + 3 * n) % spec.num_rows]] for spec in tables})
        for n in range(3)
    ]
    at_once = [collection(batch).values.clone() for batch in batches]
    rows = [collection.fetch(collection.route(batch)) for batch in batches]
    later = [collection.pool(each).values.clone() for each in rows]
    collection.close()
    return [torch.equal(a, b) for a, b in zip(at_once, later, strict=True)]


@pytest.mark.parametrize("rule", RULES)
def test_routes_do_not_share_rows(ranks, rule):
    tables = (table("a", 480, 3), table("b", 48, 16))
    plan = make_plan(tables, 4, 2, lambda number: (rule, number, number, True))
    assert ranks.run(fetch_all_then_pool, tables, plan, 2, world_size=4) == [[True] * 3] * 4


def through_a_checkpoint(mesh, tables, plans, ranks_per_node, folder):
    """Whether rows, states and copies under the second plan are those that were saved under the first."""
    mesh = replace(mesh, hosts=tuple(rank // ranks_per_node for rank in range(mesh.world_size)))
    first, second = (
        EmbeddingCollection(tables, mesh=mesh, transport="collective", plan=plan, seed=seed)
        for seed, plan in enumerate(plans)
    )
    optimizer = EmbeddingOptimizer(first)
    first(SparseBatch.from_bags({spec.name: [list(range(spec.num_rows))] for spec in tables})).values.sum().backward()
    optimizer.step()
    checkpoint.save(folder, first, {}, peers=mesh.peers)
    checkpoint.load(folder, second)
    second.barrier()
    parts = [{spec.name: _by_row(each.held_rows(spec.name)) for spec in tables} for each in (first, second)]
    first.close()
    second.close()
    return parts


def _by_row(pieces):
    """Row → its values and states."""
    return {
        row: [piece.values[i].clone(), *(state[i].clone() for state in piece.state.values())]
        for piece in pieces
        for i, row in enumerate(piece.rows)
    }


@pytest.mark.parametrize("rule", RULES)
def test_checkpoints_go_from_plan_to_plan_with_all_copies(ranks, rule, tmp_path):
    tables = (table("a", 50, 3, "adam"), table("b", 7, 16, "row_wise_adagrad"))
    plans = [
        make_plan(tables, 4, 2, lambda number: (RULES[number % 4], number, number, True)),
        make_plan(tables, 4, 2, lambda number: (rule, 3 * number, number, False)),
    ]
    parts = ranks.run(through_a_checkpoint, tables, plans, 2, tmp_path / "model", world_size=4)
    for spec in tables:
        saved = {row: values for before, _ in parts for row, values in before[spec.name].items()}
        assert sorted(saved) == list(range(spec.num_rows))
        for _, after in parts:
            for row, values in after[spec.name].items():
                assert all(torch.equal(a, b) for a, b in zip(values, saved[row], strict=True))


def push_on_one_rank(mesh, tables, plan, ranks_per_node, is_zero):
    """One look-up a step that only rank 1 pushes; or that the others push with a loss times 0."""
    mesh = replace(mesh, hosts=tuple(rank // ranks_per_node for rank in range(mesh.world_size)))
    collection = EmbeddingCollection(tables, mesh=mesh, transport="collective", plan=plan)
    optimizer = EmbeddingOptimizer(collection)
    for step in range(3):
        batch = SparseBatch.from_bags({spec.name: [[(5 * mesh.rank + step) % spec.num_rows, 0]] for spec in tables})
        loss = collection(batch).values.square().sum()
        if mesh.rank == 1:
            loss.backward()
        elif is_zero:
            (0.0 * loss).backward()
        optimizer.step()
    rows = {spec.name: _by_row(collection.held_rows(spec.name)) for spec in tables}
    collection.close()
    return rows


@pytest.mark.parametrize("rule", RULES)
def test_a_look_up_that_one_rank_pushes(ranks, rule):
    tables = (table("a", 50, 3, "row_wise_adagrad"), table("b", 7, 16))
    plan = make_plan(tables, 4, 2, lambda number: (rule, number, number, True))
    mine, theirs = (ranks.run(push_on_one_rank, tables, plan, 2, is_zero, world_size=4) for is_zero in (False, True))
    for one, other in zip(mine, theirs, strict=True):
        for spec in tables:
            for row, values in one[spec.name].items():
                assert all(torch.equal(a, b) for a, b in zip(values, other[spec.name][row], strict=True)), row


def test_hundreds_of_ranges(ranks):
    """Heads that the kernel finds through its index, and the ranges behind them."""
    tables = (table("a", 6000, 3, "adam"),)
    starts = [*range(300), 500, 900, 2000, 3000, 4500, 5000, 5500, 6000]
    ranges = tuple(
        RowRange(a, b, RULES[number % 4], number % 4, number * 7 % 4, number % 3 == 0)
        for number, (a, b) in enumerate(pairwise(starts))
    )
    plan = Plan((TablePlan(TableShape.of(tables[0]), ranges),), 4, 2)
    check(ranks, Scenario(tables=tables, batch_sizes=(60, 50, 40, 70), plan=plan, ranks_per_node=2))


UNSORTED = [
    ("train", False, "collective", 2),
    ("infer", True, "collective", 2),
    ("train", True, "one_sided", 4),
    ("infer", False, "one_sided", 4),
    ("infer", False, "collective", 4),
]


@pytest.mark.parametrize("mode, deduplicated, transport, ranks_per_node", UNSORTED)
def test_plans_of_counts_in_no_order(ranks, mode, deduplicated, transport, ranks_per_node):
    """Rows that are copied stand among cyclic rows, which share rounds of slots."""
    tables = (table("a", 300, 3, "adam"), table("b", 90, 3, "adam"), table("c", 150, 16, "row_wise_adagrad"))
    generator = np.random.default_rng(0)
    counts = {spec.name: generator.permutation(1000 // np.arange(1, spec.num_rows + 1)) for spec in tables}
    profile = Profile.from_counts(counts, [TableShape.of(spec) for spec in tables], num_samples=2000)
    topology = Topology.grouped(4 // ranks_per_node, ranks_per_node, 4.21)
    request = Request(batch_size=16, mode=mode, deduplicated=deduplicated, extra_memory=0.3, fetch_weight=3.0)
    plan = search("cyclic", profile, topology, request)
    parts = [part for planned in plan.tables for part in planned.ranges]
    assert any(part.phase for part in parts)
    assert {part.rule for part in parts} > {"cyclic"}
    check(
        ranks,
        Scenario(tables=tables, batch_sizes=(40, 30, 0, 50), plan=plan, ranks_per_node=ranks_per_node, accumulate=2),
        transport,
    )


def test_one_rank_trains_by_any_plan():
    tables = several("adam")
    plan = make_plan(tables, 1, 1, lambda number: (RULES[number % 4], 0, 0, True))
    scenario = Scenario(tables=tables, batch_sizes=(9,))
    whole = merged(scenario, [train(Mesh(), scenario)])
    assert_equal(scenario, [train(Mesh(), replace(scenario, plan=plan))], whole)


def train_on_all_rows(mesh, tables, plan, ranks_per_node, num_steps):
    """Every rank wants every row in every step; returns what this rank received, group by group."""
    mesh = replace(mesh, hosts=tuple(rank // ranks_per_node for rank in range(mesh.world_size)))
    collection = EmbeddingCollection(tables, mesh=mesh, transport="collective", plan=plan)
    optimizer = EmbeddingOptimizer(collection)
    batch = SparseBatch.from_bags({spec.name: [list(range(spec.num_rows))] for spec in tables})
    for _ in range(num_steps):
        collection(batch).values.sum().backward()
        optimizer.step()
    received = sum(counters.bytes_received for counters in collection.counters)
    collection.close()
    return received


@pytest.mark.parametrize("two_hop", [False, True])
@pytest.mark.parametrize("rule", [*RULES, "mixed"])
def test_the_cost_model_predicts_the_bytes_that_are_counted(ranks, rule, two_hop):
    """To the byte, since all ranks have as many sums of copied rows to share: messages differ in length else."""
    tables = (table("a", 480, 3), table("b", 48, 3, "adam"), table("c", 240, 16, "row_wise_adagrad"))
    chosen = (lambda number: RULES[number % 4]) if rule == "mixed" else (lambda _: rule)
    plan = make_plan(tables, 4, 2, lambda number: (chosen(number), number, number, two_hop))
    num_steps = 3
    counted = sum(ranks.run(train_on_all_rows, tables, plan, 2, num_steps, world_size=4)) / num_steps
    shapes = [TableShape.of(spec) for spec in tables]
    accesses = {spec.name: np.full(spec.num_rows, 100) for spec in tables}  # so many that every rank wants each
    profile = Profile.from_counts(accesses, shapes, num_samples=1)
    predicted = cost_of(plan, profile, Request(batch_size=1)).total_bytes
    assert counted == predicted


def buffers_of_messages(mesh, tables, plan, ranks_per_node):
    """What the groups' messages hold before the first step, and after each."""
    mesh = replace(mesh, hosts=tuple(rank // ranks_per_node for rank in range(mesh.world_size)))
    collection = EmbeddingCollection(tables, mesh=mesh, transport="collective", plan=plan)
    optimizer = EmbeddingOptimizer(collection)
    batch = SparseBatch.from_bags({spec.name: [list(range(spec.num_rows))] for spec in tables})
    held = []
    for _ in range(4):
        held.append(sum(group.num_bytes for group in collection.engine.shard_groups.stored[0].transport._groups))
        collection(batch).values.sum().backward()
        optimizer.step()
    collection.close()
    return held


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("two_hop", [False, True])
def test_buffers_of_messages_are_counted_and_do_not_grow(ranks, rule, two_hop):
    tables = (table("a", 4800, 16),)
    plan = make_plan(tables, 4, 2, lambda number: (rule, number, number, two_hop))
    for first, *later in ranks.run(buffers_of_messages, tables, plan, 2, world_size=4):
        assert later == [later[0]] * 3
        if two_hop or rule in ("node", "replicated"):
            # At least the sums of a rank's share of the rows go through them.
            assert later[0] - first >= 4800 // 4 * 4 * 16


def test_one_rank_may_have_any_plan():
    tables = several("sgd")
    plan = make_plan(tables, 1, 1, lambda number: (RULES[number % 4], 0, 0, True))
    EmbeddingCollection(tables, plan=plan).close()


def test_plans_for_others_are_refused():
    tables = several("sgd")
    shapes = [TableShape.of(spec) for spec in tables]
    with pytest.raises(ConfigurationError, match="the plan is for 2 ranks, but 1 take part"):
        EmbeddingCollection(tables, plan=Plan.cyclic(shapes, 2))
    with pytest.raises(ConfigurationError, match="the plan has no table 'user'"):
        EmbeddingCollection(tables, plan=Plan.cyclic(shapes[1:], 1))
    with pytest.raises(ConfigurationError, match=r"tables that are not here: \['user'\]"):
        EmbeddingCollection(tables[1:], plan=Plan.cyclic(shapes, 1))
    with pytest.raises(ConfigurationError, match="another table 'user'"):
        EmbeddingCollection(tables, plan=Plan.cyclic([replace(shapes[0], value_bytes=8), *shapes[1:]], 1))

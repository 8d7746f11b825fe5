"""Any plan trains the same model, to the bit, and keeps all copies of a row equal."""

from __future__ import annotations

from dataclasses import replace
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
from tests.support.scenario import Scenario
from tests.support.training import merged, train
from tests.test_equivalence import several, table

RULES = ("dealt", "node", "replicated", "fixed")


def make_plan(tables, world_size, ranks_per_node, choose):
    """`choose(number of a range)` gives rule, shift, rank and hops; tables are cut into thirds."""
    planned, number = [], 0
    for spec in tables:
        cuts = sorted({0, spec.num_rows // 3, 2 * spec.num_rows // 3, spec.num_rows})
        ranges = []
        for start, stop in pairwise(cuts):
            rule, shift, rank, two_hop = choose(number)
            ranges.append(RowRange(start, stop, rule, shift % world_size, rank % world_size, two_hop))
            number += 1
        planned.append(TablePlan(TableShape.of(spec), tuple(ranges)))
    return Plan(tuple(planned), world_size, ranks_per_node)


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
    plain = replace(scenario, plan=None)
    whole = merged(plain, ranks.run(train, plain, transport, world_size=world_size))
    assert_equal(scenario, ranks.run(train, scenario, transport, world_size=world_size), whole)


@pytest.mark.parametrize("two_hop", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_rule_across_two_nodes(ranks, rule, two_hop, accumulate):
    tables = several("adam")
    plan = make_plan(tables, 4, 2, lambda number: (rule, number, 3 * number, two_hop))
    check(ranks, Scenario(tables=tables, batch_sizes=(4, 3, 0, 5), plan=plan, ranks_per_node=2, accumulate=accumulate))


@pytest.mark.parametrize("transport", ["one_sided", "collective"])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_on_one_host(ranks, rule, transport):
    tables = several("row_wise_adagrad")
    plan = make_plan(tables, 3, 3, lambda number: (rule if number % 2 else "dealt", number, number, True))
    check(ranks, Scenario(tables=tables, batch_sizes=(4, 3, 5), plan=plan, accumulate=2, evaluates=True), transport)


@st.composite
def scenarios(draw):
    ranks_per_node, num_nodes = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 4), (1, 3), (3, 1)]))
    world_size = ranks_per_node * num_nodes
    tables = tuple(
        table(
            f"t{index}",
            draw(st.sampled_from([1, 2, 5, 30, 3000])),
            draw(st.sampled_from([3, 16])),
            draw(st.sampled_from(["sgd", "adagrad", "row_wise_adagrad", "adam"])),
            pooling=draw(st.sampled_from(["sum", "mean", "none"])),
            dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        )
        for index in range(draw(st.integers(1, 4)))
    )
    number = st.integers(0, 7)
    plan = make_plan(
        tables, world_size, ranks_per_node,
        lambda _: (draw(st.sampled_from(RULES)), draw(number), draw(number), draw(st.booleans())),
    )  # fmt: skip
    return Scenario(
        tables=tables,
        batch_sizes=tuple(draw(st.lists(st.integers(0, 6), min_size=world_size, max_size=world_size))),
        skew=draw(st.sampled_from([1.0, 3.0, 1e9])),
        num_steps=draw(st.integers(1, 3)),
        accumulate=draw(st.sampled_from([1, 2])),
        evaluates=draw(st.booleans()),
        plan=plan,
        ranks_per_node=ranks_per_node,
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=40)
@given(scenario=scenarios(), one_sided=st.booleans())
def test_random_plans(ranks, scenario, one_sided):
    is_one_host = scenario.ranks_per_node == scenario.world_size
    check(ranks, scenario, "one_sided" if one_sided and is_one_host else "collective")


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
    checkpoint.save(folder, first, {}, group=mesh.group)
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
    """To the byte, but for the padding of the messages that keep copies equal (64 bytes each)."""
    tables = (table("a", 480, 3), table("b", 48, 3, "adam"), table("c", 240, 16, "row_wise_adagrad"))
    chosen = (lambda number: RULES[number % 4]) if rule == "mixed" else (lambda _: rule)
    plan = make_plan(tables, 4, 2, lambda number: (chosen(number), number, number, two_hop))
    num_steps = 3
    counted = sum(ranks.run(train_on_all_rows, tables, plan, 2, num_steps, world_size=4)) / num_steps
    shapes = [TableShape.of(spec) for spec in tables]
    accesses = {spec.name: np.full(spec.num_rows, 100) for spec in tables}  # so many that every rank wants each
    profile = Profile.from_counts(accesses, shapes, num_samples=1)
    predicted = cost_of(plan, profile, Request(batch_size=1)).total_bytes
    assert predicted <= counted <= predicted + 64 * 3 * 4 * 4


def test_one_rank_may_have_any_plan():
    tables = several("sgd")
    plan = make_plan(tables, 1, 1, lambda number: (RULES[number % 4], 0, 0, True))
    EmbeddingCollection(tables, plan=plan).close()


def test_plans_for_others_are_refused():
    tables = several("sgd")
    shapes = [TableShape.of(spec) for spec in tables]
    with pytest.raises(ConfigurationError, match="the plan is for 2 ranks, but 1 take part"):
        EmbeddingCollection(tables, plan=Plan.dealt(shapes, 2))
    with pytest.raises(ConfigurationError, match="the plan has no table 'user'"):
        EmbeddingCollection(tables, plan=Plan.dealt(shapes[1:], 1))
    with pytest.raises(ConfigurationError, match=r"tables that are not here: \['user'\]"):
        EmbeddingCollection(tables[1:], plan=Plan.dealt(shapes, 1))
    with pytest.raises(ConfigurationError, match="another table 'user'"):
        EmbeddingCollection(tables, plan=Plan.dealt([replace(shapes[0], value_bytes=8), *shapes[1:]], 1))

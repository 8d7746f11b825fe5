"""Cost by runs equals cost row by row, and both are what batches move on average."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.placement.cost import SLOT_BYTES, Cost, cost_of, degree_of_balance
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.topology import Topology
from tests.support.plans import random_ranges


@st.composite
def planned(draw, max_rows=30):
    """A plan of random ranges over random counts."""
    G, H = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    W = G * H
    counts, tables = {}, []
    for index in range(draw(st.integers(1, 3))):
        num_rows = draw(st.integers(1, max_rows))
        shape = TableShape(f"t{index}", num_rows, draw(st.sampled_from([8, 64])), draw(st.sampled_from([8, 32])), 4)
        ranges = draw(random_ranges(num_rows, W))
        tables.append(TablePlan(shape, ranges))
        counts[shape.name] = sorted(draw(st.lists(st.integers(0, 30), min_size=num_rows, max_size=num_rows)))[::-1]
    profile = Profile.from_counts(counts, [table.shape for table in tables], num_samples=40)
    return Plan(tuple(tables), W, G), profile


class Ledger:
    """What moves, booked message by message as the runtime sends it. Index [to, from]."""

    def __init__(self, W):
        self.lookup_rows, self.lookup_bytes, self.fetch, self.gradients = (np.zeros((W, W)) for _ in range(4))

    def looked_up(self, reader, at, times, value_bytes):
        self.lookup_rows[reader, at] += times
        self.lookup_bytes[reader, at] += times * value_bytes

    def fetched(self, reader, at, times, value_bytes):
        if reader != at:
            self.fetch[reader, at] += times * value_bytes
            self.fetch[at, reader] += times * SLOT_BYTES

    def sent(self, source, target, times, num_bytes):
        if source != target:
            self.gradients[target, source] += times * num_bytes


def book(ledger, part, row, shape, W, G, training, rank, node, world):
    """One row of a range: `rank[i]`, `node[m]` and `world` are how often a rank, a node and all ranks ask for it."""
    owner, holders = part.owner(row, W), part.holders(row, W, G)
    leaders = [m * G + owner % G for m in range(W // G)]
    value, gradient, copied = shape.value_bytes, shape.gradient_bytes, shape.gradient_bytes + SLOT_BYTES
    through_leaders = part.rule == "node" or part.two_hop
    for i in range(W):
        leader = leaders[i // G]
        if part.rule == "replicated":
            ledger.looked_up(i, i, rank[i], value)
        elif part.rule == "node":
            assert leader in holders
            ledger.looked_up(i, leader, rank[i], value)
            ledger.fetched(i, leader, rank[i], value)
        elif part.two_hop:
            ledger.fetched(i, leader, rank[i], value)
            if i != leader or leader == owner:
                ledger.looked_up(i, leader, rank[i], value)
        else:
            ledger.looked_up(i, owner, rank[i], value)
            ledger.fetched(i, owner, rank[i], value)
        if training:
            num_bytes = copied if part.rule == "replicated" else gradient
            ledger.sent(i, leader if through_leaders else owner, rank[i], num_bytes)
    for m, leader in enumerate(leaders):
        if through_leaders and leader != owner:
            if part.rule not in ("node", "replicated"):
                ledger.looked_up(leader, owner, node[m], value)
                ledger.fetched(leader, owner, node[m], value)
            if training:
                ledger.sent(leader, owner, node[m], gradient if part.rule in ("cyclic", "fixed") else copied)
    if training and part.rule == "node":
        for holder in holders:
            ledger.sent(owner, holder, world, copied)
    if training and part.rule == "replicated":
        for m, leader in enumerate(leaders):
            if part.two_hop:
                ledger.sent(owner, leader, world, copied)
            for i in range(m * G, (m + 1) * G):
                ledger.sent(leader if part.two_hop else owner, i, world, copied)


def same(cost: Cost, ledger: Ledger, rtol=1e-9, atol=1e-7):
    for name, found, booked in (
        ("look-ups", cost.lookup_rows, ledger.lookup_rows),
        ("bytes looked up", cost.lookup_bytes, ledger.lookup_bytes),
        ("fetched", cost.fetch_bytes, ledger.fetch),
        ("gradients", cost.gradient_bytes, ledger.gradients),
    ):
        np.testing.assert_allclose(found, booked, rtol=rtol, atol=atol, err_msg=name)


def chances(profile, index, samples):
    return np.repeat(profile.presence(index, samples), profile.tables[index].lengths)


@settings(max_examples=150)
@given(planned(), st.booleans(), st.booleans(), st.integers(1, 20))
def test_runs_cost_what_rows_cost(case, training, deduplicated, batch_size):
    plan, profile = case
    W, G = plan.world_size, plan.ranks_per_node
    ledger = Ledger(W)
    for index, table in enumerate(plan.tables):
        world = chances(profile, index, batch_size * W)
        if deduplicated:
            rank, node = chances(profile, index, batch_size), chances(profile, index, batch_size * G)
        else:
            rank = np.repeat(profile.access_rate(index), profile.tables[index].lengths) * batch_size
            node = rank * G
        for part in table.ranges:
            for row in range(part.start, part.stop):
                book(
                    ledger, part, row, table.shape, W, G, training, [rank[row]] * W, [node[row]] * (W // G), world[row]
                )
    request = Request(batch_size=batch_size, mode="train" if training else "infer", deduplicated=deduplicated)
    cost = cost_of(plan, profile, request)
    same(cost, ledger)
    assert cost.memory_bytes.tolist() == list(plan.memory_bytes)


@st.composite
def summed(draw):
    """A plan some of whose tables send sums, over bags of any kind."""
    plan, profile = draw(planned())
    tables, counted = list(plan.tables), list(profile.tables)
    for index, table in enumerate(plan.tables):
        if draw(st.booleans()):
            tables[index] = TablePlan.of_sums(table.shape, draw(st.integers(0, plan.world_size - 1)))
        features, weight_bytes = draw(st.integers(1, 3)), draw(st.sampled_from([0, 4, 8]))
        bags = {"num_features": features, "num_jagged": draw(st.integers(0, features))}
        counted[index] = replace(counted[index], weight_bytes=weight_bytes, **bags)
    return replace(plan, tables=tuple(tables)), replace(profile, tables=tuple(counted))


@settings(max_examples=100)
@given(summed(), st.booleans(), st.sampled_from(["float32", "bfloat16"]), st.integers(1, 20))
def test_sums_cost_what_bags_and_vectors_are(case, training, wire_dtype, batch_size):
    plan, profile = case
    W = plan.world_size
    request = Request(batch_size=batch_size, mode="train" if training else "infer", wire_dtype=wire_dtype)
    sends_rows = [index for index, table in enumerate(plan.tables) if table.send == "rows"]
    alone = (
        replace(plan, tables=tuple(plan.tables[index] for index in sends_rows)),
        replace(profile, tables=tuple(profile.tables[index] for index in sends_rows)),
    )
    ledger, heads = Ledger(W), set()
    if sends_rows:
        rows = cost_of(*alone, request)
        ledger.lookup_rows, ledger.lookup_bytes = rows.lookup_rows.copy(), rows.lookup_bytes.copy()
        ledger.fetch, ledger.gradients = rows.fetch_bytes.copy(), rows.gradient_bytes.copy()
    for table, counted in zip(plan.tables, profile.tables, strict=True):
        if table.send == "rows":
            continue
        shape, owner = table.shape, table.ranges[0].rank
        ids, bags = batch_size * counted.total_accesses / profile.num_samples, batch_size * counted.num_features
        message = ids * (4 + counted.weight_bytes) + 8 * counted.num_features
        message += 4 * batch_size * counted.num_jagged
        group = owner, shape.value_bytes, shape.gradient_bytes, shape.state_bytes
        message += 8 * (group not in heads)
        heads.add(group)
        for rank in range(W):
            ledger.looked_up(rank, owner, ids, shape.value_bytes)
            if rank != owner:
                ledger.fetch[owner, rank] += message
                ledger.fetch[rank, owner] += bags * shape.gradient_bytes
                ledger.gradients[owner, rank] += training * bags * shape.gradient_bytes
    cost = cost_of(plan, profile, request)
    same(cost, ledger)
    assert cost.busiest_bytes == pytest.approx(
        max(*cost.link_bytes.sum(axis=0), *cost.link_bytes.sum(axis=1)), rel=1e-9
    )
    owned = {table.ranges[0].rank for table in plan.tables if table.send == "sums"}
    assert set(np.flatnonzero(cost.owner_bytes)) == owned


@pytest.mark.parametrize("two_hop", [False, True])
@pytest.mark.parametrize("deduplicated", [False, True])
def test_the_expectation_is_what_batches_move_on_average(two_hop, deduplicated):
    G, W, batch_size, steps, num_samples = 2, 4, 8, 4000, 100
    shape = TableShape("item", 12, value_bytes=64, gradient_bytes=32, state_bytes=4)
    counts = np.array([60, 20, 8, 4, 2, 2, 1, 1, 1, 1, 0, 0])
    ranges = (
        RowRange(0, 1, "replicated", shift=3, two_hop=two_hop),
        RowRange(1, 4, "node", shift=1),
        RowRange(4, 5, "fixed", rank=2, two_hop=two_hop),
        RowRange(5, 12, shift=2, two_hop=two_hop),
    )
    plan = Plan((TablePlan(shape, ranges),), W, G)
    profile = Profile.from_counts({"item": counts}, [shape], num_samples)

    rng = np.random.default_rng(0)
    drawn = rng.choice(len(counts), p=counts / num_samples, size=(steps, W, batch_size))
    asked = np.stack([(drawn == row).sum(axis=2) for row in range(len(counts))])  # [rows, steps, W]
    present = np.minimum(asked, 1)
    by_node = asked.reshape(len(counts), steps, W // G, G)
    rank = (present if deduplicated else asked).mean(axis=1)
    node = (by_node.max(axis=3) > 0 if deduplicated else by_node.sum(axis=3)).mean(axis=1)
    world = present.max(axis=2).mean(axis=1)

    ledger = Ledger(W)
    for part in ranges:
        for row in range(part.start, part.stop):
            book(ledger, part, row, shape, W, G, True, rank[row], node[row], world[row])
    same(cost_of(plan, profile, Request(batch_size=batch_size, deduplicated=deduplicated)), ledger, rtol=0.08, atol=0.6)


def test_counted_batches_replace_independent_draws():
    shape = TableShape("item", 2, 64, 64)
    plan = Plan.cyclic([shape], 2)
    independent = Profile.from_counts({"item": [50, 50]}, [shape], 100)
    bursts = Profile.from_counts({"item": [50, 50]}, [shape], 100, batches={"item": [5, 5]}, batch_size=10)
    request = Request(batch_size=10)
    assert cost_of(plan, bursts, request).total_bytes < 0.6 * cost_of(plan, independent, request).total_bytes


def test_seconds_follow_the_links():
    shape = TableShape("item", 8, 64, 64)
    profile = Profile.from_counts({"item": [8] * 8}, [shape], 64)
    topology = Topology.grouped(2, 2, 3.0)
    cost = cost_of(Plan.cyclic([shape], 4, 2), profile, Request(batch_size=4))
    links = cost.link_seconds(topology)
    assert links[0, 1] == pytest.approx(cost.link_bytes[0, 1])
    assert links[0, 2] == pytest.approx(3 * cost.link_bytes[0, 2])
    assert cost.objective(topology, Request(batch_size=4)) == pytest.approx(links.sum())
    assert cost.objective(topology, Request(batch_size=4, objective="slowest_link")) == pytest.approx(links.max())
    assert cost.link_balance() == pytest.approx(1)
    assert cost.link_balance(topology) == pytest.approx(1 / 3)
    assert cost.step_seconds(topology) == pytest.approx(links[0].sum())
    assert cost.lookup_balance == pytest.approx(1)
    assert cost.memory_balance == 1


def test_rounds_count_what_waits():
    shape = TableShape("item", 8, 64, 64)
    profile = Profile.from_counts({"item": [8] * 8}, [shape], 64)

    def rounds(mode, *ranges):
        return cost_of(Plan((TablePlan(shape, ranges),), 4, 2), profile, Request(batch_size=4, mode=mode)).rounds

    assert rounds("infer", RowRange(0, 8)) == 2
    assert rounds("train", RowRange(0, 8)) == 3
    assert rounds("train", RowRange(0, 8, two_hop=True)) == 6
    assert rounds("infer", RowRange(0, 8, "replicated")) == 0
    assert rounds("train", RowRange(0, 4, "replicated"), RowRange(4, 8)) == 4


def test_degree_of_balance():
    assert degree_of_balance(np.array([33.8, 34.1])) == pytest.approx(0.991, abs=1e-3)
    assert degree_of_balance(np.zeros(3)) == 1

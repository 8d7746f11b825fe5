"""A plan covers every row once, survives JSON, and says what does not fit."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.errors import ConfigurationError
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from tests.support.plans import joined, random_ranges

SHAPE = TableShape("item", 10, value_bytes=64, gradient_bytes=64, state_bytes=4)


@st.composite
def plans(draw):
    ranks_per_node = draw(st.integers(1, 4))
    world_size = ranks_per_node * draw(st.integers(1, 3))
    tables = []
    for index in range(draw(st.integers(1, 3))):
        num_rows = draw(st.integers(1, 40))
        ranges = draw(random_ranges(num_rows, world_size))
        tables.append(TablePlan(TableShape(f"t{index}", num_rows, 8, 8, 4), ranges))
    plan = Plan(tuple(tables), world_size, ranks_per_node, "random", {"seed": 1})
    return joined(plan, lambda: draw(st.booleans()))


@given(plans())
def test_a_plan_survives_json(plan):
    plan.check()
    assert Plan.from_json(plan.to_json()) == plan


@given(plans())
def test_every_row_has_one_owner_that_holds_it_and_slots_suffice(plan):
    world_size, per_node = plan.world_size, plan.ranks_per_node
    for table in plan.tables:
        for part in table.ranges:
            held = Counter()
            for row in range(part.start, part.stop):
                owner, holders = part.owner(row, world_size), part.holders(row, world_size, per_node)
                assert 0 <= owner < world_size
                assert owner in holders
                if part.rule == "node":
                    assert sorted(rank // per_node for rank in holders) == list(range(plan.num_nodes))
                held.update(holders)
            for rank in range(world_size):
                assert held[rank] - 1 <= part.num_slots(rank, world_size, per_node) <= held[rank] + 1
                assert part.phase or held[rank] <= part.num_slots(rank, world_size, per_node)


def test_every_rank_reads_its_memory_from_the_rules():
    ranges = (RowRange(0, 1, "replicated"), RowRange(1, 4, "node"), RowRange(4, 9), RowRange(9, 10, "fixed", rank=2))
    plan = Plan((TablePlan(SHAPE, ranges),), world_size=4, ranks_per_node=2)
    assert plan.memory_bytes == (5 * 68, 5 * 68, 6 * 68, 5 * 68)
    with pytest.raises(ConfigurationError, match=r"rank 2 would hold 408 bytes .* 8 more than the limit of 400"):
        plan.check(memory_limit_bytes=400)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ((), "covers none"),
        ((RowRange(0, 9),), "covers 0 to 8"),
        ((RowRange(0, 3), RowRange(4, 10)), "rows 3 to 3 are in no range"),
        ((RowRange(0, 5), RowRange(4, 10)), "rows 4 to 4 are in two ranges"),
        ((RowRange(0, 10, "fixed", rank=2),), "rank 2 or shift 0 is not below 2 ranks"),
        ((RowRange(0, 10, "spread"),), "no rule 'spread'"),  # type: ignore[arg-type]
        ((RowRange(0, 0), RowRange(0, 10)), "the range is empty"),
        ((RowRange(0, 3), RowRange(3, 10, phase=1, shift=0)), "phase 1 and shift 0, but .* phase 1 and shift 1"),
        ((RowRange(0, 4), RowRange(4, 10, phase=1)), "no round of rule 'cyclic' before is unfilled"),
        ((RowRange(0, 3), RowRange(3, 10, phase=2)), "phase 2, but a round of rule 'cyclic' has 2"),
        ((RowRange(0, 3, "replicated"), RowRange(3, 10, "replicated", phase=1)), "'replicated' has 1 place"),
    ],
)
def test_a_plan_that_is_not_one_is_refused(ranges, message):
    with pytest.raises(ConfigurationError, match=message):
        Plan((TablePlan(SHAPE, ranges),), 2, 2).check()


@pytest.mark.parametrize(
    ("ranges", "found"),
    [
        ((RowRange(0, 10),), "in 1 range.s., the first of rule 'cyclic'"),
        ((RowRange(0, 10, "fixed", rank=1, two_hop=True),), "in 1 range.s., the first of rule 'fixed', two hops"),
        ((RowRange(0, 4, "fixed"), RowRange(4, 10, "fixed")), "in 2 range.s., the first of rule 'fixed'"),
    ],
)
def test_sums_are_of_a_table_that_is_whole_on_one_rank(ranges, found):
    plan = Plan((TablePlan(SHAPE, ranges, send="sums"),), 4, 2)
    with pytest.raises(ConfigurationError, match=f"table 'item' sends sums, and its rows are {found}.*; sums are of"):
        plan.check()
    replace(plan, tables=(replace(plan.tables[0], send="rows"),)).check()
    with pytest.raises(ConfigurationError, match=r"table 'item': send must be one of \('rows', 'sums'\), got 'auto'"):
        replace(plan, tables=(replace(plan.tables[0], send="auto"),)).check()


def test_a_file_says_which_tables_send_sums():
    rows = TablePlan(replace(SHAPE, name="rows", send="sums"), (RowRange(0, 10),))
    plan = Plan((TablePlan.of_sums(replace(SHAPE, send="auto"), 1, 2), rows), 4, 4)
    text = plan.to_json()
    assert text.count('"send"') == 1, "rows are not written, nor what a table was to send"
    assert Plan.from_json(text) == plan
    assert [table.send for table in Plan.from_json(text).tables] == ["sums", "rows"]
    assert plan != replace(plan, tables=(replace(plan.tables[0], send="rows"), rows))
    assert [table.send for table in plan.part(2).tables] == ["sums"]
    with pytest.raises(ConfigurationError, match=r"send must be one of .* got 3"):
        Plan.from_json(text.replace('"send": "sums"', '"send": 3'))


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from([8, 16])), min_size=1, max_size=12), st.integers(1, 5))
def test_tables_that_send_sums_are_shared_out_over_the_ranks(tables, ranks):
    shapes = [TableShape(f"t{i}", rows, size, size, send="sums") for i, (rows, size) in enumerate(tables)]
    rows = replace(SHAPE, send="auto")
    plan = Plan.cyclic([*shapes, rows], 2 * ranks, replicas={"item": 1} | {shape.name: 2 for shape in shapes})
    plan.check()
    assert plan.table("item") == TablePlan(rows, (RowRange(0, 10, shift=len(shapes) % (2 * ranks)),))
    vectors = [0] * ranks
    for table in plan.tables[:-1]:
        assert table == TablePlan.of_sums(table.shape, table.ranges[0].rank, 2)
        vectors[table.ranges[0].rank] += table.shape.gradient_bytes
    assert max(vectors) - min(vectors) <= max(size for _, size in tables)


def test_ranks_own_equally_many_vectors_then_equally_many_rows():
    shapes = [TableShape(f"t{i}", rows, 8, 8, send="sums") for i, rows in enumerate([1, 90, 1, 1, 1, 1])]
    owners = [table.ranges[0].rank for table in Plan.cyclic(shapes, 2).tables]
    assert [owners.count(owner) for owner in owners] == [3] * 6
    shapes = [TableShape(f"t{i}", rows, 8, 8, send="sums") for i, rows in enumerate([40, 90, 50])]
    assert [table.ranges[0].rank for table in Plan.cyclic(shapes, 2).tables] == [1, 0, 1]


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(ConfigurationError, match=r"cannot read the plan .*plan\.json"):
        Plan.load(path)
    for text in ("", "[]", "{}", '{"format": 1, "tables": 3}'):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=r"plan\.json: not a plan"):
            Plan.load(path)
    path.write_text(Plan.cyclic([SHAPE], 2).to_json().replace('"format": 1', '"format": 7'))
    with pytest.raises(ConfigurationError, match="format 7, this rowmesh reads 1"):
        Plan.load(path)


def test_nodes_are_equal_and_tables_are_named_once():
    plan = Plan.cyclic([SHAPE], 4)
    with pytest.raises(ConfigurationError, match="cannot have 3 ranks a node"):
        replace(plan, ranks_per_node=3).check()
    with pytest.raises(ConfigurationError, match=r"names a table twice: \['item'\]"):
        replace(plan, tables=plan.tables * 2).check()
    with pytest.raises(ConfigurationError, match="no table 'items'"):
        plan.table("items")


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"ranks_per_node": 2', '"ranks_per_node": 0', "cannot have 0 ranks a node"),
        ('"ranks_per_node": 2', '"ranks_per_node": -1', "cannot have -1 ranks a node"),
        ('"world_size": 2', '"world_size": "2"', "not a plan .world_size must be a whole number, got '2'"),
        ('"stop": 10', '"stop": 1e1', "not a plan .item.stop must be a whole number, got 10.0"),
    ],
)
def test_numbers_that_are_none_are_refused(old, new, message):
    text = Plan.cyclic([SHAPE], 2).to_json()
    assert old in text
    with pytest.raises(ConfigurationError, match=message):
        Plan.from_json(text.replace(old, new))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "plan.json").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigurationError, match=r"plan\.json: not a plan"):
        Plan.load(tmp_path / "plan.json")


SHAPES = [TableShape("user", 100, 64, 64, 4), TableShape("item", 7, 32, 32)]


@pytest.mark.parametrize("together", ["shards", "replicas"])
def test_tables_may_have_replicas_of_their_own(together):
    plan = Plan.cyclic(SHAPES, 8, 4, replicas={"user": 1, "item": 4}, together=together)
    plan.check()
    assert plan.replica_counts == (1, 4)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.part(1).tables == (plan.table("user"),)
    assert plan.part(4).world_size == 2
    assert [table.name for table in plan.part(4).tables] == ["item"]
    user, item = 13 * 68, 4 * 32  # of 100 rows over 8 ranks, of 7 rows over 2
    assert plan.memory_bytes == (user + item,) * 8
    assert sum(plan.memory_bytes) > sum(Plan.cyclic(SHAPES, 8, 4).memory_bytes)


def test_replicas_that_do_not_divide_the_ranks_are_refused():
    text = Plan.cyclic(SHAPES, 4, replicas=2).to_json()
    with pytest.raises(ConfigurationError, match=r"table 'user': 4 ranks cannot form 3 .* 1, 2, 4"):
        Plan.from_json(text.replace('"replicas": 2', '"replicas": 3'))
    with pytest.raises(ConfigurationError, match=r"user\.replicas must be a whole number"):
        Plan.from_json(text.replace('"replicas": 2', '"replicas": "2"'))
    with pytest.raises(ConfigurationError, match="together must be"):
        Plan.from_json(text.replace('"shards"', '"hosts"'))
    with pytest.raises(ConfigurationError, match="cannot be for"):
        Plan.cyclic(SHAPES, 1 << 24).check()

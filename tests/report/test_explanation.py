import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.errors import ConfigurationError
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.placement.comparison import Candidate, Comparison, compare
from rowmesh.placement.cost import NODE, ONE_HOP, REPLICATED, REPLICATED_TWO_HOP, TWO_HOP
from rowmesh.placement.plan import RuleName
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.text import bytes_text
from rowmesh.placement.topology import Topology
from rowmesh.report.explanation import RowWays, explain
from tests.placement.problems import NAMES, NUM_ROWS, mlperf, problem

SINGLE, COPIED = (ONE_HOP, TWO_HOP), (NODE, REPLICATED, REPLICATED_TWO_HOP)


@pytest.fixture(scope="module")
def inference():
    return compare(problem(Topology.grouped(2, 2, 4.21), mode="infer", extra_memory=0.1), "cyclic")


@pytest.fixture(scope="module")
def training():
    return compare(problem(), "cyclic")


def explained(comparison, what):
    return "\n".join(explain(comparison, what))


def test_a_table_lists_all_its_ranges_and_levels(inference):
    text = explained(inference, "user")
    assert text.startswith("user: 3,000 rows of 68 bytes")
    assert re.search(r"rows 0 to \d+ +hot +a copy on every rank", text)
    assert re.search(r"\d to 2,\d+ +cold +one copy, cyclic over the ranks", text)
    shares = re.findall(r"; ([\d.]+) % of accesses", text)
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.1 * len(shares))
    assert re.search(
        r"levels, in rows .*: hot \d+ .*λ = [\d.]+ bytes saved per step and byte of memory", text, re.DOTALL
    )


@pytest.mark.parametrize("row", [0, 5, 700, 2998])
def test_a_row_says_who_holds_it_as_the_plan_does(inference, row):
    plan = inference.plan
    part = plan.table("user").range_of(row)
    text = explained(inference, f"user:{row}")
    assert f"owner: rank {part.owner(row, 4)}" in text
    holders = part.holders(row, 4, 2)
    assert ("ranks 0 to 3;" in text) == (len(holders) == 4)
    if len(holders) == 1:
        assert f"holders  rank {holders[0]};" in text
    assert text.count("→") == 1
    assert f"read     {20_000 // (row + 1) ** 1.1:,.0f} times in 200,000 samples" in text


@pytest.mark.parametrize(
    ("what", "level", "reason"),
    [
        ("user:0", "hot", r"copies save .* B a step, .* B a step of that over a copy on every node, .*, more than λ$"),
        ("user:1500", "cold", r"would save .* per byte of memory, less than λ: the memory for copies goes"),
        ("user:2999", "hot", r"copies save .* B a step"),  # the row of rare ids
        ("item:450", "cold", "no batch is expected to read it"),
    ],
)
def test_why_in_inference(inference, what, level, reason):
    text = explained(inference, what)
    assert f": {level}," in text
    assert re.search(rf"why      {reason}" if level == "hot" else reason, text)


def test_a_copy_on_every_rank_is_explained_by_what_it_saves_itself(inference):
    """Not by what a copy on every node would, which saves less in all and more for each byte."""
    for row in (0, 1, 2, 2999):
        case = RowWays(inference, inference.plan.table("user"), row)
        assert case.way == REPLICATED
        one_copy = min(case.seconds[way] for way in SINGLE)
        (whole,) = amounts(r"copies save (.*?) a step", explained(inference, f"user:{row}"))
        assert whole == pytest.approx(one_copy, rel=0.01)  # a copy on every rank is read without messages
        assert amounts(r"; (.*?) a step of that over a copy on every node", explained(inference, f"user:{row}")) == [
            pytest.approx(case.seconds[NODE], rel=0.01)
        ]


def test_one_hop_is_not_compared_with_two_hops_that_the_row_does_not_get():
    """The first rows would be cheaper in two hops, which a plan of whole rounds does not give them."""
    asked = problem(Topology.grouped(2, 4, 4.21))
    found = planned(asked, Plan.cyclic(asked.shapes, 8, 4), 0.0)
    case = RowWays(found, found.plan.table("user"), 0)
    assert case.saves(TWO_HOP, ONE_HOP)
    text = explained(found, "user:0").splitlines()[-1]
    more = case.seconds[NODE] - case.seconds[ONE_HOP]
    assert more < 0 < case.seconds[NODE] - case.seconds[TWO_HOP]
    assert amounts(r"a copy on every node would save (.*?) a step, but nothing over two hops", text) == [
        pytest.approx(-more, rel=0.01)
    ]
    assert amounts(r"two hops instead of one hop would save (.*?) a step", text) == [
        pytest.approx(case.seconds[ONE_HOP] - case.seconds[TWO_HOP], rel=0.01)
    ]
    cases = [RowWays(found, case.table, row) for row in range(200)]
    last = max(case.row for case in cases if case.saves(TWO_HOP, ONE_HOP))
    assert "but one and two hops change by whole rounds of 8 rows" in explained(found, f"user:{last}")


def test_a_plan_for_the_slowest_link_names_no_threshold():
    asked = problem(Topology.grouped(2, 2, 4.21), objective="slowest_link", fetch_weight=3.0)
    text = explained(compare(asked, "cyclic"), "user:0")
    assert "(no λ: the slowest link is minimized, not this sum)" in text
    assert "more than λ" not in text


@st.composite
def cases(draw):
    """A row that is a range by itself, in a plan of drawn ranges of drawn tables."""
    H, G = draw(st.sampled_from([(1, 4), (2, 2), (2, 3), (3, 1), (1, 2)]))
    shapes, counts = [], {}
    for name in NAMES[: draw(st.integers(1, 2))]:
        width = draw(st.sampled_from([16, 64]))
        counts[name] = draw(st.lists(st.integers(0, 200), min_size=3, max_size=12).filter(any))
        shapes.append(TableShape(name, len(counts[name]), width, draw(st.sampled_from([width, 2 * width])), 4))
    profile = Profile.from_counts(counts, shapes, num_samples=400)
    request = Request(
        batch_size=draw(st.integers(1, 200)),
        mode=draw(st.sampled_from(["train", "infer"])),
        deduplicated=draw(st.booleans()),
        fetch_weight=draw(st.sampled_from([1.0, 3.0])),
        max_hops=draw(st.sampled_from([1, 2])),
        wire_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )
    tables = []
    for shape in shapes:
        cuts = sorted(draw(st.sets(st.integers(1, shape.num_rows - 1), max_size=3)) | {0, 1, shape.num_rows})
        ways = [draw(st.sampled_from([ONE_HOP, TWO_HOP, *COPIED])) for _ in cuts[1:]]
        owners = [draw(st.integers(0, H * G - 1)) for _ in cuts[1:]]
        parts = zip(cuts, cuts[1:], ways, owners, strict=False)
        tables.append(TablePlan(shape, tuple(range_of(*part) for part in parts)))
    threshold = draw(st.sampled_from([None, 0.0, 0.1, 2.0]))
    asked = Problem(profile, Topology.grouped(H, G, draw(st.sampled_from([1.0, 4.21]))), request)
    return planned(asked, Plan(tuple(tables), H * G, G), threshold)


@given(cases())
def test_numbers_are_differences_of_the_cost_model(found):
    """Of every way: what the step would cost more if only this row went so."""
    case = RowWays(found, found.plan.tables[0], 0)
    whole = found.problem.objective(found.plan)
    for way in (ONE_HOP, TWO_HOP, *COPIED):
        other = found.problem.objective(sent(found.plan, way))
        assert case.seconds[way] - case.seconds[case.way] == pytest.approx(other - whole, rel=1e-9, abs=1e-9 * whole)


@given(cases())
def test_the_reason_is_that_of_the_way_that_is_taken(found):
    case = RowWays(found, found.plan.tables[0], 0)
    assert case.seconds[case.way] == pytest.approx(arrow(explain(found, f"{NAMES[0]}:0")), rel=0.01, abs=0.01)
    why = explain(found, f"{NAMES[0]}:0")[-1]
    if case.seconds[ONE_HOP] == 0:
        assert "no batch is expected to read it" in why
        return
    single = min(case.seconds[way] for way in SINGLE if way in case.ways)
    taken = case.seconds[case.way]
    copies = [case.seconds[way] for way in case.ways if case.extra_bytes[way]]
    for pattern, amount in (
        (r"copies save (.*?) a step", single - taken),
        (r"a copy of this row alone costs (.*?) a step more than one copy", taken - single),
        (r"(?:one|two) hops? instead of (?:one|two) hops? would save (.*?) a step", other_hops(case)),
    ):
        if amount is not None:
            assert amounts(pattern, why) in ([], [pytest.approx(amount, rel=0.01, abs=0.01)])
    for saved in amounts(
        r"a copy on every (?:node|rank)(?:, updated through node leaders,)? would save ([^a]*?) a step", why
    ):
        assert saved in [pytest.approx(abs(taken - copy), rel=0.01, abs=0.01) for copy in copies]
    cheaper = [way for way in case.ways if case.saves(way, case.way)]
    if cheaper:
        assert re.search(r", but |less than λ|does not compare the two", why), why
    if case.other_hops is not None:
        assert re.search("instead of (one|two) hop", why)
    if any(case.extra_bytes[way] > case.extra_bytes[case.way] for way in cheaper) and case.way not in (*SINGLE, NODE):
        assert "would save" in why


def range_of(start, stop, way, owner):
    """A range whose first row the rank owns."""
    rules: dict[int, RuleName] = {NODE: "node", REPLICATED: "replicated", REPLICATED_TWO_HOP: "replicated"}
    return RowRange(start, stop, rules.get(way, "cyclic"), shift=owner, two_hop=way in (TWO_HOP, REPLICATED_TWO_HOP))


def sent(plan, way):
    """The plan with row 0 of the first table, which is a range by itself, going another way."""
    first, *others = plan.tables
    parts = (range_of(0, 1, way, first.ranges[0].shift), *first.ranges[1:])
    return replace(plan, tables=(replace(first, ranges=parts), *others))


def planned(asked, plan, threshold):
    """A comparison that has chosen a plan."""
    notes = {} if threshold is None else {"multiplier_s_per_byte": threshold}
    plan = replace(plan, notes=notes)
    cost = asked.cost(plan)
    candidate = Candidate(plan.strategy, plan, cost, cost.objective(asked.topology, asked.request))
    return Comparison(asked, plan.strategy, (candidate,), plan)


def other_hops(case):
    return None if case.other_hops is None else case.seconds[case.way] - case.seconds[case.other_hops]


def amounts(pattern, text):
    """The costs that a pattern finds in a text, in bytes."""
    return [in_bytes(found) for found in re.findall(pattern, text)]


def in_bytes(text):
    number, unit = str(text).split()
    return float(number.replace(",", "")) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]


def arrow(lines):
    (cost,) = re.findall(r"→ .*?\s([\d.,]+ k?M?B)(?:   \+ .*)?$", "\n".join(lines), re.MULTILINE)
    return in_bytes(cost)


def test_why_training_over_equal_links_copies_nothing(training):
    text = explained(training, "user:0")
    assert "λ = 0: all copies that save anything fit in memory" in text
    assert re.search(
        r"why      a copy on every rank would cost .* B a step more than one copy: every holder of a copy needs",
        text,
    )


def test_costs_of_all_rows_add_up_to_that_of_the_step(training):
    """What the arrow points to, over all rows of a small table, is what the cost model says of the table."""
    small = compare(problem(), "table_wise")
    name, num_rows = NAMES[2], NUM_ROWS[2]
    texts = [explained(small, f"{name}:{row}") for row in range(num_rows)]
    shown = sum(float(re.search(r"→ .*? ([\d.]+) B", text)[1]) for text in texts)
    problem_ = small.problem
    first = problem_.demand.first_row[2]
    runs = problem_.demand.starts[:-1] >= first
    u = (problem_.demand.rank * problem_.demand.lengths)[runs].sum()
    assert shown == pytest.approx(3 * u * (64 + 64 + 4), rel=0.01)  # value, gradient and request, for three other ranks


def test_strategies_without_a_threshold_say_so():
    text = explained(compare(problem(mode="infer"), "row_wise"), "user:0")
    assert "strategy 'row_wise' has no threshold λ" in text
    assert "strategy 'row_wise' does not compare the two" in text


def test_one_rank():
    assert "why      there is one rank" in explained(compare(problem(Topology.uniform(1))), "user:0")


def test_what_is_not_there(training):
    with pytest.raises(ConfigurationError, match="no table 'users'; it has"):
        explain(training, "users:3")
    with pytest.raises(ConfigurationError, match="has rows 0 to 2999, no row 3000"):
        explain(training, "user:3000")
    with pytest.raises(ConfigurationError, match="no table 'user:x'"):
        explain(training, "user:x")


@pytest.fixture(scope="module")
def sums():
    return compare(Problem(mlperf("auto"), Topology.uniform(8), Request(batch_size=512)), "cyclic")


def test_a_table_says_what_it_sends_and_what_the_other_way_takes(sums):
    plan = sums.plan
    owner = plan.table("t20").ranges[0].rank
    line = f"  100 ids a bag, 34.4 distinct rows: rows 15.8 MB, sums 638 kB: sums from rank {owner}"
    assert explain(sums, "t20")[1] == line
    row = f"t20 row 5: on rank {owner}, as the whole table, which sends sums of bags"
    assert explain(sums, "t20:5")[:2] == [row, line]
    assert explain(sums, "t5")[1].endswith("rows 2.70 kB, sums 461 kB: rows")
    rows, costs = (
        sums.problem.of_tables(["t20"]).cost(replace(plan, tables=(table,))).total_bytes / 8
        for table in (Plan.cyclic([plan.table("t20").shape], 8).tables[0], plan.table("t20"))
    )
    assert (bytes_text(rows), bytes_text(costs)) == ("15.8 MB", "638 kB")


def test_a_table_says_why_it_does_not_send_sums_that_are_fewer_bytes():
    many = compare(Problem(mlperf("auto"), Topology.uniform(128), Request(batch_size=512)), "cyclic")
    why = r"sums \d+ kB: rows, since its owner would have [\d.]+ MB a step, and the busiest rank has 39.7 MB"
    assert re.search(why, explained(many, "t20"))
    assert explained(many, "t10").splitlines()[1].endswith("rows, since the busiest rank would have no less")
    asked = replace(many.problem, profile=mlperf("rows"))
    assert explain(compare(asked, "cyclic"), "t20")[1].endswith(": rows, as asked for")
    assert "bag" not in explained(compare(asked, "cyclic"), "t5")


def test_forced_sums_are_as_asked_for():
    few = compare(Problem(mlperf("sums"), Topology.uniform(2), Request(batch_size=4)), "cyclic")
    assert explain(few, "t5")[1].endswith(": sums from rank 1, as asked for")

import re

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.placement.comparison import compare
from rowmesh.placement.topology import Topology
from rowmesh.report.explanation import explain
from tests.placement.problems import NAMES, NUM_ROWS, problem


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
        ("user:0", "hot", r"copies save .* B a step, .* bytes per byte of memory, more than λ$"),
        ("user:1500", "cold", r"would save .* per byte of memory, less than λ: the memory for copies goes"),
        ("user:2999", "hot", r"copies save .* B a step"),  # the row of rare ids
        ("item:450", "cold", "no batch is expected to read it"),
    ],
)
def test_why_in_inference(inference, what, level, reason):
    text = explained(inference, what)
    assert f": {level}," in text
    assert re.search(rf"why      {reason}" if level == "hot" else reason, text)


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

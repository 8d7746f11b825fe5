import numpy as np
import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.placement import strategies
from rowmesh.placement.comparison import compare
from rowmesh.placement.strategies import QUICK, find, search
from rowmesh.placement.strategies.auto import Candidate
from rowmesh.placement.topology import Topology
from tests.placement.problems import problem


def test_all_quick_strategies_stand_beside_the_chosen_one():
    asked = problem(mode="infer")
    comparison = compare(asked)
    assert {candidate.name for candidate in comparison.candidates} == set(QUICK)
    for candidate in comparison.candidates:
        plan = search(candidate.name, asked.profile, asked.topology, asked.request)
        assert candidate.plan is not None
        assert candidate.plan.tables == plan.tables
        assert candidate.objective == asked.objective(plan)
        assert candidate.fits == asked.fits(plan)
    best = search("auto", asked.profile, asked.topology, asked.request)
    assert comparison.plan.tables == best.tables
    assert comparison.plan.strategy == comparison.chosen.name == best.strategy
    assert comparison.plan.notes["why"] == comparison.why


def test_the_sentence_names_the_next_best_and_the_difference():
    comparison = compare(problem(mode="infer"))
    fitting = sorted(c.objective for c in comparison.candidates if c.fits)
    less = f"{1 - fitting[0] / fitting[1]:.2%}".replace("%", " %")
    assert comparison.why.startswith(f"{comparison.plan.strategy}: a step costs ")
    assert f"{less} less than " in comparison.why
    assert "the next best that fits" in comparison.why


def test_plans_that_move_the_same_are_told_apart_by_their_slowest_link():
    comparison = compare(problem())
    assert "the same as " in comparison.why
    assert "but its slowest link takes " in comparison.why


def test_a_better_strategy_is_named_where_the_default_is_as_good_for_the_model():
    topology = Topology("measured", 1, 2, np.array([[0.0, 1.0], [1.02, 0.0]]), np.zeros((2, 2)))
    comparison = compare(problem(topology))
    assert comparison.why.startswith("cyclic: a step costs")
    assert comparison.why.endswith(" % less, which is within the error of the model (1%)")


def test_strategies_are_searched_once(monkeypatch):
    searched = []
    monkeypatch.setattr(strategies, "find", lambda name: searched.append(name) or find(name))
    compare(problem())
    assert searched == list(QUICK)


def test_plans_are_judged_once_and_without_a_matrix_of_links(monkeypatch):
    judged = []
    monkeypatch.setattr(
        Candidate, "of", lambda asked, plan, of=Candidate.of: judged.append(plan.strategy) or of(asked, plan)
    )
    asked = problem(Topology.grouped(4, 8, 4.21))
    comparison = compare(asked)
    assert judged == list(QUICK)
    assert "cost" not in vars(asked.topology)
    assert comparison.plan.notes["compared"]["cyclic"]["objective"] == comparison.chosen.objective


def test_a_strategy_that_was_asked_for_is_chosen_even_where_another_is_better():
    comparison = compare(problem(mode="infer"), "row_wise")
    assert comparison.plan.strategy == "row_wise"
    assert comparison.why.startswith("row_wise, as asked for: a step costs")
    assert comparison.why.endswith(" less")


def test_strategies_beyond_the_quick_ones_join_the_comparison():
    comparison = compare(problem(mode="infer"), "exact")
    assert comparison.chosen.name == "exact"
    assert len(comparison.candidates) == len(QUICK) + 1


def test_plans_over_the_limit_are_marked_and_never_second_best():
    comparison = compare(problem())
    table_wise = next(c for c in comparison.candidates if c.name == "table_wise")
    assert table_wise.over_bytes == max(table_wise.plan.memory_bytes) - comparison.problem.limit_bytes > 0
    assert table_wise.complaint.endswith("over the limit")
    assert "table_wise" not in comparison.why


def test_what_does_not_fit_in_any_way_says_by_how_much_and_what_would_help():
    with pytest.raises(ConfigurationError, match=r"needs .* more than the limit of 10,000; .* would make it fit: use"):
        compare(problem(memory_limit_bytes=10_000))


@pytest.mark.parametrize(
    ("topology", "is_relative"),
    [(Topology.uniform(4), True), (Topology.grouped(2, 2, 4.0), True), (Topology.load("2x4"), False)],
)
def test_relative_costs_are_bytes_and_others_seconds(topology, is_relative):
    comparison = compare(problem(topology))
    assert comparison.is_relative == is_relative
    unit = comparison.cost_text(comparison.chosen.objective).split()[1]
    assert (unit in ("B", "kB", "MB")) == is_relative


def test_one_rank_has_nothing_to_compare():
    comparison = compare(problem(Topology.uniform(1)))
    assert comparison.why == f"{comparison.plan.strategy}: there is one rank, so nothing is sent"

"""A sample of the grid of durability: `python -m tests.durability` runs all of it."""

import argparse

import pytest

from tests.durability import NUM_STEPS, REPLACING, Case, Grid, cases
from tests.support.modes import MODES, NEED_RANKS


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return Grid(tmp_path_factory.mktemp("grid"), evaluates=False)


def test_a_case_of_the_grid(grid):
    assert grid.run(Case("pipelined, depth 2", 2, "one_sided", "loop.step@8", 0))["problem"] == ""


def test_a_run_that_takes_the_place_of_another(grid):
    assert grid.run(Case("plain", 1, "", "run.settle@2", 0))["problem"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("point", REPLACING)
def test_a_run_that_takes_the_place_of_another_on_two_ranks(grid, point):
    assert grid.run(Case("plain", 2, "collective", point, 0))["problem"] == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, ranks",
    [("tiered in files", 2), ("copies", 4), ("tensor-train", 1), ("dynamic, incremental, asynchronous", 2)],
)
def test_more_cases_of_the_grid(grid, mode, ranks):
    transport = "collective" if ranks > 1 else ""
    assert grid.run(Case(mode, ranks, transport, "loop.step@17", 0))["problem"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pipelined, depth 2", "dynamic, pipelined, asynchronous"])
def test_points_of_updates_are_met_in_pipelines_too(grid, mode):
    assert grid.run(Case(mode, 2, "collective", "engine.push@8", 1))["problem"] == ""


def test_the_grid_has_every_step_and_mode():
    asked = argparse.Namespace(ranks=[1, 2, 4], mode=None, steps=list(range(1, NUM_STEPS + 1)), points=False)
    names = {case.name for case in cases(asked)}
    alone = MODES.keys() - set(NEED_RANKS)
    steps = range(1, 31)
    wanted = {f"{mode}/1//loop.step@{step},rank0" for mode in alone for step in steps}
    for ranks in (2, 4):
        for transport in ("one_sided", "collective"):
            kind = f"{ranks}/{transport}"
            wanted |= {f"{mode}/{kind}/loop.step@{step},rank{step % ranks}" for mode in MODES for step in steps}
    assert names == wanted

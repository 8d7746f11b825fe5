"""Tensor-train, tiered and dense tables together: a pipeline trains the model of the loop in turn, to the bit."""

from dataclasses import replace

import pytest
import torch

from rowmesh import TableSpec
from rowmesh.tables import TensorTrain, Tiers
from rowmesh.tables.update_rules import SGD, AdaGrad, Adam
from tests.collection.test_equivalence import assert_close
from tests.pipeline.test_pipeline import assert_same, whole
from tests.support.scenario import Scenario
from tests.support.training import train_reference

CORES = {"storage": "tensor_train", "tensor_train": TensorTrain(rank=2)}
TABLES = (
    TableSpec(name="page", num_rows=900, dim=16, features=("page", "link"), optimizer=AdaGrad(lr=0.1), **CORES),
    TableSpec(name="user", num_rows=400, dim=16, features=("user", "friend"), storage="tiered"),
    TableSpec(name="word", num_rows=500, dim=8, pooling="mean", optimizer=Adam(lr=0.01), **CORES),
    TableSpec(name="item", num_rows=300, dim=3, storage="tiered", optimizer=Adam(lr=0.1)),
    TableSpec(name="tag", num_rows=7, dim=16, pooling="mean", optimizer=SGD(lr=0.1)),
)
DOUBLE = tuple(replace(table, dtype=torch.float64) for table in TABLES)
SIZES = [(9,), (7, 5)]
FAST = {((9,), 1, 2), ((9,), 3, 4), ((7, 5), 2, 1), ((7, 5), 3, 4)}


def make_scenario(batch_sizes, folder=None, **options):
    """Five steps; fast memory has room for the rows of few batches."""
    room = 150 if len(batch_sizes) == 1 else 110
    tiers = Tiers(fast_share=0.01, fast_rows=room, folder=folder, verify=True, poison=True, timeout_s=20.0)
    return Scenario(tables=TABLES, batch_sizes=batch_sizes, num_steps=5, decay=0.9, tiers=tiers, **options)


def in_turn(scenario, micro_batches):
    """The plain loop, or the same micro-batches and parts in turn, over dense rows in place of tiered ones."""
    tables = tuple(replace(table, storage="dense") if table.storage == "tiered" else table for table in scenario.tables)
    options = {"depth": 0, "overlap": False, "micro_batches": micro_batches}
    is_plain = micro_batches == 1 and scenario.accumulate == 1
    return replace(scenario, tables=tables, tiers=None, pipeline=None if is_plain else options)


@pytest.mark.parametrize(
    "batch_sizes, micro_batches, depth",
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for sizes in SIZES
        for count in (1, 2, 3)
        for depth in range(5)
        for case in [(sizes, count, depth)]
    ],
)
def test_any_depth_is_the_loop_in_turn(ranks, tmp_path, batch_sizes, micro_batches, depth):
    scenario = make_scenario(batch_sizes, tmp_path, evaluates=True)
    options = {"depth": depth, "micro_batches": micro_batches, "verify": True}
    mine = whole(ranks, replace(scenario, pipeline=options))
    assert_same(mine, whole(ranks, in_turn(scenario, micro_batches)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changes", [{"max_norm": 0.3}, {"accumulate": 2}, {"pauses": (2,)}, {"breaks": (1, 3)}])
@pytest.mark.parametrize("batch_sizes", SIZES)
@pytest.mark.slow
def test_what_else_a_loop_does(ranks, batch_sizes, changes):
    """Clipping by the norm of rows and cores, accumulation, a pause, a loop that is left and begun again."""
    scenario = make_scenario(batch_sizes, **changes)
    mine = whole(ranks, replace(scenario, pipeline={"depth": 3, "micro_batches": 1, "verify": True}))
    assert_same(mine, whole(ranks, in_turn(scenario, 1)))


@pytest.mark.parametrize("batch_sizes", SIZES)
@pytest.mark.slow
def test_it_trains_the_reference(ranks, batch_sizes):
    scenario = replace(make_scenario(batch_sizes), tables=DOUBLE, pipeline={"depth": 4, "micro_batches": 3})
    assert_close(scenario, whole(ranks, scenario), train_reference(scenario))

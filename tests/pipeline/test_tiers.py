"""Tiered tables train the same model, through a pipeline and without, however small their fast memory is."""

from dataclasses import replace

import pytest
import torch

from rowmesh import Mesh, TableSpec
from rowmesh.optim import SGD, Adam
from rowmesh.tables import Tiers
from tests.support.scenario import Scenario
from tests.support.training import merged, train

DENSE = (
    TableSpec(name="user", num_rows=400, dim=4, features=("user", "friend"), dtype=torch.float64),
    TableSpec(name="tag", num_rows=7, dim=4, pooling="mean", dtype=torch.float64, optimizer=SGD(lr=0.1)),
    TableSpec(name="item", num_rows=300, dim=3, dtype=torch.float64, optimizer=Adam(lr=0.1)),
)
TIERED = tuple(replace(table, storage="tiered") for table in DENSE)
MIXED = (TIERED[0], DENSE[1], TIERED[2])


def run(ranks, scenario):
    if scenario.world_size == 1:
        return merged(scenario, [train(Mesh(), scenario)])
    return merged(scenario, ranks.run(train, scenario, "collective", world_size=scenario.world_size))


def assert_equal(mine, theirs):
    assert mine.losses == theirs.losses
    for a, b in zip(mine.outputs, theirs.outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    for name, rows in mine.rows.items():
        torch.testing.assert_close(rows, theirs.rows[name], rtol=0, atol=0)
        for state, values in mine.state[name].items():
            torch.testing.assert_close(values, theirs.state[name][state], rtol=0, atol=0)


@pytest.mark.parametrize("batch_sizes", [(9,), (7, 5), (4, 0, 6, 3)])
@pytest.mark.parametrize("tables", [TIERED, MIXED], ids=["tiered", "mixed"])
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "file"])
def test_tiers_change_nothing(ranks, tmp_path, batch_sizes, tables, on_disk):
    scenario = Scenario(tables=DENSE, batch_sizes=batch_sizes, num_steps=6, evaluates=True)
    plain = run(ranks, scenario)
    tiers = Tiers(fast_share=0.01, fast_rows=130, folder=tmp_path if on_disk else None, verify=True, poison=True)
    tiered = replace(scenario, tables=tables, tiers=tiers)
    assert_equal(run(ranks, tiered), plain)
    for depth in (0, 1, 2):
        piped = replace(tiered, pipeline={"depth": depth, "verify": True})
        assert_equal(run(ranks, piped), plain)
    assert list(tmp_path.iterdir()) == []


def test_a_batch_waits_for_the_room_of_the_one_before(ranks):
    """Two batches do not fit into fast memory together, so that the next is brought when this one is updated."""
    scenario = Scenario(tables=DENSE, batch_sizes=(40, 40), bag_sizes=(2, 3), skew=1.0, num_steps=6)
    tiers = Tiers(fast_share=0.01, fast_rows=160, timeout_s=20.0)
    tiered = replace(scenario, tables=TIERED, tiers=tiers, pipeline={"depth": 1})
    assert_equal(run(ranks, tiered), run(ranks, replace(scenario, pipeline={"depth": 0})))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_micro_batches_over_tiers_are_those_over_dense_rows(ranks, depth):
    options = {"depth": depth, "micro_batches": 3, "sizes": "light_ends", "clustering": "greedy"}
    scenario = Scenario(tables=DENSE, batch_sizes=(9, 8), num_steps=6, pipeline=options)
    tiers = Tiers(fast_share=0.01, fast_rows=150, poison=True)
    assert_equal(run(ranks, replace(scenario, tables=TIERED, tiers=tiers)), run(ranks, scenario))

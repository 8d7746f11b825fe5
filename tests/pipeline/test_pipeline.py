"""Pipeline: trains the model of the plain loop, whatever moves when."""

from dataclasses import replace

import pytest
import torch

from rowmesh import Mesh, TableSpec
from rowmesh.optim import SGD, Adam
from tests.support.scenario import Scenario
from tests.support.training import merged, train, train_reference

TABLES = (
    TableSpec(name="user", num_rows=40, dim=4, features=("user", "friend"), dtype=torch.float64),
    TableSpec(name="tag", num_rows=7, dim=4, pooling="mean", dtype=torch.float64, optimizer=SGD(lr=0.1)),
    TableSpec(name="item", num_rows=100, dim=3, dtype=torch.float64, optimizer=Adam(lr=0.1)),
    TableSpec(name="word", num_rows=9, dim=4, pooling="none", dtype=torch.float64),
)


def run(ranks, scenario, transport="collective"):
    if scenario.world_size == 1:
        return merged(scenario, [train(Mesh(), scenario)])
    return merged(scenario, ranks.run(train, scenario, transport, world_size=scenario.world_size))


def assert_same(mine, theirs, tolerance=0.0):
    for kind in ("losses", "outputs", "head"):
        for a, b in zip(getattr(mine, kind), getattr(theirs, kind), strict=True):
            torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=tolerance, atol=tolerance)
    for name, rows in mine.rows.items():
        torch.testing.assert_close(rows, theirs.rows[name], rtol=tolerance, atol=tolerance)
        for state, values in mine.state[name].items():
            torch.testing.assert_close(values, theirs.state[name][state], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("transport", ["collective", "one_sided"])
@pytest.mark.parametrize("batch_sizes", [(9,), (7, 5), (4, 0, 6, 3)])
def test_a_pipeline_of_one_batch_is_the_plain_loop(ranks, batch_sizes, transport):
    scenario = Scenario(tables=TABLES, batch_sizes=batch_sizes, num_steps=5, decay=0.9)
    plain = run(ranks, scenario, transport)
    for depth in (0, 1, 3):
        assert_same(run(ranks, replace(scenario, pipeline={"depth": depth}), transport), plain)


@pytest.mark.parametrize("form", ["unsplit", "naive", "delta"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_micro_batches_train_the_reference(ranks, form, depth):
    options = {"depth": depth, "micro_batches": 3, "exchange": form, "verify": True}
    scenario = Scenario(tables=TABLES, batch_sizes=(9, 8), num_steps=5, pipeline=options, evaluates=True)
    reference = train_reference(scenario)
    mine = run(ranks, scenario)
    mine.outputs = [mine.outputs[i] for i in range(len(mine.outputs))]
    assert_same(mine, reference, 1e-10)

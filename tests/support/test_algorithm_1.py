"""The transcription of Algorithm 1: what it must equal where another program is known to be right."""

from dataclasses import replace

import pytest
import torch

from rowmesh.tables import TableSpec, Uniform
from rowmesh.tables.update_rules import RULES, SGD, AdaGrad, Adam, RowWiseAdaGrad
from tests.support.algorithm_1 import Algorithm1, train_algorithm_1
from tests.support.scenario import Scenario
from tests.support.training import train_reference

MAKE = {
    "sgd": SGD(lr=0.3),
    "adagrad": AdaGrad(lr=0.1, eps=0.1),
    "row_wise_adagrad": RowWiseAdaGrad(lr=0.1, eps=0.1),
    "adam": Adam(lr=0.05, eps=0.1),
}


def tables(rule, dtype=torch.float64):
    """A shared table, every pooling, a table of one row."""
    options = {"optimizer": MAKE[rule], "dtype": dtype, "initializer": Uniform(bound=1.0)}
    return (
        TableSpec(name="user", num_rows=50, dim=3, features=("user", "friend"), **options),
        TableSpec(name="tag", num_rows=7, dim=3, pooling="mean", **options),
        TableSpec(name="day", num_rows=1, dim=5, **options),
        TableSpec(name="history", num_rows=40, dim=4, pooling="none", **options),
    )


def assert_equal_jobs(mine, theirs, tolerance=1e-12):
    torch.testing.assert_close(
        [mine.losses, mine.outputs, mine.head, mine.rows, mine.state],
        [theirs.losses, theirs.outputs, theirs.head, theirs.rows, theirs.state],
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_weighted": True, "evaluates": True}, {"accumulate": 2, "decay": 0.5}],
    ids=lambda o: "-".join(o),
)
def test_one_group_is_the_plain_loop(rule, options):
    scenario = Scenario(tables=tables(rule), batch_sizes=(5, 0, 3), num_steps=4, **options)
    assert_equal_jobs(train_algorithm_1(scenario, 1), train_reference(scenario))


@pytest.mark.parametrize("together", ["shards", "replicas"])
def test_averaging_sgd_is_the_plain_loop(together):
    """The average of the groups' steps is a step along the average of their gradients."""
    scenario = Scenario(tables=tables("sgd"), batch_sizes=(3, 3, 3, 3), num_steps=4)
    mixed = {"user": 2, "tag": 4, "day": 1, "history": 2}
    for replicas in (2, 4, mixed):
        assert_equal_jobs(train_algorithm_1(scenario, replicas, together=together), train_reference(scenario))


def test_averaging_adagrad_is_not():
    scenario = Scenario(tables=tables("adagrad"), batch_sizes=(3, 3), num_steps=2)
    rows, plain = train_algorithm_1(scenario, 2).rows["user"], train_reference(scenario).rows["user"]
    assert float((rows - plain).abs().max()) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_groups_are_on_their_own_between_synchronizations(rule):
    """Up to the first synchronization, each group is a job of its own."""
    scenario = Scenario(tables=tables(rule), batch_sizes=(4, 4), num_steps=3)
    often, rare, never = (train_algorithm_1(scenario, 2, sync_every=every).rows["user"] for every in (1, 3, 100))
    assert torch.equal(rare, never), "the end synchronizes in any case"
    assert not torch.allclose(often, rare, rtol=1e-6)


def test_bfloat16_rows_are_rounded_after_each_change():
    scenario = Scenario(tables=tables("row_wise_adagrad", torch.bfloat16), batch_sizes=(3, 3))
    for rows in train_algorithm_1(scenario, 2).rows.values():
        assert torch.equal(rows, rows.bfloat16().float())


@pytest.mark.parametrize("moment_scale, c", [(None, 2.0), (1.0, 1.0), (1.5, 1.5)])
def test_two_groups_by_hand(moment_scale, c):
    """Row 0 is named by both groups, row 1 by the second, row 2 by none."""
    algorithm = Algorithm1(
        torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], dtype=torch.float64),
        RowWiseAdaGrad(lr=0.5, eps=0.25, moment_scale=moment_scale),
        num_groups=2,
    )
    gradients = [torch.tensor([[1.0, 3.0], [9, 9], [9, 9]]), torch.tensor([[-2.0, 2.0], [4.0, 0.0], [9, 9]])]
    touched = [torch.tensor([True, False, False]), torch.tensor([True, True, False])]
    algorithm.iterate([g.double() for g in gradients], touched)
    rate = {v: 0.5 / ((v / c) ** 0.5 + 0.25) for v in (5, 4, 8)}
    expected = torch.tensor(
        [
            [1 - (rate[5] * 1 - rate[4] * 2) / 2, 1 - (rate[5] * 3 + rate[4] * 2) / 2],
            [2 - rate[8] * 4 / 2, 2.0],
            [3.0, 3.0],
        ],
        dtype=torch.float64,
    )
    for weights, moments in zip(algorithm.weights, algorithm.moments, strict=True):
        torch.testing.assert_close(weights.detach(), expected)
        torch.testing.assert_close(moments["sum"], torch.tensor([4.5, 4.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("rule", MAKE.values(), ids=lambda rule: rule.name)
def test_groups_that_agree_are_one(rule):
    """To the bit, with M a power of two, and c = 1."""
    rule = rule if isinstance(rule, SGD) else replace(rule, moment_scale=1.0)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(9, 3, generator=generator)
    one, four = Algorithm1(start, rule, 1), Algorithm1(start, rule, 4, sync_every=2)
    for _ in range(5):
        gradient, touched = torch.randn(9, 3, generator=generator), torch.rand(9, generator=generator) < 0.7
        one.iterate([gradient], [touched])
        four.iterate([gradient] * 4, [touched] * 4)
    for weights, moments in zip(four.weights, four.moments, strict=True):
        assert torch.equal(weights, one.weights[0])
        assert all(torch.equal(moments[name], one.moments[0][name]) for name in rule.state)

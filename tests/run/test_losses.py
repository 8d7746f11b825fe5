"""Losses are summed whole, and one that is not finite is found late but named right."""

import math

import pytest
import torch

from rowmesh.run.checks import DivergedError
from rowmesh.run.losses import Losses

CPU = torch.device("cpu")


def test_on_a_cpu_every_loss_is_known_at_once():
    losses = Losses(CPU)
    assert [losses.add(torch.tensor(x), "step") for x in (1.5, 2.0)] == [1.5, 2.0]
    assert losses.rest() == 0.0
    with pytest.raises(DivergedError, match=r"^step 3 on rank 0: the loss is nan; lower optimizer\.lr"):
        losses.add(torch.tensor(math.nan), "step 3 on rank 0")


def test_behind_a_device_losses_come_late_and_each_once():
    losses = Losses(CPU, lag=2)
    known = [losses.add(torch.tensor(float(x)), "") for x in (1, 2, 4, 8)]
    assert known == [0.0, 0.0, 1.0, 2.0]
    assert losses.rest() == 12.0
    assert losses.rest() == 0.0


def test_a_loss_is_kept_as_it_was():
    """Memory of a loss may be written again before the host looks."""
    losses, loss = Losses(CPU, lag=1), torch.tensor(3.0)
    losses.add(loss, "")
    loss.zero_()
    assert losses.rest() == 3.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_step_that_diverged_is_named_and_not_a_later_one(value):
    losses = Losses(CPU, lag=2)
    for step, loss in enumerate([1.0, value, value], 1):
        losses.add(torch.tensor(loss), f"step {step}")
    with pytest.raises(DivergedError, match=f"^step 2: the loss is {value};"):
        losses.rest()
    losses = Losses(CPU, lag=2)
    losses.add(torch.tensor(value), "step 1")
    losses.add(torch.tensor(1.0), "step 2")
    with pytest.raises(DivergedError, match=r"^step 1: the loss is"):
        losses.add(torch.tensor(1.0), "step 3")


def test_a_device_is_not_waited_for():
    losses = Losses(torch.device("cuda"))  # reads none of these
    assert {losses.add(torch.tensor(math.nan), "") for _ in range(5)} == {0.0}

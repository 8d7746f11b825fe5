"""The factor on every learning rate, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rowmesh.run.config import ScheduleConfig


def factor(schedule: ScheduleConfig, step: int, total_steps: int | None) -> float:
    """The factor for a step, counted from 0.

    A linear rise over the warm-up, to 1 at its last step; then constant, or a fall along a line or half
    a cosine that reaches `final` at the run's last step.

    >>> linear = ScheduleConfig(name="linear", warmup_steps=2)
    >>> [factor(linear, step, 7) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    assert total_steps is not None, "a fall needs an end; checked before the run"
    progress = min((step - warmup) / max(total_steps - warmup - 1, 1), 1.0)
    if schedule.name == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2.0
    return 1.0 - (1.0 - schedule.final) * progress


def make_scheduler(schedule: ScheduleConfig, optimizer: Optimizer, total_steps: int | None) -> LambdaLR:
    """The schedule on an optimizer, dense or EmbeddingOptimizer alike."""
    return LambdaLR(optimizer, lambda step: factor(schedule, step, total_steps))


def go_on(scheduler: LambdaLR, state: Mapping[str, Any]) -> None:
    """Takes over what the `state_dict` of a schedule with the same factors gave, of as many groups or others."""
    if len(state["base_lrs"]) == len(scheduler.base_lrs):
        scheduler.load_state_dict(dict(state))
        return
    scheduler.last_epoch, scheduler._step_count = state["last_epoch"], state["_step_count"]
    for group, base, factor_of in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor_of(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]

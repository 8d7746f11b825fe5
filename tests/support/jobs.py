"""Training jobs that hypothesis draws."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import torch

from tests.support.plans import in_groups, random_plans
from tests.support.scenario import Scenario
from tests.support.tables import OPTIMIZERS, table


@st.composite
def random_jobs(draw, world_size):
    """Jobs without a plan, on tables of mixed sizes, precisions, poolings and optimizers."""
    dtypes = draw(st.sampled_from([[torch.float32, torch.bfloat16], [torch.float64]]))
    tables = tuple(
        table(
            f"t{index}",
            draw(st.sampled_from([1, 2, 5, 30, 3000])),
            draw(st.sampled_from([3, 16])),
            draw(st.sampled_from(list(OPTIMIZERS))),
            pooling=draw(st.sampled_from(["sum", "mean", "none"])),
            dtype=draw(st.sampled_from(dtypes)),
        )
        for index in range(draw(st.integers(1, 4)))
    )
    return Scenario(
        tables=tables,
        batch_sizes=tuple(draw(st.lists(st.integers(0, 6), min_size=world_size, max_size=world_size))),
        skew=draw(st.sampled_from([1.0, 3.0, 1e9])),
        num_steps=draw(st.integers(1, 4)),
        accumulate=draw(st.sampled_from([1, 2])),
        evaluates=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def pipelined_jobs(draw, world_size, **options):
    """Jobs whose batches share many rows or none, with a schedule of learning rates and options of a pipeline."""
    sizes = st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size)
    fewest = draw(st.integers(0, 2))
    drawn = {
        "depth": draw(st.integers(0, 4)),
        "joins": draw(st.sampled_from([None, False, True])),
        "micro_batches": draw(st.sampled_from([1, 2, 3, 6])),
        "exchange": draw(st.sampled_from(["delta", "delta", "unsplit", "naive"])),
        "final_rows": draw(st.booleans()),
        "sizes": draw(st.sampled_from(["even", "light_ends"])),
        "clustering": draw(st.sampled_from(["off", "greedy", "light_ends"])),
        "verify": draw(st.booleans()),
        "overlap": draw(st.sampled_from([True, True, False])),
    }
    return replace(
        draw(random_jobs(world_size)),
        accumulate=1,
        num_steps=draw(st.integers(1, 5)),
        batch_sizes=tuple(draw(sizes)),
        last_sizes=tuple(draw(sizes)),
        bag_sizes=(fewest, fewest + draw(st.integers(0, 2))),
        is_weighted=draw(st.booleans()),
        sharing=draw(st.sampled_from(["any", "none", "hot"])),
        decay=draw(st.sampled_from([1.0, 0.7])),
        pipeline=drawn | options,
    )


@st.composite
def placed(draw, scenario):
    """The job with a plan of any kind, on hosts of two ranks or on one."""
    if scenario.world_size == 1:
        return scenario
    per_node = (
        draw(st.sampled_from([1, scenario.world_size]))
        if scenario.world_size == 2
        else draw(st.sampled_from([2, scenario.world_size]))
    )
    scenario = replace(scenario, ranks_per_node=per_node if per_node < scenario.world_size else None)
    kind = draw(st.sampled_from(["cyclic", "cyclic", "any", "replicas"]))
    if kind == "any":
        return replace(scenario, plan=draw(random_plans(scenario.tables, scenario.world_size, per_node)))
    if kind == "replicas":
        mode = draw(st.sampled_from(["exact", "average"]))
        return in_groups(scenario, 2, mode=mode)
    return scenario

"""Training jobs that hypothesis draws."""

from __future__ import annotations

import hypothesis.strategies as st
import torch

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

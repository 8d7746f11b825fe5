"""Whatever goes together on a device, drawn at random: the CPU's model, and in a pipeline that of the loop in turn."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh.tables import Tiers
from tests.collection.test_equivalence import assert_close, assert_same_bits
from tests.support.jobs import placed
from tests.support.scenario import Scenario
from tests.support.tables import OPTIMIZERS, table
from tests.support.training import train
from tests.support.triton import kernels_of
from tests.test_tensor_train_tables import cored

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.triton, pytest.mark.slow]
kernels_of("tensor_train")  # or all are skipped
IN_TURN = {"depth": 0, "overlap": False, "exchange": "unsplit"}


@st.composite
def some_tables(draw):
    """One to three tables, each stored in its own way."""
    tables = []
    for index in range(draw(st.integers(1, 3))):
        storage = draw(st.sampled_from(["dense", "dense", "tensor_train", "tiered"]))
        rows, dim = draw(st.sampled_from([1, 5, 30])), draw(st.sampled_from([3, 4]))
        common = {"pooling": draw(st.sampled_from(["sum", "mean", "none"])), "dtype": torch.float64}
        if storage == "tensor_train":
            made = cored(
                f"t{index}", rows, dim, draw(st.sampled_from(["sgd", "adagrad", "adam"])), rank=1 + rows // 30, **common
            )
        else:
            made = table(f"t{index}", rows, dim, draw(st.sampled_from(list(OPTIMIZERS))), storage=storage, **common)
        tables.append(made)
    return tuple(tables)


@st.composite
def mixtures(draw, world_size):
    """A job and its transport."""
    sizes = st.lists(st.integers(0, 4), min_size=world_size, max_size=world_size)
    options = {
        "depth": draw(st.integers(0, 2)),
        "micro_batches": draw(st.sampled_from([1, 2, 3])),
        "exchange": draw(st.sampled_from(["delta", "delta", "unsplit"])),
        "final_rows": draw(st.booleans()),
    }
    is_piped = draw(st.booleans())
    num_steps = draw(st.integers(1, 4))
    scenario = Scenario(
        tables=draw(some_tables()),
        batch_sizes=tuple(draw(sizes)),
        last_sizes=tuple(draw(sizes)),
        bag_sizes=draw(st.sampled_from([(0, 2), (1, 1)])),
        sharing=draw(st.sampled_from(["any", "none", "hot"])),
        is_weighted=draw(st.booleans()),
        num_steps=num_steps,
        accumulate=1 if is_piped else draw(st.sampled_from([1, 2])),
        evaluates=draw(st.booleans()),
        pipeline=options if is_piped else None,
        plain=tuple(draw(st.sets(st.integers(0, num_steps - 1), max_size=1))) if is_piped else (),
        tiers=Tiers(fast_share=0.001, fast_rows=60, verify=True, poison=True, timeout_s=20.0),
        seed=draw(st.integers(0, 1000)),
    )
    if all(each.storage == "dense" for each in scenario.tables):
        scenario = draw(placed(scenario))
    return scenario, draw(st.sampled_from(["auto", "one_sided"]))


def check(mesh, scenario, transport):
    """A device beside the CPU, and a pipeline there beside the loop in turn."""
    device = f"cuda:{mesh.rank}" if NUM_GPUS > 1 else "cuda"
    found = train(mesh, scenario, transport, device)
    if scenario.pipeline is not None:
        in_turn = replace(scenario, pipeline=scenario.pipeline | IN_TURN)
        assert_same_bits(found, train(mesh, in_turn, transport, device))
    assert_close(scenario, found, train(mesh, scenario, "auto" if mesh.world_size == 1 else "collective"))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_mixture(ranks, world_size):
    @settings(max_examples=40)
    @given(data=st.data())
    def some(data):
        scenario, transport = data.draw(mixtures(world_size))
        if world_size == 1 or scenario.ranks_per_node or NUM_GPUS == 1:
            transport = "auto"  # several hosts, or ranks that share a GPU, cannot read each other
        ranks.run(check, scenario, transport, world_size=world_size)

    some()

"""Dynamic shards whose index is on a device decide as the rules say: on the GPU where there is one, or interpreted."""

import numpy as np
import pytest
from hypothesis import given, settings

from rowmesh.ops.dynamic_index.device import DeviceIndexes
from rowmesh.tables.dynamic.shards import DynamicShards, shape_of
from tests.support.triton import find_device, kernels_of
from tests.tables.dynamic import test_shards
from tests.tables.dynamic.test_shards import BATCHES, INT64, RULES

pytestmark = pytest.mark.triton
kernels_of("dynamic_index")  # or all are skipped

HERE = [rules for rules in RULES if not {"ttl_steps", "ttl_seconds"} & {*rules} and rules.get("eviction") != "score"]


class OnDevice(DynamicShards):
    """The shards of a table that is alone."""

    def __init__(self, table, rules, shards, num_frames):
        indexes = DeviceIndexes([shape_of(table, rules, shards, num_frames)], find_device())
        super().__init__(table, rules, shards, num_frames, indexes.tables[0])


def drawn(num_steps):
    """Steps with new ids, and more than fit; one is loaded anew."""
    rng = np.random.default_rng(3)
    edges, steps = np.array([0, -1, INT64.min, INT64.max]), []
    for step in range(num_steps):
        ids = np.unique(np.concatenate([rng.choice(edges, 1), rng.integers(0, 25, 5)])).tolist()
        steps.append(({i: (int(rng.choice([1, 1, 2, 2**62])), 0) for i in ids}, 1, step == num_steps - 2))
    return steps


@pytest.mark.parametrize("options", HERE, ids=str)
def test_decides_as_the_rules_say(options):
    test_shards.check(options, drawn(7), 11, kind=OnDevice)


@pytest.mark.slow
@pytest.mark.parametrize("options", HERE, ids=str)
@settings(max_examples=30)
@given(batches=BATCHES)
def test_decides_as_the_rules_say_over_many_streams(options, batches):
    test_shards.check(options, batches, 7, kind=OnDevice)

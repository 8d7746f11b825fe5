"""Jobs whose rows are on devices."""

from __future__ import annotations

from tests.support.training import merged, train
from tests.test_plans import assert_equal


def train_on_device(ranks, scenario, transport="auto"):
    """What each rank left; all copies and replicas of a row are equal to the bit."""
    parts = ranks.run(train, scenario, transport, "cuda", world_size=scenario.world_size)
    assert_equal(scenario, parts, merged(scenario, parts))
    return parts

"""What a dynamic table's rules refuse, and how capacity is split."""

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.tables.dynamic import Dynamic


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": True}, "capacity"),
        ({"initial_capacity": 101}, "initial_capacity"),
        ({"shards": 101}, "shards"),
        ({"admit_after": 0}, "admit_after"),
        ({"sketch_depth": 0}, "sketch_depth"),
        ({"window_steps": -1}, "window_steps"),
        ({"sketch_width": 8}, "admit_after"),
        ({"eviction": "fifo"}, "eviction"),
        ({"eviction": "ttl"}, "ttl_steps"),
        ({"decay_steps": 5}, "decay_steps"),
        ({"mode": "keep"}, "mode"),
        ({"mode": "demote"}, "needs a slower tier"),
        ({"missing": "none"}, "missing"),
    ],
)
def test_wrong_values_are_named(options, named):
    with pytest.raises(ConfigurationError, match=named):
        Dynamic(**{"capacity": 100, **options})


def test_the_first_shards_hold_one_more():
    rules = Dynamic(capacity=11, shards=4)
    assert [rules.shard_capacity(shard) for shard in range(4)] == [3, 3, 3, 2]

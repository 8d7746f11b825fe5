"""What a dynamic table's rules refuse, and how capacity is split."""

import pytest
import torch

from rowmesh.errors import ConfigurationError
from rowmesh.tables import TableSpec, Uniform
from rowmesh.tables.dynamic.spec import Dynamic
from rowmesh.tables.update_rules import Adam


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": True}, "capacity"),
        ({"capacity_bytes": 100}, "give one of them"),
        ({"capacity": None}, "give one of them"),
        ({"capacity": None, "capacity_bytes": 0}, "capacity_bytes"),
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
        ({"mode": "demote"}, 'needs a store: give store = "memory"'),
        ({"mode": "demote", "store": "file:here"}, "give store_capacity"),
        ({"mode": "demote", "store": "memory", "store_capacity": 0}, "store_capacity"),
        ({"mode": "demote", "store": "redis://h", "store_capacity": 3, "shards": 4}, "below its 4 shards"),
        ({"store": "memory"}, 'leave with mode = "demote"'),
        ({"missing": "none"}, "missing"),
    ],
)
def test_wrong_values_are_named(options, named):
    with pytest.raises(ConfigurationError, match=named):
        Dynamic(**{"capacity": 100, **options})


def test_the_first_shards_hold_one_more():
    rules = Dynamic(capacity=11, shards=4)
    assert [rules.shard_capacity(shard) for shard in range(4)] == [3, 3, 3, 2]


def _table(rules, **options):
    return TableSpec(name="t", storage="dynamic", dynamic=rules, initializer=Uniform(bound=0.1), **options)


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [(torch.float32, 4 + 8), (torch.bfloat16, 2 + 8), (torch.float64, 8 + 16)]
)
def test_bytes_are_of_rows_with_their_state(dtype, row_bytes):
    table = _table(Dynamic(capacity_bytes=300 * row_bytes * 8 - 1), dim=8, dtype=dtype, optimizer=Adam(lr=0.1))
    assert (table.num_rows, table.dynamic) == (299, Dynamic(capacity=299))
    assert _table(Dynamic(capacity_bytes=20 * 8), dim=1).num_rows == 20  # row-wise AdaGrad has one number a row


def test_bytes_that_hold_no_row_are_refused_by_name():
    with pytest.raises(ConfigurationError, match="table 't': capacity_bytes = 11 holds no row: one takes 12 bytes"):
        _table(Dynamic(capacity_bytes=11), dim=2)
    with pytest.raises(ConfigurationError, match="table 't': a dynamic table of capacity 2 cannot have 3 shards"):
        _table(Dynamic(capacity_bytes=24, shards=3), dim=2)

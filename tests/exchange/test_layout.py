"""Layout: descriptors of features in a batch, and when they are made anew."""

import pytest
import torch

from rowmesh.errors import ConfigurationError, DataError
from rowmesh.exchange.layout import Layouts
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec, fuse

TABLES = [
    TableSpec(name="a", num_rows=9, dim=3, features=("a", "b"), pooling="mean"),
    TableSpec(name="c", num_rows=9, dim=5),
    TableSpec(name="s", num_rows=9, dim=3, pooling="none"),
]
BEGIN, END, OFFSETS, BAG_SIZE, NUM_BAGS, FIRST_CELL, STRIDE, MEAN = range(8)


@pytest.fixture
def layouts():
    return Layouts(fuse(TABLES), {"a": 0, "b": 3, "c": 6}, 11)


def test_jagged_features_in_any_order(layouts):
    bags = {"c": [[1], []], "s": [[1, 2], [3]], "b": [[], [4, 5, 6]], "a": [[7], [8]]}
    batch = SparseBatch.from_bags(bags)
    mean, wide, sequence = layouts(batch)
    assert mean.features[:, [BEGIN, END]].tolist() == [[7, 9], [4, 7]]  # a, b
    assert mean.features[:, [FIRST_CELL, STRIDE, MEAN]].tolist() == [[0, 11, 1], [3, 11, 1]]
    assert mean.features[:, OFFSETS].tolist() == [batch.offsets.data_ptr() + 8 * 6, batch.offsets.data_ptr() + 8 * 4]
    assert wide.features[0, [BEGIN, END, NUM_BAGS, FIRST_CELL, STRIDE, MEAN]].tolist() == [0, 1, 2, 6, 11, 0]
    assert sequence.features.tolist() == [[1, 4, 0, 1, 3, 0, 3, 0]]
    assert [layout.num_ids for layout in (mean, wide, sequence)] == [5, 1, 3]
    assert [layout.is_weighted for layout in (mean, wide, sequence)] == [True, False, False]


def test_equal_bags_are_laid_out_once(layouts):
    names = ("a", "b", "c", "s")
    first = layouts(SparseBatch.from_dense(names, torch.zeros(4, 6, 2, dtype=torch.int64)))
    assert layouts(SparseBatch.from_dense(names, torch.ones(4, 6, 2, dtype=torch.int64))) is first
    assert first[0].features[:, [BAG_SIZE, NUM_BAGS, OFFSETS]].tolist() == [[2, 6, 0]] * 2
    for other in (torch.zeros(4, 5, 2), torch.zeros(4, 6, 3)):
        assert layouts(SparseBatch.from_dense(names, other.long())) is not first
    weighted = layouts(SparseBatch.from_dense(names, torch.zeros(4, 6, 2, dtype=torch.int64), torch.ones(4, 6, 2)))
    assert all(layout.is_weighted for layout in weighted)
    one_hot = layouts(SparseBatch.from_dense(names, torch.zeros(4, 6, dtype=torch.int64)))
    assert not any(layout.is_weighted for layout in one_hot)  # the mean of one row is the row


def test_looking_at_the_offsets_of_equal_bags_changes_nothing(layouts):
    """They are derived at the first look and kept; the layout of such a batch still depends on its shape alone."""
    batch = SparseBatch.from_dense(("a", "b", "c", "s"), torch.zeros(4, 6, dtype=torch.int64))
    first = layouts(batch)
    assert len(batch.offsets) == 25
    assert layouts(batch) is first


def test_shapes_that_never_repeat_do_not_pile_up(layouts):
    for size in range(300):
        layouts(SparseBatch.from_dense(("a", "b", "c", "s"), torch.zeros(4, size, dtype=torch.int64)))
    assert len(layouts._cache) < 100


@pytest.mark.parametrize(
    "features, message",
    [
        (
            ("A", "b", "c", "s"),
            r"lacks features \['a'\] \(did you mean 'A' in the batch\?\); it has \['A', 'b', 'c', 's'\]",
        ),
        (("b", "c", "s"), r"lacks features \['a'\]; it has"),
        (("a", "b", "c", "s", "S"), r"features \['S'\] of the batch .*\(the nearest is 's', which the batch has too\)"),
        (("a", "b", "c", "s", "age_of_user"), r"features \['age_of_user'\] of the batch belong to no table; leave"),
    ],
)
def test_features_that_do_not_match_are_named_with_the_nearest(layouts, features, message):
    with pytest.raises(DataError, match=message):
        layouts(SparseBatch.from_dense(features, torch.zeros(len(features), 6, dtype=torch.int64)))


def test_cells_have_32_bits():
    layouts = Layouts(fuse([TableSpec(name="a", num_rows=9, dim=1024)]), {"a": 0}, 1024)
    num_bags = 2**22
    batch = SparseBatch(("a",), torch.zeros(0, dtype=torch.int64), num_bags, bag_size=0)
    with pytest.raises(
        ConfigurationError,
        match=r"group dim1024_\w+: 4,194,304 samples with 1,024 elements each .*at most 4,194,303 samples",
    ):
        layouts(batch)


def test_cells_of_sequences_have_32_bits_too():
    """An output has one row an id, however few samples there are."""
    (group,) = fuse([TableSpec(name="s", num_rows=9, dim=1024, pooling="none")])
    layouts = Layouts([group], {}, 0)
    layouts._check_size(group, 1, 2**22 - 1)
    with pytest.raises(ConfigurationError, match=r"4,194,304 ids of features \['s'\] .*at most 4,194,303 ids"):
        layouts._check_size(group, 1, 2**22)

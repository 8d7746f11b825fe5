"""Clusters of samples: to the bit as the reference has them, of the sizes asked for, and worth having."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from rowmesh.ops.cluster import MAX_MICRO_BATCHES, cluster, reference


def keys_and_counts(ids):
    _, keys, counts = torch.unique(torch.as_tensor(ids, dtype=torch.int64), return_inverse=True, return_counts=True)
    return keys.flatten().int(), counts.int()


def cut(batch_size, bounds):
    """Sizes that add up: the distances between sorted bounds."""
    inner = sorted(bound % (batch_size + 1) for bound in bounds)
    return np.diff([0, *inner, batch_size]).tolist()


@st.composite
def jagged(draw):
    num_features, batch_size = draw(st.integers(1, 4)), draw(st.integers(0, 40))
    most, seed = draw(st.sampled_from([1, 3, 50])), draw(st.integers(0, 99))
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, draw(st.sampled_from([1, 2, 5])) + 1, num_features * batch_size)
    keys, counts = keys_and_counts(generator.integers(0, most, lengths.sum()))
    sizes = cut(batch_size, draw(st.lists(st.integers(0, 40), max_size=8)))
    return keys, torch.tensor([0, *lengths.cumsum().tolist()]), counts, sizes


@given(jagged(), st.integers(1, 6), st.booleans())
def test_equals_the_reference(case, slack, light_ends):
    keys, offsets, counts, sizes = case
    mine = cluster(keys, offsets, counts, sizes, slack=slack, light_ends=light_ends)
    theirs = reference.cluster(keys, offsets, counts, sizes, slack=slack, light_ends=light_ends)
    assert mine.dtype == theirs.dtype == torch.int64
    assert mine.tolist() == theirs.tolist()


@pytest.mark.parametrize("num_micro_batches", [1, 2, 7, MAX_MICRO_BATCHES])
@pytest.mark.parametrize("batch_size", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("light_ends", [False, True])
def test_equal_bags_equal_the_reference_at_odd_sizes(num_micro_batches, batch_size, light_ends):
    generator = torch.Generator().manual_seed(batch_size)
    keys, counts = keys_and_counts(torch.randint(50, (3 * batch_size * 2,), generator=generator) ** 2 // 40)
    sizes = [batch_size // num_micro_batches + (m < batch_size % num_micro_batches) for m in range(num_micro_batches)]
    mine = cluster(keys, 2, counts, sizes, light_ends=light_ends)
    assert mine.tolist() == reference.cluster(keys, 2, counts, sizes, light_ends=light_ends).tolist()
    offsets = torch.arange(3 * batch_size + 1) * 2
    assert mine.tolist() == cluster(keys, offsets, counts, sizes, light_ends=light_ends).tolist()
    assert sorted(mine.tolist()) == list(range(batch_size))


@pytest.mark.parametrize("shared", [254, 255, 256, 600])
def test_counters_stop_where_the_reference_stops(shared):
    """The third sample shares 255 rows with the first and `shared` with the second, whose micro-batch is emptier."""
    first, second = list(range(255)), list(range(1000, 1000 + shared))
    bags = [first, second, first + second, [5], [1000]]
    keys, counts = keys_and_counts([key for bag in bags for key in bag])
    offsets = torch.tensor([0, *np.cumsum([len(bag) for bag in bags]).tolist()])
    mine = cluster(keys, offsets, counts, [2, 3])
    assert mine.tolist() == reference.cluster(keys, offsets, counts, [2, 3]).tolist()
    assert (2 in mine[:2].tolist()) == (shared == 254)


def test_samples_of_one_kind_meet():
    """Eight kinds of samples that share nothing, interleaved: every micro-batch gets one kind."""
    kinds = torch.arange(8).repeat(32)
    keys, counts = keys_and_counts(torch.stack([kinds, 100 + kinds, 1000 + torch.arange(256)]).flatten())
    parts = cluster(keys, 1, counts, [32] * 8).view(8, 32)
    assert all(len(set(kinds[part].tolist())) == 1 for part in parts)


def test_order_within_a_micro_batch_is_that_of_the_batch():
    keys, counts = keys_and_counts(torch.randint(20, (400,), generator=torch.Generator().manual_seed(0)))
    parts = cluster(keys, 1, counts, [10, 150, 200, 40], light_ends=True).split([10, 150, 200, 40])
    assert all(torch.equal(part, part.sort().values) for part in parts)


def test_light_ends_have_the_rows_that_others_share():
    """Samples 40 … 59 ask for one common row, the others for one of their own each."""
    ids = torch.arange(100)
    ids[40:60] = 1000
    keys, counts = keys_and_counts(ids)
    first, middle, last = cluster(keys, 1, counts, [5, 80, 15], light_ends=True).split([5, 80, 15])
    assert {*first.tolist(), *last.tolist()} == set(range(40, 60))
    assert len(middle) == 80


@pytest.mark.parametrize("slack", [1, 3, 9])
def test_is_ahead_of_its_share_by_the_slack_at_most(slack):
    """All samples are equal, so each wants to go where the first went; the bound alone makes them spread."""
    keys, counts = keys_and_counts(torch.zeros(90))
    sizes = [30, 60]
    parts = torch.ones(90, dtype=torch.int64)
    parts[cluster(keys, 1, counts, sizes, slack=slack)[:30]] = 0
    for part, size in enumerate(sizes):
        taken = (parts == part).cumsum(0).tolist()
        assert all(count <= i * size // 90 + slack for i, count in enumerate(taken))
    expected = next(i for i in range(90) if i >= i * 30 // 90 + slack)
    assert parts[: expected + 1].tolist() == [0] * expected + [1]


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"keys": torch.zeros(4, dtype=torch.int64)}, TypeError, "int32, got torch.int64"),
        ({"sizes": []}, ValueError, "1 to 64 sizes"),
        ({"sizes": [-1, 5]}, ValueError, r"0 or more each, got \[-1, 5\]"),
        ({"sizes": [1] * 65}, ValueError, "1 to 64 sizes"),
        ({"sizes": [3]}, ValueError, "4 bags are not as many for each of the 3 samples"),
        ({"sizes": [0]}, ValueError, "4 bags are not as many for each of the 0 samples"),
        ({"slack": 0}, ValueError, "slack must be 1 or more, got 0"),
        ({"bags": 3}, ValueError, "4 keys do not make bags of 3"),
        ({"bags": 0}, ValueError, "4 keys do not make bags of 0"),
        ({"bags": torch.tensor([0, 3])}, ValueError, "from 0 to the number of keys, 4"),
        ({"bags": torch.tensor([0, 5, 4])}, ValueError, "must not decrease"),
        ({"counts": torch.ones(2, dtype=torch.int32)}, IndexError, r"\[0, 2\), the number of counts; got 0 to 3"),
        ({"keys": torch.tensor([0, -1, 0, 0]).int()}, IndexError, "got -1 to 0"),
    ],
)
def test_refuses_what_does_not_fit(changes, error, message):
    fits = {"keys": torch.arange(4).int(), "bags": 1, "counts": torch.ones(4, dtype=torch.int32), "sizes": [2, 2]}
    with pytest.raises(error, match=message):
        cluster(**(fits | changes))


def test_does_not_follow_the_default_device():
    keys, counts = keys_and_counts([1, 2, 1, 2])
    with torch.device("meta"):
        assert cluster(keys, 1, counts, [2, 2]).tolist() == [0, 2, 1, 3]

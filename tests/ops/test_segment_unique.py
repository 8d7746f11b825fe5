"""Segment unique against its reference, and the hash table's life over many batches."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from rowmesh.ops.segment_unique import cpu, reference, segment_unique

KEYS = st.one_of(st.integers(0, 5), st.integers(0, 10_000), st.integers(-(2**63), 2**63 - 1))


def concatenated(segments):
    ids = torch.tensor([key for segment in segments for key in segment], dtype=torch.int64)
    offsets = torch.tensor([0, *np.cumsum([len(segment) for segment in segments]).tolist()], dtype=torch.int64)
    return ids, offsets


def assert_same(actual, expected):
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.tolist() == theirs.tolist()


@given(segments=st.lists(st.lists(KEYS, max_size=40), max_size=6))
def test_equals_the_reference(segments):
    ids, offsets = concatenated(segments)
    assert_same(segment_unique(ids, offsets), reference.segment_unique(ids, offsets))


@pytest.mark.parametrize("num_ids", [0, 1, 257, 5000])
@pytest.mark.parametrize("distinct", [1, 100, 10**9])
def test_sizes(num_ids, distinct):
    generator = torch.Generator().manual_seed(num_ids)
    ids = torch.randint(distinct, (3 * num_ids,), generator=generator)
    offsets = torch.tensor([0, num_ids, num_ids, 3 * num_ids])
    assert_same(segment_unique(ids, offsets), reference.segment_unique(ids, offsets))


@pytest.mark.parametrize("spread", [1, 2**32])
def test_runs_of_new_and_of_known_ids(spread):
    """Ids that are new and ids that are known come in runs, by which the loop is chosen; some share their low half."""
    generator = torch.Generator().manual_seed(spread)
    runs = [torch.arange(700), torch.randint(700, (900,), generator=generator), torch.arange(700, 1100)]
    runs += [torch.randint(4000, (2500,), generator=generator), torch.zeros(600, dtype=torch.int64)]
    ids = torch.cat(runs) * spread % (2**63 - 25)
    offsets = torch.tensor([0, 1000, len(ids)])
    assert_same(segment_unique(ids, offsets), reference.segment_unique(ids, offsets))


def call(table, ids, offsets, segments):
    """Through addresses, as routing calls it: ranges in descriptors of 64 bytes, several of one segment."""
    ranges = np.zeros((len(segments), 8), np.int64)
    ranges[:, 0], ranges[:, 1] = offsets[:-1], offsets[1:]
    segments, ids = np.array(segments, np.int64), np.array(ids, np.int64)
    unique, counts = np.full(len(ids), -7), np.full(len(ids), 77, np.uint32)
    inverse, unique_offsets = np.full(len(ids), 77, np.uint32), np.full(len(table._bits) + 1, -7)
    table(
        ids.ctypes.data,
        ranges.ctypes.data,
        64,
        segments.ctypes.data,
        len(segments),
        unique.ctypes.data,
        counts.ctypes.data,
        inverse.ctypes.data,
        unique_offsets.ctypes.data,
    )
    found = unique_offsets[-1]
    return unique[:found].tolist(), counts[:found].tolist(), inverse.tolist(), unique_offsets.tolist()


@given(batches=st.lists(st.lists(st.lists(KEYS, max_size=30), min_size=4, max_size=4), min_size=1, max_size=5))
def test_one_table_serves_many_batches(batches):
    """Two segments are addressed directly (few rows), one is hashed; segment 1 has two features, 2 has none."""
    table = cpu.SegmentHash([7, 5000, 0, 10**6])
    for ranges in batches:
        ids, offsets = concatenated(ranges)
        segments = [0, 1, 1, 3]
        merged, merged_offsets = concatenated([ranges[0], ranges[1] + ranges[2], [], ranges[3]])
        unique, inverse, unique_offsets, counts = reference.segment_unique(merged, merged_offsets)
        expected = (unique.tolist(), counts.tolist(), inverse.tolist(), unique_offsets.tolist())
        assert call(table, ids.tolist(), offsets.tolist(), segments) == expected


def test_keys_that_share_their_low_half_stay_apart():
    """Cells hold half a key; the other half must be compared too, also in a table that is addressed directly."""
    keys = [5, 5 + 2**32, 5 - 2**32, 5, 5 + 2**32, 5 - 2**63]
    unique, counts, inverse, offsets = call(cpu.SegmentHash([100]), keys, [0, len(keys)], [0])
    assert unique == [5, 5 + 2**32, 5 - 2**32, 5 - 2**63]
    assert (counts, inverse, offsets) == ([2, 2, 1, 1], [0, 1, 2, 0, 1, 3], [0, 4])


def test_refuses_what_does_not_fit():
    with pytest.raises(TypeError, match=r"int64.*int32"):
        segment_unique(torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="from 0 to the number of ids, 1"):
        segment_unique(torch.tensor([1]), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="must not decrease"):
        segment_unique(torch.tensor([1, 2]), torch.tensor([0, 2, 1, 2]))


def test_takes_views():
    ids = torch.arange(10)[::2]
    assert segment_unique(ids, torch.tensor([0, 5]))[0].tolist() == [0, 2, 4, 6, 8]


def test_does_not_follow_the_default_device():
    ids, offsets = torch.tensor([5, 3, 5]), torch.tensor([0, 3])
    with torch.device("meta"):
        actual = segment_unique(ids, offsets)
    assert_same(actual, reference.segment_unique(ids, offsets))

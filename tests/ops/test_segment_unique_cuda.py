"""Segment unique on a GPU, or as Triton interprets it, against its reference: equal to the bit, in the same order."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh.ops.segment_unique import reference
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda = kernels_of("segment_unique")
KEYS = st.one_of(st.integers(0, 5), st.integers(2**40, 2**40 + 9), st.integers(-(2**63), 2**63 - 1))
POISON = -7


def concatenated(segments):
    ids = torch.tensor([key for segment in segments for key in segment], dtype=torch.int64)
    sizes = torch.tensor([0, *(len(segment) for segment in segments)])
    return ids, sizes.cumsum(0)


def poisoned(num_ids, num_segments, device):
    out = cuda.Unique.empty(num_ids, num_segments, device)
    for tensor in (out.unique, out.inverse, out.offsets, out.counts):
        tensor.fill_(POISON)
    return out


def check(device, segments, scratch=None):
    ids, offsets = concatenated(segments)
    out = poisoned(ids.numel(), len(segments), device)
    cuda.segment_unique(ids.to(device), offsets.to(device), scratch=scratch, out=out)
    unique, inverse, unique_offsets, counts = reference.segment_unique(ids, offsets)
    found = unique.numel()
    assert out.num_unique.tolist() == [found]
    assert out.offsets.tolist() == unique_offsets.tolist()
    assert out.inverse.tolist() == inverse.tolist()
    assert out.unique.tolist() == unique.tolist() + [POISON] * (ids.numel() - found)
    assert out.counts.tolist() == counts.tolist() + [POISON] * (ids.numel() - found)


@settings(max_examples=25)
@given(segments=st.lists(st.lists(KEYS, max_size=12), min_size=1, max_size=5))
def test_equals_the_reference(device, segments):
    check(device, segments)


@pytest.mark.parametrize(
    "segments",
    [
        [[]],
        [[], [], []],
        [[], [4], []],
        [[4] * 300],  # more than a program's ids, all of one cell
        [[1, 2], [], [2, 1], [], []],
        [[-1, 2**63 - 1, -(2**63), 2**31 - 1, -(2**31)] * 2],  # whatever marks an empty cell is an id as well
        [list(range(150)) + list(range(149, -1, -1))],
    ],
)
def test_hard_cases(device, segments):
    check(device, segments)


def test_ids_past_the_last_segment_are_left_out(device):
    """Of a list whose length stays on the device, the rest is anything."""
    ids, offsets = torch.arange(40) % 5, torch.tensor([0, 1, 4])
    out = poisoned(40, 2, device)
    cuda.segment_unique(ids.to(device), offsets.to(device), out=out)
    assert out.offsets.tolist() == [0, 1, 4]
    assert out.unique.tolist() == [0, 1, 2, 3] + [POISON] * 36
    assert out.inverse.tolist() == [0, 1, 2, 3] + [POISON] * 36
    assert out.counts.tolist() == [1] * 4 + [POISON] * 36


@pytest.mark.parametrize("num_ids", range(5))
def test_scratch_is_aligned_whatever_the_batch(device, num_ids):
    cells, *others = cuda.Scratch(8, device).split(num_ids)
    assert not any((part.data_ptr() - cells.data_ptr()) % 16 for part in others)


def home(key, size):
    """Where the search for a key begins in a part of `size` cells: the hash written once more."""
    h = key % 2**64
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ h >> 33) * factor % 2**64
    return ((h ^ h >> 33) >> 32) * size >> 32


def test_ids_that_collide_in_the_last_cell_go_round(device):
    """All of a segment's ids begin in the last cell of its part, and must not leave it."""
    count = 20
    last = [key for key in range(10_000) if home(key, 2 * count) == 2 * count - 1][:count]
    assert len(last) == count
    check(device, [[1, 2, 3], last, [4, 5, 6]])


def test_the_prefix_sum_crosses_programs_and_blocks(device, monkeypatch):
    """As with more than two million ids: each of a few programs takes several blocks, and the last one is partial."""
    monkeypatch.setattr(cuda, "MOST_PROGRAMS", 4)
    monkeypatch.setattr(cuda, "_BLOCK", 64)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(200, (601,), generator=generator).tolist()
    check(device, [ids[:130], ids[130:131], [], ids[131:]])


def test_scratch_and_results_are_reused(device):
    scratch = cuda.Scratch(40, device)
    for segments in ([[1, 2, 1] * 10, [5] * 10], [[7, 8]], [[], [9, 9, 9]]):
        check(device, segments, scratch)


def test_refuses_what_does_not_fit(device):
    ids, offsets = torch.tensor([1, 2], device=device), torch.tensor([0, 2], device=device)
    with pytest.raises(TypeError, match="ids must be int64, got int32"):
        cuda.segment_unique(ids.int(), offsets)
    with pytest.raises(ValueError, match="one segment at least"):
        cuda.segment_unique(ids, offsets[:1])
    with pytest.raises(ValueError, match="scratch for 1 ids was given 2"):
        cuda.segment_unique(ids, offsets, scratch=cuda.Scratch(1, device))
    with pytest.raises(ValueError, match=r"out\.unique must have 2 elements, got 3"):
        cuda.segment_unique(ids, offsets, out=cuda.Unique.empty(3, 1, device))
    with pytest.raises(ValueError, match="up to 1,073,741,823 ids"):
        cuda.Scratch(2**30, device)

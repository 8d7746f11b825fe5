"""Copied offsets are checked after they are copied, against the reference."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from rowmesh.ops.copy_offsets import check_offsets, copy_offsets, reference


@given(st.lists(st.integers(-3, 40), min_size=1, max_size=30), st.integers(0, 40), st.booleans())
def test_the_kernel_agrees_with_the_reference(values, num_ids, is_sorted):
    source = torch.tensor([0, *sorted(values)] if is_sorted else values)
    out, expected = torch.empty_like(source), torch.empty_like(source)
    num_ids = int(source[-1]) if is_sorted else num_ids
    assert copy_offsets(source, num_ids, out) == reference.copy_offsets(source, num_ids, expected)
    assert out.tolist() == source.tolist()
    assert check_offsets(source, num_ids) == reference.copy_offsets(source, num_ids, expected)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=100), st.data())
def test_one_wrong_offset_is_enough(lengths, data):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    out = torch.empty_like(offsets)
    assert copy_offsets(offsets, int(offsets[-1]), out)
    wrong = data.draw(st.integers(0, len(offsets) - 1))
    num_ids = int(offsets[-1])
    offsets[wrong] = data.draw(st.sampled_from([-1, num_ids + 1, 1 << 62]))
    assert not copy_offsets(offsets, num_ids, out)
    assert not check_offsets(offsets, num_ids)

"""Average over groups against its reference; values that all groups share stay as they are."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.ops.average import cpu, kernels, mark, reference
from rowmesh.ops.merge_update import Merger
from rowmesh.ops.simd import STORAGE

NUM_ROWS = 12


def average(old, told, own, into_table=True):
    """What the kernel makes of the table of group `own`, which has its own rows in place already."""
    dim, size = old.shape[1], old.shape[1] * old.dtype.itemsize
    slots = [part.to(torch.uint32) for part, _ in told]
    offsets = [np.array([0, len(part)]) for part in slots]
    merger = Merger(1)
    sources = [(s.data_ptr(), o.ctypes.data, r.data_ptr()) for s, o, (_, r) in zip(slots, offsets, told, strict=True)]
    merger(sources, size, sum(map(len, slots)))
    table = old.clone()
    before = old[told[own][0]]
    table[told[own][0]] = told[own][1]
    entries = np.cumsum([0, *map(len, slots)])
    where = np.array([*zip([rows.data_ptr() for _, rows in told] + [0], entries, strict=True)], np.int64)
    out = torch.empty(merger.num_merged, dim, dtype=old.dtype)
    kernels(dim, STORAGE[old.dtype]).average(
        merger.merged_slots, merger.heads, merger.nexts, merger.num_merged, where.ctypes.data, len(told), own,
        before.data_ptr(), table.data_ptr(), 0 if into_table else out.data_ptr(),
    )  # fmt: skip
    if not into_table:
        merged = np.ctypeslib.as_array(
            (np.ctypeslib.ctypes.c_uint32 * merger.num_merged).from_address(merger.merged_slots)
        )
        table[torch.from_numpy(merged.astype(np.int64))] = out
    return table


@settings(deadline=None, max_examples=60)
@given(
    num_groups=st.integers(1, 7),
    dim=st.sampled_from([1, 3, 16, 20]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 10**6),
    into_table=st.booleans(),
)
def test_equals_the_reference_on_every_group(num_groups, dim, dtype, seed, into_table):
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(NUM_ROWS, dim, generator=generator).to(dtype)
    told = []
    for _ in range(num_groups):
        slots = torch.randperm(NUM_ROWS, generator=generator)[: int(torch.randint(NUM_ROWS, (), generator=generator))]
        told.append((slots, torch.randn(len(slots), dim, generator=generator).to(dtype)))
    expected = reference.average(old, told)
    results = [average(old, told, own, into_table) for own in range(num_groups)]
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
        assert torch.equal(result, results[0])  # groups stay equal to the bit
    untouched = sorted(set(range(NUM_ROWS)) - {int(slot) for slots, _ in told for slot in slots})
    assert torch.equal(results[0][untouched], old[untouched])


@pytest.mark.parametrize("num_groups", [2, 3, 5, 7, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mean_of_equal_values_is_the_value(num_groups, dtype):
    old = torch.randn(NUM_ROWS, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    new = torch.randn(NUM_ROWS, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    told = [(torch.arange(NUM_ROWS), new)] * num_groups
    assert torch.equal(average(old, told, own=0), new)


def test_marks_tell_what_is_new():
    marks = np.zeros(10, np.uint8)
    slots, out = np.array([7, 3, 5, 3], np.uint32), np.zeros(4, np.uint32)
    assert mark(slots.ctypes.data, 0, 2, marks, out.ctypes.data) == 2
    assert mark(slots.ctypes.data, 1, 4, marks, out.ctypes.data) == 1
    assert out[0] == 5
    assert marks.nonzero()[0].tolist() == [3, 5, 7]


def test_put():
    table = torch.zeros(6, 3)
    rows = torch.arange(6.0).view(2, 3)
    slots = torch.tensor([4, 1], dtype=torch.uint32)
    cpu.kernels(3, STORAGE[torch.float32]).put(slots.data_ptr(), 2, rows.data_ptr(), table.data_ptr())
    assert torch.equal(table[[4, 1]], rows)
    assert table.abs().sum() == rows.sum()

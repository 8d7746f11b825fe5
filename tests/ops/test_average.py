"""Average over groups against its reference; values that all groups share stay as they are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.ops import average as op
from rowmesh.ops.average import reference
from rowmesh.ops.merge_update import Merger, merge
from tests.support.memory import Poisoned

NUM_ROWS = 12


def average(old, sent, own, into_table=True):
    """What the kernel makes of the table of group `own`, which has its own rows in place already."""
    slots, rows = [part.to(torch.uint32) for part, _ in sent], [rows for _, rows in sent]
    merged = merge(slots, into=Merger(1))
    table = old.clone()
    before = old[sent[own][0]]
    table[sent[own][0]] = sent[own][1]
    ends = torch.tensor([0, *map(len, slots)]).cumsum(0)
    out = None if into_table else torch.empty(merged.num_merged, old.shape[1], dtype=old.dtype)
    op.average(table, merged, rows if own % 2 else [torch.cat(rows)], ends, own, before, out)
    if out is not None:
        op.put(table, torch.from_numpy(merged.slots), out)
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
    sent = []
    for _ in range(num_groups):
        slots = torch.randperm(NUM_ROWS, generator=generator)[: int(torch.randint(NUM_ROWS, (), generator=generator))]
        sent.append((slots, torch.randn(len(slots), dim, generator=generator).to(dtype)))
    expected = reference.average(old, sent)
    results = [average(old, sent, own, into_table) for own in range(num_groups)]
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
        assert torch.equal(result, results[0])  # groups stay equal to the bit
    untouched = sorted(set(range(NUM_ROWS)) - {int(slot) for slots, _ in sent for slot in slots})
    assert torch.equal(results[0][untouched], old[untouched])


@pytest.mark.parametrize("num_groups", [2, 3, 5, 7, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mean_of_equal_values_is_the_value(num_groups, dtype):
    old = torch.randn(NUM_ROWS, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    new = torch.randn(NUM_ROWS, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    sent = [(torch.arange(NUM_ROWS), new)] * num_groups
    assert torch.equal(average(old, sent, own=0), new)


@settings(max_examples=30)
@given(steps=st.lists(st.lists(st.integers(0, 19), unique=True, max_size=8), max_size=4), skipped=st.integers(0, 2))
def test_lists_what_is_touched_and_what_it_was(steps, skipped):
    """Some steps between two synchronizations: slots in order of their first touch, rows as they were then."""
    table = torch.arange(40.0).view(20, 2)
    marks, kept = torch.zeros(20, dtype=torch.uint8), Poisoned(torch.float32, 40, 2)
    listed, bounds = torch.zeros(40, dtype=torch.uint32), torch.zeros(2, dtype=torch.int64)
    expected, before, merger = [], [], Merger(1)
    for touched in steps:
        merged = merge([torch.tensor(touched, dtype=torch.uint32)], into=merger)
        touched = touched[skipped:]
        bounds = op.mark(merged, marks, bounds, listed, (min(skipped, merged.num_merged), merged.num_merged))
        op.pack(table, listed, bounds, kept.tensor, most=len(touched))
        new = [slot for slot in touched if slot not in expected]
        before += [table[slot].tolist() for slot in new]
        expected += new
        assert bounds.tolist() == [len(expected) - len(new), len(expected)]
        table[touched] += 100
    assert listed.tolist()[: len(expected)] == expected
    assert kept.result()[: len(expected)].tolist() == before
    assert kept.result()[len(expected) :].isnan().all()
    assert marks.nonzero().flatten().tolist() == sorted(expected)
    bounds[0] = 0
    op.clear(listed, bounds, marks, most=40)
    assert not marks.any()


def test_put():
    table = torch.zeros(6, 3)
    rows = torch.arange(6.0).view(2, 3)
    op.put(table, torch.tensor([4, 1], dtype=torch.uint32), rows)
    assert torch.equal(table[[4, 1]], rows)
    assert table.abs().sum() == rows.sum()

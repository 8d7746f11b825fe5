"""Average in Triton against its reference; values that all groups share stay as they are; marks and lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.ops.average import reference
from tests.support.memory import Poisoned
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda, merging = kernels_of("average"), kernels_of("merge")

NUM_ROWS = 12


def average(device, old, sent, own, into_table=True):
    """What the kernel makes of the table of group `own`, which has its own rows in place already."""
    slots, rows = torch.cat([slots for slots, _ in sent]).to(device), torch.cat([rows for _, rows in sent]).to(device)
    ends = torch.tensor([0, *(len(part) for part, _ in sent)], device=device).cumsum(0)
    table = old.clone()
    table[sent[own][0]] = sent[own][1]
    table, before = table.to(device), old[sent[own][0]].to(device)
    merged = merging.merge(slots)
    out = None if into_table else torch.full_like(rows, torch.nan)
    cuda.average(table, merged, rows, ends, own, before, out)
    if out is not None:
        assert out[int(merged.num) :].isnan().all()
        cuda.put(table, merged.slots, out, merged.num)
    return table.cpu()


@settings(max_examples=15)
@given(
    num_groups=st.integers(1, 5),
    dim=st.sampled_from([1, 3, 20]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 10**6),
    into_table=st.booleans(),
)
def test_equals_the_reference_on_every_group(device, num_groups, dim, dtype, seed, into_table):
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(NUM_ROWS, dim, generator=generator).to(dtype)
    sent = []
    for _ in range(num_groups):
        slots = torch.randperm(NUM_ROWS, generator=generator)[: int(torch.randint(NUM_ROWS, (), generator=generator))]
        sent.append((slots, torch.randn(len(slots), dim, generator=generator).to(dtype)))
    expected = reference.average(old, sent)
    results = [average(device, old, sent, own, into_table) for own in range(num_groups)]
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
        assert torch.equal(result, results[0])  # groups stay equal to the bit
    untouched = sorted(set(range(NUM_ROWS)) - {int(slot) for slots, _ in sent for slot in slots})
    assert torch.equal(results[0][untouched], old[untouched])


@pytest.mark.parametrize("num_groups, dtype", [(3, torch.float32), (7, torch.float64), (11, torch.bfloat16)])
def test_the_mean_of_equal_values_is_the_value(device, num_groups, dtype):
    old = torch.randn(NUM_ROWS, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    new = torch.randn(NUM_ROWS, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    sent = [(torch.arange(NUM_ROWS), new)] * num_groups
    assert torch.equal(average(device, old, sent, own=0), new)


@pytest.mark.parametrize("into_table", [True, False])
def test_few_programs_for_many_rows(device, into_table, monkeypatch):
    monkeypatch.setattr(cuda, "MOST_PROGRAMS", 2)
    monkeypatch.setattr(cuda, "tile_of_rows", lambda dim, dtype: (4, 2))
    old = torch.randn(NUM_ROWS, 3)
    sent = [(torch.arange(11), torch.randn(11, 3)), (torch.tensor([7, 11]), torch.randn(2, 3))]
    torch.testing.assert_close(average(device, old, sent, own=1, into_table=into_table), reference.average(old, sent))


@settings(max_examples=15)
@given(steps=st.lists(st.lists(st.integers(0, 19), unique=True, max_size=8), max_size=4), spare=st.integers(0, 2))
def test_lists_what_is_touched_and_what_it_was(device, steps, spare):
    """Some steps between two synchronizations: slots in order of their first touch, rows as they were then."""
    table = torch.arange(40.0, device=device).view(20, 2)
    marks, kept = torch.zeros(20, dtype=torch.uint8, device=device), Poisoned(torch.float32, 40, 2, device=device)
    listed, bounds = Poisoned(torch.int64, 40, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    expected, before = [], []
    for touched in steps:
        slots = torch.tensor(touched + [7] * spare, dtype=torch.int64, device=device)
        count = torch.tensor([len(touched)], dtype=torch.int32, device=device)
        bounds = cuda.mark(slots, count, marks, bounds[1:], listed.tensor)
        cuda.pack(table, listed.tensor, bounds, kept.tensor, most=len(slots))
        new = [slot for slot in touched if slot not in expected]
        before += [table[slot].tolist() for slot in new]
        expected += new
        assert bounds.tolist() == [len(expected) - len(new), len(expected)]
        table[touched] += 100
    assert listed.result()[: len(expected)].tolist() == expected
    assert listed.result()[len(expected) :].eq(-7).all()
    assert kept.result()[: len(expected)].tolist() == before
    assert kept.result()[len(expected) :].isnan().all()
    assert marks.nonzero().flatten().tolist() == sorted(expected)
    cuda.clear(listed.tensor, torch.stack([torch.zeros_like(bounds[1]), bounds[1]]), marks, most=40)
    assert not marks.any()


def test_puts_as_many_as_are_valid(device):
    table, rows = torch.zeros(6, 3, device=device), torch.arange(9.0, device=device).view(3, 3)
    cuda.put(table, torch.tensor([4, 1, 2], device=device), rows, torch.tensor([2], device=device))
    assert torch.equal(table[[4, 1]], rows[:2])
    assert table.sum() == rows[:2].sum()

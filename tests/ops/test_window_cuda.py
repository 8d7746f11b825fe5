"""The intersection of key sets on a GPU, or as Triton interprets it, against its reference; and what it is for."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh.ops.window import reference
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda = kernels_of("window")
SETS = st.lists(st.one_of(st.integers(0, 30), st.integers(2**40, 2**40 + 9)), max_size=40, unique=True).map(sorted)
POISON = -7


@settings(max_examples=25)
@given(keys=SETS, others=SETS, spare=st.integers(0, 5))
def test_equals_the_reference(device, keys, others, spare):
    """What stands behind the valid keys is neither read as a key nor written to."""
    padded = [torch.tensor(part + [2**40] * spare, dtype=torch.int64, device=device) for part in (keys, others)]
    counts = [torch.tensor([len(part)], dtype=torch.int32, device=device) for part in (keys, others)]
    out = torch.full((len(keys) + spare,), POISON, dtype=torch.int32, device=device)
    cuda.intersect(*padded, *counts, out=out)
    assert out.tolist() == reference.intersect(keys, others) + [POISON] * spare


@pytest.mark.parametrize("step", [1, 2, 3000])
def test_more_keys_than_a_program_takes(device, step, monkeypatch):
    monkeypatch.setattr(cuda, "MOST_PROGRAMS", 2)  # which go on to further keys
    keys, others = torch.arange(2500, device=device), torch.arange(0, 6000, step, device=device)
    expected = reference.intersect(keys.tolist(), others.tolist())
    assert cuda.intersect(keys, others).tolist() == expected


def test_rows_fetched_ahead_are_brought_up_to_date(device):
    """The use: rows of the next batch that this one changed are copied over, the others stay."""
    gather = kernels_of("gather").gather
    here, ahead = torch.tensor([3, 4, 8], device=device), torch.tensor([1, 3, 8, 9], device=device)
    changed, fetched = torch.randn(3, 6, device=device), torch.randn(4, 6, device=device)
    expected = torch.stack([fetched[0], changed[0], changed[2], fetched[3]])
    assert torch.equal(gather(changed, cuda.intersect(ahead, here), fetched), expected)


def test_refuses_what_does_not_fit(device):
    keys = torch.tensor([1], device=device)
    with pytest.raises(TypeError, match="others must be int64, got int32"):
        cuda.intersect(keys, keys.int())
    with pytest.raises(ValueError, match="1 keys need as many positions, got 2"):
        cuda.intersect(keys, keys, out=torch.zeros(2, dtype=torch.int32, device=device))

"""Gather against its reference, and rows that 32 bits cannot address."""

import pytest
import torch

from rowmesh.ops.gather import cpu, gather, reference
from rowmesh.ops.simd import BFLOAT16
from tests.support.memory import Poisoned, Vast

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.compiles
@pytest.mark.parametrize("dim", [1, 3, 10, 16, 17, 64, 100, 130, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference(dim, dtype):
    table = torch.randn(11, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    for num_slots in (0, 1, 15, 16, 40):
        slots = torch.randint(11, (num_slots,), generator=torch.Generator().manual_seed(num_slots))
        assert torch.equal(gather(table, slots), reference.gather(table, slots))


def test_keeps_every_bit_pattern_of_bfloat16():
    """Rows pass through float32 registers on the way; infinities, NaN and denormals included."""
    table = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(-1, 16)
    out = gather(table, torch.arange(len(table)))
    assert torch.equal(out.isnan(), table.isnan())
    assert torch.equal(out[~out.isnan()].view(torch.int16), table[~table.isnan()].view(torch.int16))


def test_far_rows():
    """Slots past 2³¹ and bytes past 2³⁴ of a table that is not there but for the pages touched."""
    num_rows = 3 * 2**30
    table = Vast(num_rows * 6).tensor(torch.bfloat16, num_rows, 3)
    far = torch.tensor([0, 2**31 - 1, 2**31, 2**31 + 1, num_rows - 1])
    table[far] = torch.arange(15.0).view(5, 3).bfloat16()
    assert torch.equal(gather(table, far), torch.arange(15.0).view(5, 3).bfloat16())


def test_reply_writes_to_all_who_asked_but_oneself():
    """Requests of three ranks: [4, 2], [2], [2, 9]; the second is this rank."""
    arena = torch.arange(30.0).view(10, 3).bfloat16()
    distinct = torch.tensor([4, 2, 9], dtype=torch.int32)
    heads = torch.tensor([0, 1, 4], dtype=torch.int32)
    nexts = torch.tensor([-1, 2, 3, -1, -1], dtype=torch.int32)
    out = Poisoned(torch.bfloat16, 5, 3)
    cpu.kernels(3, BFLOAT16).reply(
        arena.data_ptr(), distinct.data_ptr(), heads.data_ptr(), nexts.data_ptr(), 3, 2, 3, out.address
    )
    written = out.result()
    assert torch.equal(written[[0, 1, 3, 4]], arena[[4, 2, 2, 9]])
    assert bool(written[2].isnan().all())


def test_refuses_what_does_not_fit():
    table = torch.zeros(4, 3)
    with pytest.raises(IndexError, match=r"\[0, 4\), got -1 to 2"):
        gather(table, torch.tensor([2, -1]))
    with pytest.raises(IndexError, match=r"got 4 to 4"):
        gather(table, torch.tensor([4]))
    with pytest.raises(ValueError, match="contiguous"):
        gather(table.t(), torch.tensor([0]))


def test_does_not_follow_the_default_device():
    table, slots = torch.arange(6.0).view(3, 2), torch.tensor([2, 0])
    with torch.device("meta"):
        out = gather(table, slots)
    assert out.tolist() == [[4.0, 5.0], [0.0, 1.0]]

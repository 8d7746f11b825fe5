"""Gather on a GPU, or as Triton interprets it, against its reference."""

import pytest
import torch

from rowmesh.ops.gather import reference
from tests.support.memory import Poisoned
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda = kernels_of("gather")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dim", [1, 3, 64, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference(device, dim, dtype):
    table = torch.randn(11, dim, generator=torch.Generator().manual_seed(dim)).to(dtype).to(device)
    for num_slots, index in ((0, torch.int64), (1, torch.int32), (40, torch.int64)):
        slots = torch.randint(11, (num_slots,), generator=torch.Generator().manual_seed(num_slots)).to(device, index)
        assert torch.equal(cuda.gather(table, slots), reference.gather(table, slots.long()))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 33, 70, 99])
def test_rows_past_the_count_stay(device, index, count):
    """The count is on the device, and may say more than there are slots."""
    table, slots = torch.randn(9, 5, device=device), torch.arange(70, device=device).to(index) % 9
    out = Poisoned(torch.float32, 70, 5, device=device)
    cuda.gather(table, slots, out.tensor, torch.tensor([count], dtype=index, device=device))
    written = min(count, 70)
    assert torch.equal(out.result()[:written], table[slots[:written].long()])
    assert bool(out.result()[written:].isnan().all())


def test_rows_of_negative_slots_stay(device):
    table, out = torch.randn(9, 5, device=device), Poisoned(torch.float32, 4, 5, device=device)
    cuda.gather(table, torch.tensor([3, -1, 0, -7], device=device), out.tensor)
    assert torch.equal(out.result()[[0, 2]], table[[3, 0]])
    assert bool(out.result()[[1, 3]].isnan().all())


def test_keeps_every_bit_of_bfloat16(device):
    table = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.int16).view(-1, 1024).to(device)
    slots = torch.arange(len(table), device=device)
    assert torch.equal(cuda.gather(table.view(torch.bfloat16), slots).view(torch.int16), table)


@pytest.mark.slow
def test_far_rows(device):
    """Elements past 2³¹ of a table: slots are multiplied with 64 bits."""
    num_rows = 2**25
    table = torch.empty(num_rows, 65, dtype=torch.bfloat16, device=device)  # on a CPU only touched pages cost memory
    far = torch.tensor([0, num_rows - 1, num_rows - 2], dtype=torch.int32, device=device)
    table[far.long()] = torch.arange(3 * 65.0, device=device).view(3, 65).bfloat16()
    assert torch.equal(cuda.gather(table, far), table[far.long()])


def test_refuses_what_does_not_fit(device):
    table, slots = torch.zeros(4, 3, device=device), torch.tensor([0], device=device)
    with pytest.raises(ValueError, match="table must be contiguous"):
        cuda.gather(table.t(), slots)
    with pytest.raises(TypeError, match="slots must be int64 or int32, got int16"):
        cuda.gather(table, slots.short())
    with pytest.raises(ValueError, match=r"out must be \[1, 3\], got \[2, 3\]"):
        cuda.gather(table, slots, torch.zeros(2, 3, device=device))
    with pytest.raises(TypeError, match="out must be float32, got float64"):
        cuda.gather(table, slots, torch.zeros(1, 3, device=device, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("counts", "dim", "spare"), [((3, 2), 64, 0), ((0, 40, 0), 3, 5), ((2, 0, 1, 9, 1), 100, 1), ((0, 0), 5, 4)]
)
def test_gathers_from_the_arenas_of_several_ranks(device, dtype, counts, dim, spare):
    """Rows past the last end stay as they are, whatever their slots and places say."""
    generator = torch.Generator().manual_seed(dim)
    arenas = [torch.randn(4 + rank, dim, generator=generator).to(device, dtype) for rank in range(len(counts))]
    bases = torch.tensor([arena.data_ptr() for arena in arenas], device=device)
    slots = [torch.randint(4 + rank, (count,), generator=generator) for rank, count in enumerate(counts)]
    total = sum(counts)
    order = torch.randperm(total, generator=generator)
    wrong = torch.full((spare,), 2**30)
    out = Poisoned(dtype, total + spare, dim, device=device)
    cuda.gather_from(
        bases,
        torch.tensor(counts, device=device).cumsum(0),
        torch.cat([*slots, wrong]).to(device, torch.int32),
        torch.cat([order, wrong]).to(device, torch.int32),
        out.tensor,
    )
    expected = [arena[of_rank.to(device)] for arena, of_rank in zip(arenas, slots, strict=True)]
    assert torch.equal(out.result()[order.to(device)], torch.cat(expected))
    assert bool(out.result()[total:].isnan().all())


def test_far_rows_of_other_ranks(device):
    """As if the arena began 2³⁸ bytes before the row: slots are multiplied with 64 bits."""
    row, slot = torch.randn(1, 64, device=device), 2**30
    base = torch.tensor([row.data_ptr() - slot * 64 * 4], device=device)
    one, place = torch.ones(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    out = cuda.gather_from(base, one, (one * slot).int(), place, torch.empty_like(row))
    assert torch.equal(out, row)


def test_refuses_arenas_that_do_not_fit(device):
    none = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="2 bases need as many ends, got 1"):
        cuda.gather_from(none, none[:1], none, none.int(), torch.zeros(2, 3, device=device))
    with pytest.raises(TypeError, match="places must be int32, got int64"):
        cuda.gather_from(none, none, none, none, torch.zeros(2, 3, device=device))

"""Pool and its backward on a GPU, or as Triton interprets it, against their references."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh.ops.gpu import compute_dtype
from rowmesh.ops.pool import reference
from rowmesh.ops.pool.handles import Bags
from tests.support.memory import Poisoned
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda, merging, updating = map(kernels_of, ("pool", "merge", "merge_update"))
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@dataclass
class Job:
    """Features over common rows; feature f writes its bags into columns f·D … of the output."""

    device: torch.device
    dim: int
    dtype: torch.dtype
    lengths: list[list[int]]
    num_rows: int = 7
    is_fixed: bool = False
    is_mean: bool = False
    weights: torch.Tensor | None = None

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.dim)
        self.compute = compute_dtype(self.dtype)
        flat = torch.tensor([size for bags in self.lengths for size in bags], dtype=torch.int64)
        self.offsets = torch.cat([flat.new_zeros(1), flat.cumsum(0)])
        self.num_ids, self.num_bags = int(self.offsets[-1]), len(self.lengths[0])
        self.width = len(self.lengths) * self.dim
        self.rows = torch.randn(self.num_rows, self.dim, generator=generator).to(self.dtype)
        self.inverse = torch.randint(self.num_rows, (self.num_ids,), generator=generator, dtype=torch.int32)
        features = [self._describe(f) for f in range(len(self.lengths))]
        offsets, weights = (None if t is None else t.to(self.device) for t in (self.offsets, self.weights))
        self.bags = Bags.describe(features, self.device, None if self.is_fixed else offsets, weights)

    def _describe(self, f):
        begin, end = self.offsets[[f * self.num_bags, (f + 1) * self.num_bags]].tolist()
        bounds, size = (-1, self.lengths[f][0] if self.num_bags else 1) if self.is_fixed else (f * self.num_bags, 0)
        return begin, end, bounds, size, self.num_bags, f * self.dim, self.width, int(self.is_mean)

    @property
    def factors(self):
        if self.weights is None and not self.is_mean:
            return None
        factors = torch.ones(self.num_ids, dtype=torch.float64) if self.weights is None else self.weights.double()
        sizes = torch.repeat_interleave(self.offsets.diff(), self.offsets.diff())
        return (factors / sizes if self.is_mean else factors).to(self.compute)

    def by_bag(self, output):
        """`[B, F·D]` → `[F·B, D]`."""
        return output.view(self.num_bags, len(self.lengths), self.dim).transpose(0, 1).reshape(-1, self.dim)

    def check_forward(self, slots=None):
        out = Poisoned(self.compute, self.num_bags, self.width, device=self.device)
        rows = self.rows
        if slots is not None:
            rows = torch.full((int(slots.max()) + 1, self.dim), float("nan"), dtype=self.dtype)
            rows[slots.long()] = self.rows
            slots = slots.to(self.device)
        cuda.pool(rows.to(self.device), self.inverse.to(self.device), self.bags, out.tensor, slots)
        expected = reference.pool(self.rows.to(self.compute), self.inverse, self.offsets, self.factors)
        assert torch.equal(self.by_bag(out.result().cpu()), expected)

    def check_backward(self, count=None):
        """Sums are in the order of the ids, and products rounded before they are added, so they are bitwise."""
        grad = torch.randn(self.num_bags, self.width, dtype=self.compute, generator=torch.Generator().manual_seed(1))
        filed = cuda.file_cells(self.inverse.to(self.device), self.bags, self.num_rows, self.compute)
        out = Poisoned(self.compute, self.num_rows, self.dim, device=self.device)
        number = None if count is None else torch.tensor([count], device=self.device)
        cuda.backward(grad.to(self.device), filed, out.tensor, number)
        expected = reference.pool_backward(self.by_bag(grad), self.inverse, self.offsets, self.num_rows, self.factors)
        written = self.num_rows if count is None else count
        assert torch.equal(out.result()[:written].cpu(), expected[:written])
        assert bool(out.result()[written:].isnan().all())

    def check_merged(self):
        """The same sums of ids by slot, of which those of rows that occur are made."""
        grad = torch.randn(self.num_bags, self.width, dtype=self.compute, generator=torch.Generator().manual_seed(1))
        merged = merging.merge_numbers(self.inverse.to(self.device))
        filed = cuda.file_merged(merged, self.bags, self.compute)
        out = torch.empty(self.num_ids, self.dim, dtype=self.compute, device=self.device)
        sums = updating.sum_merged(filed, grad.to(self.device), out)[: int(merged.num)]
        expected = reference.pool_backward(self.by_bag(grad), self.inverse, self.offsets, self.num_rows, self.factors)
        assert torch.equal(sums.cpu(), expected[merged.slots[: int(merged.num)].cpu()])


def test_sums_go_on_from_what_is_there(device):
    """Over two parts of a batch they are those of the whole; rows that a part does not have are not even written."""
    job = Job(device, 5, torch.float32, [[1, 2, 4, 2]], num_rows=4)
    job.inverse = torch.tensor([0, 1, 1, 0, 1, 1, 0, 2, 2], dtype=torch.int32)
    grad = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), device="cpu").to(device)
    out = torch.zeros(4, 5, device=device)
    out[3] = float("nan")
    for ids, bags in ((slice(0, 3), slice(0, 2)), (slice(3, 9), slice(2, 4))):
        part = Job(device, 5, torch.float32, [job.lengths[0][bags]], num_rows=4)
        filed = cuda.file_cells(job.inverse[ids].to(device), part.bags, 9).of_first(4)
        cuda.backward(grad[bags].contiguous(), filed, out, adds=True)
    whole = cuda.backward(grad, cuda.file_cells(job.inverse.to(device), job.bags, 4), torch.empty_like(out))
    assert torch.equal(out[:3], whole[:3])
    assert bool(out[3].isnan().all())


@pytest.mark.parametrize("dim", [1, 20, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_fixed", [True, False])
def test_sums(device, dim, dtype, is_fixed):
    job = Job(device, dim, dtype, [[1] * 40, [3] * 40] if is_fixed else [[0, 1, 5, 0], [2, 0, 9, 1]], is_fixed=is_fixed)
    assert not job.bags.has_factors
    job.check_forward()
    job.check_backward()
    job.check_merged()


@pytest.mark.parametrize("weighted", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_factors(device, dtype, weighted):
    lengths = [[3, 1, 0, 6], [0, 2, 2, 1]]
    weights = None if weighted is None else torch.randn(15, dtype=weighted, generator=torch.Generator().manual_seed(2))
    for is_mean in (True, False):
        job = Job(device, 12, dtype, lengths, is_mean=is_mean, weights=weights)
        job.check_forward()
        job.check_backward()
        job.check_merged()


def test_one_id_a_bag_is_copied(device):
    """What is not pooled: every id is a bag of its own, more of them than a program takes."""
    job = Job(device, 64, torch.float32, [[1] * 70], is_fixed=True)
    assert job.bags.is_single
    job.check_forward()
    job.check_backward()
    job.check_merged()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_are_found_by_slot(device, index):
    Job(device, 5, torch.float32, [[2, 0, 3]]).check_forward(torch.tensor([9, 0, 4, 11, 2, 30, 1], dtype=index))


@pytest.mark.parametrize("lengths", [[[]], [[0, 0]], [[0], [0]]])
def test_no_ids(device, lengths):
    job = Job(device, 4, torch.float32, lengths)
    job.check_forward()
    job.check_backward()
    job.check_merged()


@settings(max_examples=12)
@given(
    lengths=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=3),
    num_rows=st.integers(1, 40),
    is_mean=st.booleans(),
)
def test_any_bags(device, lengths, num_rows, is_mean):
    """Rows that do not occur, at the ends and between others, get zero."""
    job = Job(device, 3, torch.float32, lengths, num_rows, is_mean=is_mean)
    job.check_forward()
    job.check_backward(count=num_rows // 2)
    job.check_merged()


def test_rows_of_many_ids_are_summed_in_chunks(device, monkeypatch):
    """Chunks are counted from a row's first id, and added in order: written out here, equal to the bit."""
    monkeypatch.setattr(cuda, "CHUNK", 4)
    counts = [3, 21, 1, 8, 4, 5, 30]
    inverse = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    inverse = inverse[torch.randperm(len(inverse), generator=torch.Generator().manual_seed(0))].to(torch.int32)
    bags = Bags.describe([(0, len(inverse), -1, 1, len(inverse), 0, 2, 0)], device)
    grad = torch.randn(len(inverse), 2, generator=torch.Generator().manual_seed(1))
    filed = cuda.file_cells(inverse.to(device), bags, len(counts))
    sums = cuda.backward(grad.to(device), filed, torch.empty(len(counts), 2, device=device))
    for row, total in enumerate(sums.cpu()):
        chunks = [sum(chunk, torch.zeros(2)) for chunk in grad[inverse == row].split(4)]
        assert torch.equal(total, sum(chunks[1:], chunks[0]))


@pytest.mark.slow
def test_cells_past_two_gigabytes(device):
    """An output of which elements past 2³¹ are written, and a gradient that is read from there."""
    dim, stride = 16, 2**30
    out = torch.empty(2**31 + 64, dtype=torch.float32, device=device)  # on a CPU only touched pages cost memory
    bags = Bags.describe([(0, 3, -1, 1, 3, 0, stride, 0)], device)
    row, inverse = torch.randn(1, dim, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    cuda.pool(row, inverse, bags, out)
    assert all(torch.equal(out[bag * stride : bag * stride + dim], row[0]) for bag in range(3))
    sums = cuda.backward(out, cuda.file_cells(inverse, bags, 1), torch.empty_like(row))
    torch.testing.assert_close(sums, row * 3)


def test_refuses_what_does_not_fit(device):
    bags = Bags.describe([(0, 2, -1, 1, 2, 0, 3, 0)], device, weights=torch.ones(3, device=device))
    rows, inverse = torch.zeros(2, 3, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="2 ids need as many weights, got 3"):
        cuda.pool(rows, inverse, bags, torch.empty_like(rows))
    with pytest.raises(TypeError, match="inverse must be int32, got int64"):
        cuda.pool(rows, inverse.long(), bags, torch.empty_like(rows))
    with pytest.raises(TypeError, match="out must be float32, got bfloat16"):
        cuda.pool(rows.bfloat16(), inverse, bags, rows.bfloat16())
    with pytest.raises(ValueError, match=r"a feature has 8 numbers, got a table of shape \[1, 2\]"):
        Bags.describe([(0, 2)], device)
    filed = cuda.file_cells(inverse, Bags.describe([(0, 2, -1, 1, 2, 0, 3, 0)], device), 2)
    with pytest.raises(ValueError, match="filed under 2 rows, out has 3"):
        cuda.backward(rows, filed, torch.empty(3, 3, device=device))

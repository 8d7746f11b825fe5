"""Pool and its backward against their references: every dim, every storage, every shape of bag."""

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rowmesh.ops import pool as ops
from rowmesh.ops.pool import reference
from rowmesh.ops.pool.cpu import STREAMED_BYTES
from rowmesh.ops.simd import COMPUTE_DTYPE, FLOAT32, STORAGE
from tests.support.memory import Poisoned, Vast

DIMS = [1, 3, 10, 16, 17, 64, 100, 130, 300]
CASES = [(dim, torch.float32) for dim in DIMS] + [
    pytest.param(dim, dtype, marks=pytest.mark.slow if dim != 17 else ())
    for dtype in (torch.float64, torch.bfloat16)
    for dim in (1, 17, 130)
]


@dataclass
class Job:
    """Features over common rows, and the descriptors with the addresses for the kernels.

    Feature f writes its bags into columns f·D … of the output, as in a collection.
    """

    dim: int
    dtype: torch.dtype
    lengths: list[list[int]]
    is_fixed: bool
    num_rows: int = 7
    is_mean: bool = False
    weights: torch.Tensor | None = None

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.dim)
        self.compute = COMPUTE_DTYPE[STORAGE[self.dtype]]
        self.rows = torch.randn(self.num_rows, self.dim, generator=generator).to(self.dtype)
        flat = torch.tensor([size for bags in self.lengths for size in bags], dtype=torch.int64)
        self.offsets = torch.cat([flat.new_zeros(1), flat.cumsum(0)])
        self.num_ids, self.num_bags = int(self.offsets[-1]), len(self.lengths[0])
        inverse = torch.randint(self.num_rows, (self.num_ids,), generator=generator, dtype=torch.int32)
        # Only rows that occur: a unique id has at least one cell.
        used, self.inverse = torch.unique(inverse, return_inverse=True)
        self.rows, self.inverse = self.rows[used.long()].contiguous(), self.inverse.to(torch.int32)
        self.counts = self.inverse.bincount(minlength=len(self.rows)).to(torch.int32)
        self.addresses = self.rows.data_ptr() + torch.arange(len(self.rows)) * self.dim * self.dtype.itemsize
        self.width = len(self.lengths) * self.dim
        self.features = np.array([self._describe(f) for f in range(len(self.lengths))], np.int64)
        self.kernels = ops.kernels(self.dim, STORAGE[self.dtype])
        self.factors = self._factors() if self.is_mean or self.weights is not None else None

    def _describe(self, f):
        bags = self.offsets[f * self.num_bags : (f + 1) * self.num_bags + 1]
        address, size = (0, self.lengths[f][0] if self.num_bags else 0) if self.is_fixed else (bags.data_ptr(), 0)
        begin, end = int(bags[0]), int(bags[-1])
        return begin, end, address, size, self.num_bags, f * self.dim, self.width, int(self.is_mean)

    def _factors(self):
        out, weights = Poisoned(self.compute, self.num_ids), self.weights
        ops.id_weights(
            self.features.ctypes.data,
            len(self.features),
            0 if weights is None else weights.data_ptr(),
            weights is not None and weights.dtype == torch.float64,
            out.address,
            self.compute == torch.float64,
        )
        return out.result()

    @property
    def expected_factors(self):
        factors = torch.ones(self.num_ids, dtype=torch.float64) if self.weights is None else self.weights.double()
        sizes = torch.repeat_interleave(self.offsets.diff(), self.offsets.diff())
        return (factors / sizes if self.is_mean else factors).to(self.compute)

    def forward(self):
        out = Poisoned(self.compute, self.num_bags, self.width)
        addresses, inverse = self.addresses.data_ptr(), self.inverse.data_ptr()
        self.kernels.pool(
            self.features.ctypes.data,
            len(self.features),
            addresses,
            len(self.rows),
            inverse,
            0 if self.factors is None else self.factors.data_ptr(),
            out.address,
        )
        return out.result()

    def backward(self, grad, uniques):
        """As if the rows were two tables on two owners, in the order of `uniques`."""
        pointers, cells = Poisoned(torch.int32, len(self.rows) + 1), Poisoned(torch.int32, self.num_ids)
        ops.file_cells(
            self.features.ctypes.data,
            len(self.features),
            self.inverse.data_ptr(),
            self.counts.data_ptr(),
            len(self.rows),
            pointers.address,
            cells.address,
        )
        sink = Poisoned(self.compute, len(self.rows), self.dim)
        filed = None if self.factors is None else self._file(pointers)
        bounds = self.segment_offsets
        self.kernels.backward(
            grad.data_ptr(),
            pointers.address,
            cells.address,
            0 if filed is None else filed.data_ptr(),
            uniques.data_ptr(),
            bounds.data_ptr(),
            2,
            2,
            sink.address,
        )
        cells.result(), pointers.result()
        return sink.result()

    @property
    def segment_offsets(self):
        total = len(self.rows)
        return torch.tensor([[0, total // 4, total // 2], [total // 2, total - total // 8, total]])

    def _file(self, pointers):
        filed, cursors = Poisoned(self.compute, self.num_ids), Poisoned(torch.int32, len(self.rows))
        ops.file_weights(
            self.features.ctypes.data,
            len(self.features),
            self.inverse.data_ptr(),
            pointers.address,
            len(self.rows),
            cursors.address,
            self.factors.data_ptr(),
            self.compute.itemsize,
            filed.address,
        )
        cursors.result()
        return filed.result()

    def check(self):
        """Sums are in the order of the ids, so they are bitwise; a weighted sum may use fused operations."""
        weights = None if self.factors is None else self.expected_factors
        tolerance = (
            {}
            if weights is None
            else {torch.float32: {"rtol": 1e-5, "atol": 1e-5}}.get(self.compute, {"rtol": 1e-13, "atol": 1e-13})
        )
        exact = tolerance or {"rtol": 0.0, "atol": 0.0}
        if weights is not None:
            assert torch.equal(self.factors, weights)
        expected = reference.pool(self.rows.to(self.compute), self.inverse, self.offsets, weights)
        by_feature = expected.view(len(self.lengths), self.num_bags, self.dim).transpose(0, 1)
        torch.testing.assert_close(self.forward(), by_feature.reshape(self.num_bags, self.width), **exact)
        grad = torch.randn(self.num_bags, self.width, dtype=self.compute)
        uniques = torch.randperm(len(self.rows)).to(torch.int32)
        flat = grad.view(self.num_bags, len(self.lengths), self.dim).transpose(0, 1).reshape(-1, self.dim)
        summed = reference.pool_backward(flat, self.inverse, self.offsets, len(self.rows), weights)
        expected = summed[uniques.long()]
        torch.testing.assert_close(self.backward(grad, uniques), expected, **exact)


@pytest.mark.compiles
@pytest.mark.parametrize("dim, dtype", CASES)
@pytest.mark.parametrize("is_fixed", [True, False])
def test_every_dim_and_storage(dim, dtype, is_fixed):
    sizes = [[1] * 40, [3] * 40] if is_fixed else [[0, 1, 5, 0], [2, 0, 30, 1]]
    generator = torch.Generator().manual_seed(1)
    num_ids = sum(map(sum, sizes))
    Job(dim, dtype, sizes, is_fixed).check()
    Job(dim, dtype, sizes, is_fixed, is_mean=True).check()
    for weight_dtype in (torch.float32, torch.float64):
        weights = torch.randn(num_ids, generator=generator, dtype=weight_dtype)
        Job(dim, dtype, sizes, is_fixed, weights=weights).check()
    Job(dim, dtype, sizes, is_fixed, weights=weights, is_mean=True).check()


@st.composite
def jobs(draw):
    num_bags, num_features = draw(st.integers(0, 6)), draw(st.integers(1, 4))
    is_fixed = draw(st.booleans())
    if is_fixed:
        lengths = [[draw(st.integers(0, 4))] * num_bags for _ in range(num_features)]
    else:
        lengths = [[draw(st.integers(0, 5)) for _ in range(num_bags)] for _ in range(num_features)]
    weights = None
    if draw(st.booleans()):
        weights = torch.rand(sum(map(sum, lengths)), dtype=draw(st.sampled_from([torch.float32, torch.float64])))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    return Job(
        draw(st.sampled_from([1, 17])), dtype, lengths, is_fixed, draw(st.integers(1, 9)), draw(st.booleans()), weights
    )


@settings(max_examples=120)
@given(job=jobs())
def test_any_bags(job):
    job.check()


def test_many_sums_are_written_past_the_caches():
    """Also where a row is no whole number of cache lines."""
    for dim, num_rows in ((64, 34_000), (100, 23_000)):
        job = Job(dim, torch.float32, [[2] * num_rows] * 2, is_fixed=True, num_rows=num_rows)
        assert 4 * dim * len(job.rows) > STREAMED_BYTES
        job.check()


def test_cells_past_two_gigabytes():
    """An output of which element 2³² − 32 is written, and a gradient that is read from there."""
    kernels, dim = ops.kernels(16, FLOAT32), 16
    row = torch.randn(1, dim)
    first_cell, stride = 2**31 - 64, 2**30
    features = np.array([[0, 3, 0, 1, 3, first_cell, stride, 0]], np.int64)  # the third bag is at 2³² − 64
    inverse, address = torch.zeros(3, dtype=torch.int32), torch.tensor([row.data_ptr()])
    out = Vast(4 * 2**32).tensor(torch.float32, 2**32)
    kernels.pool(features.ctypes.data, 1, address.data_ptr(), 1, inverse.data_ptr(), 0, out.data_ptr())
    for bag in range(3):
        begin = first_cell + bag * stride
        assert torch.equal(out[begin : begin + dim], row[0])
        out[begin : begin + dim] *= 10**bag
    pointers, cells = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    counts, sink = torch.tensor([3], dtype=torch.int32), torch.full((1, dim), float("nan"))
    uniques, bounds = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1])
    ops.file_cells(
        features.ctypes.data, 1, inverse.data_ptr(), counts.data_ptr(), 1, pointers.data_ptr(), cells.data_ptr()
    )
    kernels.backward(
        out.data_ptr(),
        pointers.data_ptr(),
        cells.data_ptr(),
        0,
        uniques.data_ptr(),
        bounds.data_ptr(),
        1,
        1,
        sink.data_ptr(),
    )
    torch.testing.assert_close(sink, row * 111)

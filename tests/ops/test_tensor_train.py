"""Matrix products in registers, the order of ids, and rows and gradients of cores, against plain torch."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from rowmesh.ops.prefixes.cpu import arrange
from rowmesh.ops.simd import FLOAT32, FLOAT64, uncached_kernel
from rowmesh.ops.tensor_train.reference import dense, rows
from rowmesh.ops.tensor_train.tile import multiply, multiply_transposed
from tests.support.memory import Poisoned

# Rows, columns, terms: whole tiles, tails in either direction, single elements, rows longer than a tile.
PRODUCTS = [(4, 64, 5, FLOAT32), (7, 37, 3, FLOAT32), (1, 1, 1, FLOAT32), (5, 19, 40, FLOAT64), (18, 130, 2, FLOAT32)]


def operands(num_rows, columns, terms, storage):
    dtype = torch.float64 if storage == FLOAT64 else torch.float32
    generator = torch.Generator().manual_seed(columns)
    a = torch.randn(num_rows, terms, dtype=dtype, generator=generator)
    b = torch.randn(terms, columns, dtype=dtype, generator=generator)
    return a, b, Poisoned(dtype, num_rows, columns), dtype.itemsize


@pytest.mark.parametrize("num_rows, columns, terms, storage", PRODUCTS)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_multiply(num_rows, columns, terms, storage, is_transposed):
    a, b, out, element = operands(num_rows, columns, terms, storage)
    line, step = (element, num_rows * element) if is_transposed else (terms * element, element)
    width = columns * element

    @uncached_kernel
    def twice(out, a, b, count):
        multiply(out, a, b, count, num_rows, columns, width, line, step, width, 1, storage)
        multiply(out, a, b, count, num_rows, columns, width, line, step, width, 0, storage)

    stored = a.t().contiguous() if is_transposed else a
    twice(out.address, stored.data_ptr(), b.data_ptr(), terms)
    torch.testing.assert_close(out.result(), 2 * a @ b)


@pytest.mark.parametrize("num_rows, columns, terms, storage", [*PRODUCTS, (3, 5, 16, FLOAT32), (9, 2, 17, FLOAT64)])
def test_multiply_transposed(num_rows, columns, terms, storage):
    x, b, out, element = operands(num_rows, columns, terms, storage)
    z, width, line = b.t().contiguous(), columns * element, terms * element

    @uncached_kernel
    def twice(out, x, z):
        multiply_transposed(out, x, z, num_rows, columns, terms, width, line, line, 1, storage)
        multiply_transposed(out, x, z, num_rows, columns, terms, width, line, line, 0, storage)

    twice(out.address, x.data_ptr(), z.data_ptr())
    torch.testing.assert_close(out.result(), 2 * x @ b)


def test_nothing_times_something_writes_nothing():
    @uncached_kernel
    def none(out, a):
        multiply(out, a, a, 1, 0, 3, 12, 4, 4, 12, 1, FLOAT32)
        multiply_transposed(out, a, a, 3, 0, 3, 12, 12, 12, 1, FLOAT32)

    out, operand = Poisoned(torch.float32, 3), torch.ones(9)
    none(out.address, operand.data_ptr())
    assert bool(out.result().isnan().all())


def arranged(ids, num_rows, factors):
    """What `arrange` writes, as arrays."""
    n, longs = len(ids) + 1, np.zeros((4, len(ids) + 1), np.int64)
    words, counts = np.zeros((13, n), np.uint32), np.zeros(5, np.int64)
    longs[0, :-1] = ids
    buckets = np.zeros(2 * max(factors), np.uint32)
    at = [word.ctypes.data for word in words]
    refused = arrange(
        longs.ctypes.data,
        len(ids),
        num_rows,
        *factors,
        at[10],
        at[0],
        buckets.ctypes.data,
        *at[1:8],
        *(touched.ctypes.data for touched in longs[1:]),
        counts.ctypes.data,
    )
    return refused, words[1:8].astype(np.int64), longs[1:], counts.tolist()


@given(st.data())
def test_arrange(data):
    factors = data.draw(st.tuples(*[st.integers(1, 5)] * 3))
    num_rows = factors[0] * factors[1] * factors[2]
    ids = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), unique=True)), np.int64)
    refused, words, touched, (num_prefixes, groups, touched1, touched3, largest) = arranged(ids, num_rows, factors)
    order, lasts, last_slots, starts, firsts, first_slots, group_starts = words
    assert refused == -1
    first, second, third = np.unravel_index(ids[order[:-1]], factors)
    assert list(zip(second, first, strict=True)) == sorted(zip(second, first, strict=True))
    assert sorted(order[:-1]) == list(range(len(ids)))
    assert np.array_equal(lasts[:-1], third)
    assert np.array_equal(touched[2][:touched3], np.unique(third))
    assert np.array_equal(touched[2][last_slots[:-1]], third)
    prefixes = list(dict.fromkeys(zip(second.tolist(), first.tolist(), strict=True)))
    assert len(prefixes) == num_prefixes
    sizes = [sum((b, a) == prefix for b, a in zip(second, first, strict=True)) for prefix in prefixes]
    assert np.diff(starts[: num_prefixes + 1]).tolist() == sizes
    assert firsts[:num_prefixes].tolist() == [a for _, a in prefixes]
    assert np.array_equal(touched[0][:touched1], np.unique(first))
    assert np.array_equal(touched[0][first_slots[:num_prefixes]], firsts[:num_prefixes])
    assert np.array_equal(touched[1][:groups], np.unique(second))
    group_sizes = [sum(b == g for b, _ in prefixes) for g in np.unique(second)]
    assert np.diff(group_starts[: groups + 1]).tolist() == group_sizes
    assert largest == max(group_sizes, default=0)


@pytest.mark.parametrize("wrong", [-1, 24, 2**40, -(2**63)])
def test_arrange_refuses_rows_that_are_not_there(wrong):
    assert arranged(np.array([3, 23, wrong, 5]), 24, (2, 3, 4))[0] == 2


def test_the_references_agree():
    generator = torch.Generator().manual_seed(0)
    cores = [torch.randn(shape, generator=generator) for shape in ((2, 3, 4), (3, 4, 2, 5), (4, 2, 5))]
    assert torch.allclose(rows(cores, torch.arange(24)), dense(cores), atol=1e-5)

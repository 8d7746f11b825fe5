"""Factorizations and ranks: laws, and what is said where nothing fits."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rowmesh.errors import ConfigurationError
from rowmesh.tables.tensor_train import factor_dim, factor_rows
from rowmesh.tensor_train import TensorTrainShape


@given(st.integers(1, 10**10))
def test_rows_are_padded_a_little(num_rows):
    factors = factor_rows(num_rows)
    assert list(factors) == sorted(factors)
    padded, root = math.prod(factors), num_rows ** (1 / 3)
    assert num_rows <= padded <= num_rows + 3 * max(factors) ** 2
    assert sum(factors) <= 3 * root + 3


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 7, 11, 30, 97])
def test_no_three_factors_have_a_smaller_sum(num_rows):
    found = factor_rows(num_rows)
    all_sums = [(a + b + -(-num_rows // (a * b))) for a in range(1, num_rows + 1) for b in range(1, num_rows + 1)]
    assert sum(found) == min(all_sums)


@given(st.integers(1, 1024))
def test_dims_are_factorized_exactly(dim):
    factors = factor_dim(dim)
    assert math.prod(factors) == dim
    assert list(factors) == sorted(factors)


@pytest.mark.parametrize("num_rows, dim", [(1, 1), (2, 3), (10_007, 17), (1_000_003, 128), (40_000_000, 100)])
def test_every_size_has_a_shape(num_rows, dim):
    shape = TensorTrainShape.choose(num_rows, dim)
    assert shape.num_parameters == sum(math.prod(core) for core in shape.core_shapes)
    assert max(shape.ranks) <= 16


@given(num_rows=st.integers(100, 10**7), dim=st.sampled_from([8, 16, 64]), share=st.floats(0.01, 1.0))
def test_a_budget_is_used_but_not_exceeded(num_rows, dim, share):
    budget = int(num_rows * dim * 4 * share)
    try:
        shape = TensorTrainShape.choose(num_rows, dim, memory_bytes=budget)
    except ConfigurationError:
        assert TensorTrainShape.choose(num_rows, dim, rank=1).num_parameters * 4 > budget
        return
    assert shape.num_parameters * 4 <= budget
    r1, r2 = (min(max(shape.ranks) + 1, full) for full in shape.full_ranks)
    if (r1, r2) != shape.ranks:
        assert TensorTrainShape.choose(num_rows, dim, rank=(r1, r2)).num_parameters * 4 > budget


def test_a_compression_is_reached():
    shape = TensorTrainShape.choose(1_000_000, 64, compression=100)
    assert 100 <= shape.compression < 110
    assert shape.ranks[0] == shape.ranks[1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"row_factors": (9, 10, 11)}, r"make 990 rows and cannot hold num_rows = 1000; \(10, 10, 10\) would do"),
        ({"row_factors": (10, 100)}, "row_factors must be three numbers"),
        ({"row_factors": (0, 10, 100)}, "row_factors must be three numbers of 1 or more"),
        ({"dim_factors": (2, 2, 2)}, r"make 8 columns, not 12; \(2, 2, 3\) does"),
        ({"rank": 21}, r"at most \(20, 30\), where it is exact; pass rank = \(20, 21\) or less"),
        ({"rank": 0}, r"rank must be 1 or more, one number or two, got \(0, 0\)"),
        ({"rank": (1, 2, 3)}, "one number or two"),
        ({"rank": 2.5}, r"rank must be whole numbers, got \(2.5, 2.5\)"),
        ({"rank": "16"}, "rank must be whole numbers, got 16"),
        ({"row_factors": (10.9, 10, 10)}, r"row_factors must be whole numbers, got \(10.9, 10, 10\)"),
        ({"rank": (1, 25)}, "too far apart: between them stand 20"),
        ({"rank": 4, "compression": 7.0}, "give one of rank = 4, memory_bytes = None and compression = 7.0"),
        ({"memory_bytes": 279}, r"no rank meets memory_bytes = 279 .* take 280 bytes at rank 1, 171.4 times smaller"),
        ({"compression": 1e9}, "no rank meets compression = 1e[+]09"),
        ({"compression": float("nan")}, "compression must be above 0 and finite, got nan"),
    ],
)
def test_what_does_not_fit_says_what_would(options, message):
    with pytest.raises(ConfigurationError, match=message):
        TensorTrainShape.choose(1000, 12, **options)


@pytest.mark.parametrize("size", [(0, 4), (-1, 4), (4, 0), (2**63, 4)])
def test_tables_without_rows_or_columns(size):
    with pytest.raises(ConfigurationError, match="num_rows must be 1 to"):
        TensorTrainShape.choose(*size)


def test_sizes_that_are_no_numbers_of_rows():
    with pytest.raises(ConfigurationError, match=r"num_rows and dim must be whole numbers, got \(5000.0, 4\)"):
        TensorTrainShape.choose(5e3, 4)


def test_the_smallest_budget_that_any_rank_meets():
    assert TensorTrainShape.choose(1000, 12, memory_bytes=280).ranks == (1, 1)

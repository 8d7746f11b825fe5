"""Initial values against the NumPy reference."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rowmesh.ops.initialize import STREAM, initialize, initialize_slots
from rowmesh.ops.initialize.reference import values

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def both(dtype, num_rows, dim, key, first, stride, distribution, a, b):
    out = torch.full((num_rows, dim), float("nan"), dtype=dtype)
    initialize(out, key, first=first, stride=stride, distribution=distribution, a=a, b=b)
    rows = first + stride * np.arange(num_rows)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    return out, torch.from_numpy(values(key, rows, dim, distribution, a, b)).to(compute).to(dtype)


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(0, 9),
    dim=st.sampled_from([1, 3, 10, 17, 130]),
    key=st.integers(0, 2**64 - 1),
    first=st.sampled_from([0, 1, 5, 2**31 + 3, 2**40]),
    stride=st.integers(1, 4),
    bounds=st.sampled_from([(-1.0, 1.0), (-0.01, 0.01), (2.0, 5.0)]),
)
def test_uniform_and_constant_are_bitwise(dtype, num_rows, dim, key, first, stride, bounds):
    for distribution in ("uniform", "constant"):
        mine, expected = both(dtype, num_rows, dim, key, first, stride, distribution, *bounds)
        assert torch.equal(mine, expected)
        assert bool(((mine >= bounds[0]) & (mine <= bounds[1])).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_normal(dtype):
    mine, expected = both(dtype, 500, 17, 2**63 + 5, 3, 2, "normal", 0.5, 2.0)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2.0**-8}[dtype]
    torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)


def test_moments():
    """Means, deviations and correlations are those of the distributions; each within five standard errors."""
    num = 200_000
    out = torch.empty(num, 2, dtype=torch.float64)
    for distribution, a, b, mean, deviation in (("uniform", -3, 3, 0, 3**0.5), ("normal", 1, 2, 1, 2)):
        initialize(out, 12345, first=0, stride=1, distribution=distribution, a=float(a), b=float(b))
        assert abs(float(out.mean()) - mean) < 5 * deviation / (2 * num) ** 0.5
        assert abs(float(out.std()) / deviation - 1) < 5 / num**0.5
        assert abs(float(torch.corrcoef(out.t())[0, 1])) < 5 / num**0.5
        assert abs(float(torch.corrcoef(torch.stack([out[:-1, 1], out[1:, 0]]))[0, 1])) < 5 / num**0.5


def test_blocks_of_bfloat16_join():
    """More rows than the block that bfloat16 passes through."""
    mine, expected = both(torch.bfloat16, 65536 + 5, 1, 9, 7, 3, "uniform", -1.0, 1.0)
    assert torch.equal(mine, expected)


def test_blocks_of_bfloat16_do_not_follow_the_defaults():
    out = torch.full((5, 3), float("nan"), dtype=torch.bfloat16)
    expected = out.clone()
    initialize(expected, 9, first=7, stride=3, distribution="uniform", a=-1.0, b=1.0)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            initialize(out, 9, first=7, stride=3, distribution="uniform", a=-1.0, b=1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", ["uniform", "normal", "constant"])
def test_rows_of_any_slots_are_those_of_whole_pieces(dtype, distribution):
    """Three pieces of two tables, the last one empty, their slots in any order."""
    pieces = np.array([[0, 5, 1, 0], [7, 2**40, 3, 1], [20, 1, 2, 0], [25, 9, 1, 1]])
    streams = np.array([(2**63 + 5, -1.0, 1.0), (9, 0.5, 2.0)], STREAM)
    whole = torch.empty(25, 17, dtype=dtype)
    for (begin, row, step, table), end in zip(pieces[:3].tolist(), (7, 20, 25), strict=True):
        key, a, b = streams[table].tolist()
        initialize(whole[begin:end], key, first=row, stride=step, distribution=distribution, a=a, b=b)
    rng = np.random.default_rng(0)
    slots, places = rng.permutation(25)[:20].astype(np.uint32), rng.permutation(30)[:20].astype(np.uint32)
    out = torch.full((30, 17), 7.0, dtype=dtype)
    initialize_slots(out, places, slots, pieces, streams, distribution)
    assert torch.equal(out[torch.from_numpy(places.astype(np.int64))], whole[torch.from_numpy(slots.astype(np.int64))])
    others = np.setdiff1d(np.arange(30), places)
    assert bool((out[torch.from_numpy(others)] == 7.0).all())


@pytest.mark.parametrize("out", [torch.empty(4, 6)[:, ::2], torch.empty(2, 3, dtype=torch.float16)])
def test_refuses_what_its_kernel_would_write_wrongly(out):
    with pytest.raises(ValueError, match="out must be contiguous"):
        initialize(out, 7, first=0, stride=1, distribution="constant", a=0.0, b=0.0)

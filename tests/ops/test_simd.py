"""Rows as vectors: what loads and stores do to the bits."""

import pytest
import torch

from rowmesh.ops.simd import BFLOAT16, FLOAT32, dot, kernel, load_row, store_row, uncached_kernel

SPECIAL = [0.0, -0.0, 1.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 1e-45, 1e-40, 2.0**-126]


@uncached_kernel
def narrow(source, target):
    store_row(target, load_row(source, 16, FLOAT32), BFLOAT16)


@uncached_kernel
def squares(source):
    row = load_row(source, 16, FLOAT32)
    return dot(row, row)


def narrowed(values):
    out = torch.full((len(values),), -7, dtype=torch.int16)
    for begin in range(0, len(values), 16):
        narrow(values[begin:].data_ptr(), out[begin:].data_ptr())
    return out.view(torch.bfloat16)


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_bfloat16_rounds_to_nearest_even(low):
    """Every upper half of a float32 with the lower halves that decide: below, at and above the middle."""
    bits = (torch.arange(2**16) << 16 | low).to(torch.int64)
    values = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    mine, expected = narrowed(values), values.bfloat16()
    assert torch.equal(mine.isnan(), values.isnan())
    assert torch.equal(mine[~values.isnan()].view(torch.int16), expected[~values.isnan()].view(torch.int16))


def test_special_values_survive():
    values = torch.tensor([*SPECIAL, *SPECIAL])[:16].clone()
    mine = narrowed(values)
    assert torch.equal(mine.isnan(), values.isnan())
    assert torch.equal(mine.isinf(), values.bfloat16().isinf())


def test_sum_of_squares():
    values = torch.randn(16)
    assert squares(values.data_ptr()) == pytest.approx(float(values.double().square().sum()), rel=1e-6)


def test_kernels_never_share_a_file_on_disk():
    """Ranks compile at the same time; one must never load what another wrote for other constants."""

    def make(constant):
        @kernel
        def add_constant(x):
            return x + constant

        return add_constant

    names = {constant: make(constant).py_func.__qualname__ for constant in (1, 2, 3)}
    assert len(set(names.values())) == 3
    assert make(1).py_func.__qualname__ == names[1]  # found again
    assert make(2)(40) == 42

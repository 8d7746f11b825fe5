"""Packing and unpacking copy the bits that the NumPy version copies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.ops.records import MAX_PARTS, record_kernels
from rowmesh.ops.records.reference import pack, unpack

PARTS = [(6,), (256, 4), (64, 64, 64, 4), (4, 4), (8 * 1024, 8), (2, 4, 4, 4)]


def address(array):
    return array.ctypes.data


@pytest.mark.parametrize("parts", PARTS, ids=str)
@given(st.integers(0, 40), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_like_the_reference(parts, count, padding, seed):
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 256, (50, part), np.uint8) for part in parts]
    bases = np.zeros(MAX_PARTS, np.int64)
    bases[: len(parts)] = [address(array) for array in arrays]
    places = rng.permutation(50)[:count].astype(np.uint32)
    records = np.full((count, sum(parts) + padding), 7, np.uint8)
    kernels = record_kernels(*parts)
    kernels.pack(address(places), count, address(bases), address(records), records.shape[1])
    assert (records[:, : sum(parts)] == pack(arrays, places)).all()
    assert (records[:, sum(parts) :] == 7).all()

    changed = rng.integers(0, 256, records.shape, np.uint8)
    expected = [array.copy() for array in arrays]
    unpack(expected, places, changed)
    kernels.unpack(address(places), count, address(bases), address(changed), records.shape[1])
    for array, reference in zip(arrays, expected, strict=True):
        assert (array == reference).all()

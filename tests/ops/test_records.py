"""Packing and unpacking copy the bits that the NumPy version copies."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.ops.records import Records
from rowmesh.ops.records.reference import pack, unpack

PARTS = [(6,), (256, 4), (64, 64, 64, 4), (4, 4), (8 * 1024, 8), (2, 4, 4, 4)]


@pytest.mark.parametrize("parts", PARTS, ids=str)
@given(st.integers(0, 40), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_like_the_reference(parts, count, padding, seed):
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 256, (50, part), np.uint8) for part in parts]
    ours = Records([torch.from_numpy(array) for array in arrays])
    places = rng.permutation(50)[:count].astype(np.uint32)
    records = np.full((count, sum(parts) + padding), 7, np.uint8)
    ours.pack(places, records)
    assert (records[:, : sum(parts)] == pack(arrays, places)).all()
    assert (records[:, sum(parts) :] == 7).all()

    changed = rng.integers(0, 256, records.shape, np.uint8)
    expected = [array.copy() for array in arrays]
    unpack(expected, places, changed)
    ours.unpack(places, changed)
    for array, reference in zip(arrays, expected, strict=True):
        assert (array == reference).all()

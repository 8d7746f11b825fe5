"""Bijections between frequency ranks and rows."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rowmesh.data.bijection import Bijection
from rowmesh.errors import DataError


@given(st.integers(0, 20), st.integers(0, 30), st.integers(0, 2**32 - 1))
def test_law(first, size, seed):
    rng = np.random.default_rng(seed)
    rows = (first + rng.permutation(size)).astype(np.int32)
    bijection = Bijection(first, rows)
    ranks = rng.integers(0, first + size + 5, 40)
    assert (bijection.ranks(bijection.rows(ranks)) == ranks).all()
    assert (bijection.rows(bijection.ranks(ranks)) == ranks).all()
    assert sorted(bijection.rows(np.arange(first + size + 5))) == list(range(first + size + 5))
    outside = ranks[(ranks < first) | (ranks >= first + size)]
    assert (bijection.rows(outside) == outside).all()
    assert (bijection.rows(np.arange(first, first + size)) == rows).all()


@pytest.mark.parametrize("rows", [[3, 3], [2, 3], [3, 5], [[3, 4]]])
def test_what_is_no_bijection(rows):
    with pytest.raises(DataError, match="no bijection"):
        Bijection(3, np.array(rows, np.int32))


def test_saved_and_loaded(tmp_path):
    Bijection(3, np.array([4, 3], np.int32)).save(tmp_path / "a.npy")
    loaded = Bijection(3, np.load(tmp_path / "a.npy", mmap_mode="r"))
    assert loaded.rows(np.arange(6)).tolist() == [0, 1, 2, 4, 3, 5]
    with pytest.raises(DataError, match="no bijection"):
        Bijection(2, np.load(tmp_path / "a.npy"))

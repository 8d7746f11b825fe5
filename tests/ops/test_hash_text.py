import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.errors import DataError
from rowmesh.ops.hash_text import hash_text, reference


@given(st.lists(st.binary(max_size=100), max_size=20), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_equals_the_library(values, seed, begin):
    data = np.frombuffer(b"x" * begin + b"".join(values), np.uint8)
    offsets = np.array([begin, *np.cumsum([len(value) for value in values]) + begin], np.int64)
    found = hash_text(data, offsets, seed)
    np.testing.assert_array_equal(found, reference.hash_text(data, offsets, seed))


@pytest.mark.parametrize("offsets", [[], [0, 4], [-1, 2], [0, 2, 1]])
def test_offsets_are_checked(offsets):
    with pytest.raises(DataError, match="offsets of text must rise from 0 or more to 3 at most"):
        hash_text(np.zeros(3, np.uint8), np.array(offsets, np.int64))

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from rowmesh.data.raw import ids_of
from rowmesh.errors import DataError


def digest(text, seed=0):
    return int(np.array(xxhash.xxh64_intdigest(text, seed), np.uint64).view(np.int64))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_text_is_hashed_alike_in_every_type(kind):
    values = pa.array(["ann", None, "", "bob", "a longer name that needs more than one lane of bytes"]).cast(kind)
    expected = [digest(v, 7) for v in (b"ann", b"", b"", b"bob", values[4].cast(pa.binary()).as_py())]
    assert ids_of(values, 7).tolist() == expected
    assert ids_of(values[1:4], 7).tolist() == expected[1:4]
    assert ids_of(values[:0]).tolist() == []


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64(), pa.uint32()])
def test_integers_are_their_own_ids(kind):
    assert ids_of(pa.array([5, None, 0, 120], kind)).tolist() == [5, digest(b""), 0, 120]


def test_every_64_bits_are_an_id():
    extremes = [-(2**63), -1, 2**63 - 1]
    assert ids_of(pa.array(extremes, pa.int64())).tolist() == extremes
    assert ids_of(pa.array([2**64 - 1, 2**63], pa.uint64())).tolist() == [-1, -(2**63)]
    assert ids_of(pa.nulls(2)).tolist() == [digest(b"")] * 2


def test_other_types_are_refused():
    with pytest.raises(DataError, match="ids must be integers, text or bytes, got double"):
        ids_of(pa.array([1.5]))

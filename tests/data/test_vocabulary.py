"""The vocabulary against a Python dictionary."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest

from rowmesh.data.vocabulary import Vocabulary
from rowmesh.errors import DataError

texts = st.lists(st.lists(st.one_of(st.none(), st.binary(max_size=12)), max_size=40), max_size=6)
integers = st.lists(st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), max_size=40), max_size=6)


@hypothesis.given(st.one_of(texts, integers))
@hypothesis.settings(deadline=None)
def test_codes_are_the_order_of_first_appearance(blocks):
    is_integer = any(isinstance(value, int) for block in blocks for value in block)
    vocabulary, expected = Vocabulary("c"), {}
    for block in blocks:
        codes = vocabulary.encode(pa.array(block, pa.int64() if is_integer else pa.binary()))
        keys = [None if value == b"" else value for value in block]
        assert codes.tolist() == [expected.setdefault(key, len(expected)) for key in keys]
    values = vocabulary.values(np.arange(len(vocabulary))).to_pylist()
    assert [v.encode() if isinstance(v, str) else v for v in values] == list(expected)


def test_many_values_survive_growth():
    vocabulary = Vocabulary("c")
    numbers = np.random.default_rng(0).permutation(200_000)
    for block in np.array_split(numbers, 7):
        vocabulary.encode(pa.array(block))
    np.testing.assert_array_equal(vocabulary.encode(pa.array(numbers)), np.arange(200_000))
    np.testing.assert_array_equal(vocabulary.values(np.arange(200_000)), numbers)


def test_one_long_value():
    vocabulary = Vocabulary("c")
    assert vocabulary.encode(pa.array(["x" * 100_000, "y", "x" * 100_000])).tolist() == [0, 1, 0]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_sliced_text_of_any_type(kind):
    array = pa.array(["a", "b", None, "b", ""], kind)
    assert Vocabulary("c").encode(array[1:]).tolist() == [0, 1, 0, 1]


def test_integer_widths_are_one_type():
    vocabulary = Vocabulary("c")
    assert vocabulary.encode(pa.array([5, None], pa.int8())).tolist() == [0, 1]
    assert vocabulary.encode(pa.array([None, 5], pa.int64())).tolist() == [1, 0]


def test_integers_and_text_are_not_mixed():
    vocabulary = Vocabulary("user")
    vocabulary.encode(pa.array([5]))
    with pytest.raises(DataError, match="'user' holds integers in one file and text in another"):
        vocabulary.encode(pa.array(["5"]))


def test_unsigned_ids_past_63_bits_come_back():
    vocabulary = Vocabulary("hash")
    assert vocabulary.encode(pa.array([2**64 - 1, 7, None, 2**63], pa.uint64())).tolist() == [0, 1, 2, 3]
    assert vocabulary.encode(pa.array([7, 8], pa.int64())).tolist() == [1, 4]
    values = vocabulary.values(np.arange(5))
    assert (values.type, values.to_pylist()) == (pa.uint64(), [2**64 - 1, 7, None, 2**63, 8])


@pytest.mark.parametrize("unsigned_first", [False, True])
def test_ids_below_0_and_past_63_bits_never_share_a_code(unsigned_first):
    vocabulary = Vocabulary("hash")
    arrays = [pa.array([-1]), pa.array([2**64 - 1], pa.uint64())]
    first, second = reversed(arrays) if unsigned_first else arrays
    vocabulary.encode(first)
    with pytest.raises(DataError, match=r"'hash' holds ids below 0 .* 2\^63 or more"):
        vocabulary.encode(second)


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_values_of_type_null_go_with_any(kind):
    vocabulary = Vocabulary("c")
    assert vocabulary.encode(pa.nulls(2)).tolist() == [0, 0]
    assert vocabulary.encode(pa.array([None, 5]).cast(kind)).tolist() == [0, 1]
    assert vocabulary.values(np.array([0, 1])).to_pylist() == [None, 5 if kind == pa.int64() else "5"]


def test_bytes_that_are_no_text_stay_bytes():
    vocabulary = Vocabulary("c")
    vocabulary.encode(pa.array([b"\xff", b"a"]))
    assert vocabulary.values(np.array([0, 1])).to_pylist() == [b"\xff", b"a"]


@hypothesis.given(st.one_of(texts, integers))
@hypothesis.settings(deadline=None)
def test_values_are_found_and_none_is_added(blocks):
    is_integer = any(isinstance(value, int) for block in blocks for value in block)
    kind = pa.int64() if is_integer else pa.binary()
    vocabulary, known = Vocabulary("c"), [value for block in blocks[::2] for value in block]
    keys = [None if value == b"" else value for value in known]
    codes = dict(zip(keys, vocabulary.encode(pa.array(known, kind)).tolist(), strict=True))
    size = len(vocabulary)
    for block in blocks:
        expected = [codes.get(None if value == b"" else value, -1) for value in block]
        assert vocabulary.find(pa.array(block, kind)).tolist() == expected
    assert len(vocabulary) == size


def test_what_is_found_across_types():
    text, integers = Vocabulary("c"), Vocabulary("c")
    text.encode(pa.array(["7", "-3", None]))
    integers.encode(pa.array([7, -3, None]))
    assert text.find(pa.array([7, 8, None, -3])).tolist() == [0, -1, 2, 1]
    assert text.find(pa.nulls(2)).tolist() == integers.find(pa.nulls(2)).tolist() == [2, 2]
    assert Vocabulary("c").find(pa.array(["a", None])).tolist() == [-1, -1]
    with pytest.raises(DataError, match="'c' holds text, and the values it is compared with are integers"):
        integers.find(pa.array(["7"]))

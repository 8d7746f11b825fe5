import shutil
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.data import Prepared
from rowmesh.run import fingerprint as module
from rowmesh.run.fingerprint import differences, digest_values, fingerprint

VALUES = st.one_of(
    st.lists(st.none() | st.text(max_size=4), max_size=8), st.lists(st.none() | st.integers(0, 5), max_size=8)
)


def array(values):
    is_integer = any(isinstance(value, int) for value in values)
    return pa.array(values, pa.int64() if is_integer else pa.large_string())


@given(VALUES, VALUES)
def test_digests_are_equal_where_values_are(left, right):
    left, right = array(left), array(right)
    assert (digest_values(left) == digest_values(right)) == left.equals(right)


@given(VALUES, st.integers(1, 3))
def test_neither_slices_nor_their_first_position_matter(values, before):
    values = array(values)
    padded = pa.concat_arrays([values.slice(0, 0), pa.nulls(before, values.type), values])
    assert digest_values(padded.slice(before)) == digest_values(values)


def test_large_unsigned_values_count_too():
    """Beyond 63 bits, where the same bits are negative values of another table."""
    values = [2**64 - 1, None, 7]
    digests = [digest_values(pa.array(each, pa.uint64())) for each in (values, [2**64 - 2, None, 7])]
    digests.append(digest_values(pa.array([-1, None, 7], pa.int64())))
    assert len(set(digests)) == 3
    assert digest_values(pa.array(values, pa.uint64()).slice(1)) == digest_values(pa.array(values[1:], pa.uint64()))


def test_bytes_that_are_no_text_count_too():
    assert digest_values(pa.array([b"\xff", None], pa.large_binary())) != digest_values(
        pa.array([b"\xfe", None], pa.large_binary())
    )


def test_chunks_hold_whole_values(monkeypatch):
    values = array(["a", "bcd", None, "", "ef"])
    monkeypatch.setattr(module, "CHUNK_VALUES", 2)
    assert digest_values(values) != digest_values(array(["ab", "cd", None, "", "ef"]))


def test_a_copy_means_the_same_and_other_dense_features_do_not(clicks, tmp_path):
    copy = Prepared.open(shutil.copytree(clicks.folder, tmp_path / "copy"))
    assert differences(fingerprint(clicks), fingerprint(copy)) == []
    other = replace(copy, schema=copy.schema.model_copy(update={"dense_transform": "none"}))
    assert differences(fingerprint(clicks), fingerprint(other)) == ["dense features"]


@pytest.mark.parametrize("feature", ["C1", "C3"])
def test_another_order_of_ids_is_named(clicks, monkeypatch, feature):
    before = fingerprint(clicks)
    vocabulary = Prepared.vocabulary

    def turned(self, name):
        values = vocabulary(self, name)
        return values.take(pa.array(range(len(values) - 1, -1, -1))) if name == feature else values

    monkeypatch.setattr(Prepared, "vocabulary", turned)
    assert differences(before, fingerprint(clicks)) == [f"vocabulary of {feature}"]

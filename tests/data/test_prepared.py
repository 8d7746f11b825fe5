"""Prepared data as they are read: names of files, and what is taken into memory."""

from pathlib import Path

import hypothesis.strategies as st
import pyarrow as pa
from hypothesis import example, given

from rowmesh.data.prepared import Prepared, vocabulary_path
from tests.support.cooccurrence import draw_batches, prepare_batches


@given(st.text(max_size=8), st.text(max_size=8))
@example("a\u2010", "a 10")
@example("a%20", "a ")
def test_other_features_have_other_files(left, right):
    paths = [vocabulary_path(Path("data"), name) for name in (left, right)]
    assert (paths[0] == paths[1]) == (left == right)
    assert paths[0].parent == Path("data/vocabulary")


def test_values_of_large_tables_stay_in_their_file(tmp_path):
    folder = prepare_batches(tmp_path, draw_batches(40)).folder
    before = pa.total_allocated_bytes()
    values = Prepared.open(folder).vocabulary("item")
    assert values.nbytes > 5000
    assert pa.total_allocated_bytes() - before < 1000
    assert len(set(values.to_pylist())) == len(values)

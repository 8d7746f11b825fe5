"""Names of the files of prepared data."""

from pathlib import Path

import hypothesis.strategies as st
from hypothesis import example, given

from rowmesh.data.prepared import vocabulary_path


@given(st.text(max_size=8), st.text(max_size=8))
@example("a\u2010", "a 10")
@example("a%20", "a ")
def test_other_features_have_other_files(left, right):
    paths = [vocabulary_path(Path("data"), name) for name in (left, right)]
    assert (paths[0] == paths[1]) == (left == right)
    assert paths[0].parent == Path("data/vocabulary")

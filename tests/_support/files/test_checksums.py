import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh._support.files.checksums import Checksums, ChecksumWriter, checksums_of


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 16))
def test_checksums_of_what_is_written_are_those_of_the_file(tmp_path_factory, pieces, block_bytes):
    file = io.BytesIO()
    writer = ChecksumWriter(file, block_bytes)
    for piece in pieces:
        assert writer.write(piece) == len(piece)
    path = tmp_path_factory.mktemp("sums") / "file"
    path.write_bytes(file.getvalue())
    sums = writer.checksums()
    assert file.getvalue() == b"".join(pieces)
    assert sums == checksums_of(path, block_bytes) == Checksums.from_json(json.loads(json.dumps(sums.to_json())))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"size_bytes": 5, "block_bytes": 0, "xxh3_64": []},
        {"size_bytes": 5, "block_bytes": 4, "xxh3_64": ["1"]},
        {"size_bytes": "5", "block_bytes": 4, "xxh3_64": ["1", "2"]},
        {"size_bytes": 5, "block_bytes": 4, "xxh3_64": [1, 2]},
        None,
    ],
)
def test_what_are_no_checksums_is_an_error(values):
    with pytest.raises((ValueError, KeyError, TypeError)):
        Checksums.from_json(values)

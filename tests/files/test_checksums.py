import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.errors import DamagedFileError
from rowmesh.files.checksums import Checksums, ChecksumWriter, VerifiedBytes, checksums_of, damaged_blocks


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
    assert not list(damaged_blocks(path, sums))


@given(st.binary(min_size=1, max_size=100), st.integers(1, 16), st.data())
def test_a_flipped_bit_is_found_where_it_is(tmp_path_factory, content, block_bytes, data):
    path = tmp_path_factory.mktemp("sums") / "file"
    path.write_bytes(content)
    sums = checksums_of(path, block_bytes)
    at, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(content)
    damaged[at] ^= 1 << bit
    path.write_bytes(damaged)
    assert list(damaged_blocks(path, sums)) == [at // block_bytes]
    seen = VerifiedBytes(path, bytes(damaged), sums, "copy it again")
    seen.verify(0, at // block_bytes * block_bytes)
    with pytest.raises(DamagedFileError, match=r"file is damaged: bytes .* are not what was written; copy it again"):
        seen.verify(at, at + 1)
    VerifiedBytes(path, bytes(damaged), None, "").verify()


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    sums = checksums_of(path)
    with pytest.raises(DamagedFileError, match="has 3 bytes where 5 were written; copy it again"):
        VerifiedBytes(path, b"123", sums, "copy it again")
    path.write_bytes(b"")
    assert list(damaged_blocks(path, sums)) == [0]


def test_each_block_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    sums = checksums_of(path, 10)
    read = []
    digest = "rowmesh.files.checksums.xxhash.xxh3_64_hexdigest"
    monkeypatch.setattr(digest, lambda block: read.append(len(block)) or sums.blocks[0])
    seen = VerifiedBytes(path, path.read_bytes(), sums, "")
    seen.verify(15, 35)
    seen.verify(5, 25)
    assert read == [10] * 4


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

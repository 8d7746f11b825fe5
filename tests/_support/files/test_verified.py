"""Files that are kept open and verified where they are read."""

import os
import re

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rowmesh._support.files.checksums import checksums_of
from rowmesh._support.files.verified import PositionedReader, VerifiedFile
from rowmesh.errors import DamagedFileError


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    return path


def opened(path, block_bytes=10):
    sums = checksums_of(path, block_bytes) if block_bytes else None
    return VerifiedFile(path, os.open(path, os.O_RDONLY), sums, "copy it again")


def test_what_is_removed_can_still_be_read(path):
    file = opened(path)
    path.unlink()
    assert bytes(file.read(95)) == bytes(range(95, 100))
    assert bytes(file.read(3, 3)) == b""
    with (path.parent / "copy").open("wb+") as copy:
        file.copy_to(copy, chunk_bytes=7)
        copy.seek(0)
        assert copy.read() == bytes(range(100))


def test_blocks_that_are_not_read_are_not_verified(path):
    sums = checksums_of(path, 10)
    content = bytearray(path.read_bytes())
    content[55] ^= 4
    path.write_bytes(content)
    file = VerifiedFile(path, os.open(path, os.O_RDONLY), sums, "copy it again")
    file.read(0, 50)
    file.read(60)
    with pytest.raises(DamagedFileError, match="file is damaged: bytes 50 to 59 are not what was written; copy it"):
        file.read(49, 51)


@given(st.binary(min_size=1, max_size=100), st.integers(1, 16), st.data())
def test_a_flipped_bit_is_found_where_it_is(tmp_path_factory, content, block_bytes, data):
    path = tmp_path_factory.mktemp("flipped") / "file"
    path.write_bytes(content)
    sums = checksums_of(path, block_bytes)
    at, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(content)
    damaged[at] ^= 1 << bit
    path.write_bytes(damaged)
    file = VerifiedFile(path, os.open(path, os.O_RDONLY), sums, "copy it again")
    begin = at // block_bytes * block_bytes
    end = min(begin + block_bytes, len(content))
    assert bytes(file.read(0, begin)) == content[:begin]
    if end < len(content):
        assert bytes(file.read(end)) == content[end:]
    with pytest.raises(DamagedFileError, match=rf"file is damaged: bytes {begin:,} to {end - 1:,} are not what was"):
        file.read(at, at + 1)
    assert bytes(opened(path, block_bytes=0).read()) == damaged


def test_a_file_of_another_size_is_refused(path):
    sums = checksums_of(path)
    path.write_bytes(b"123")
    with pytest.raises(DamagedFileError, match="has 3 bytes where 100 were written; copy it again"):
        VerifiedFile(path, os.open(path, os.O_RDONLY), sums, "copy it again")


def test_each_block_is_verified_once(path, monkeypatch):
    file, read, digest = opened(path), [], xxhash.xxh3_64_hexdigest
    monkeypatch.setattr("xxhash.xxh3_64_hexdigest", lambda block: read.append(len(block)) or digest(block))
    file.read(15, 35)
    file.read(5, 25)
    assert read == [10] * 4


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        VerifiedFile(tmp_path, os.open(tmp_path, os.O_RDONLY), None, "")


def test_descriptors_end_with_the_file(path):
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []  # noqa: PTH112, PTH208
    file = opened(path)
    del file
    after = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []  # noqa: PTH112, PTH208
    assert len(after) == len(before)


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_a_reader_has_a_position(path, content):
    path.write_bytes(content)
    reader = PositionedReader(opened(path))
    assert bytes(reader.read(2)) == content[:2]
    assert reader.tell() == len(content[:2])
    assert reader.seek(0, os.SEEK_END) == len(content)
    assert bytes(reader.read()) == b""
    reader.seek(-1, os.SEEK_CUR)
    reader.copies = True
    assert reader.seek(0) == 0
    assert reader.read() == content

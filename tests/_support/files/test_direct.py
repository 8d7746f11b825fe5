"""Files that pass the page cache, where the file system lets them, and hold the same bytes where it does not."""

import errno
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rowmesh import EmbeddingCollection, TableSpec, checkpoint
from rowmesh._support.files import direct
from rowmesh._support.files.direct import CHUNK_BYTES, direct_file
from rowmesh.checkpoint import new_files
from rowmesh.checkpoint.background import BackgroundSave

needs_direct = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no O_DIRECT")


def drawn(size):
    return np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()


def write_in(path, content, cuts):
    """Writes pieces; returns whether the file was written past the cache before its end."""
    with direct_file(path) as file:
        for piece in np.split(np.frombuffer(content, np.uint8), cuts):
            if len(piece):
                assert file.write(piece) == len(piece)
        return file.is_direct


@pytest.mark.parametrize(
    "size", [0, 1, 4095, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 4096 + 7]
)
def test_holds_what_was_written(tmp_path, size):
    content = drawn(size)
    write_in(tmp_path / "rows", content, sorted({min(size, cut) for cut in (1, 128, CHUNK_BYTES - 5, CHUNK_BYTES + 9)}))
    assert (tmp_path / "rows").read_bytes() == content


def test_memory_of_chunks_is_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr(direct, "_spare", spare := [])
    for _ in range(3):
        with direct_file(tmp_path / "a") as first, direct_file(tmp_path / "b") as second:
            first.write(b"1")
            second.write(b"2")
        assert len(spare) == 2
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()) == (b"1", b"2")


@needs_direct
def test_only_what_is_written_beside_steps_passes_the_cache(tmp_path, monkeypatch):
    passes, make = [], new_files.direct_file

    def note(path, *, passes_cache):
        passes.append(passes_cache)
        return make(path, passes_cache=passes_cache)

    monkeypatch.setattr(new_files, "direct_file", note)
    rows = EmbeddingCollection([TableSpec(name="item", num_rows=4, dim=2)])
    checkpoint.save(tmp_path / "at once", rows, {})
    assert passes
    assert not any(passes)
    passes.clear()
    BackgroundSave(tmp_path / "beside", rows, {}).wait()
    assert passes
    assert all(passes)
    content = drawn(2 * CHUNK_BYTES + 5)
    with direct_file(tmp_path / "rows", passes_cache=False) as file:
        file.write(content)
        assert not file.is_direct
    assert (tmp_path / "rows").read_bytes() == content


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_process_has_chunks_of_its_own(tmp_path):
    with direct_file(tmp_path / "parent") as file:
        file.write(b"parent")
        if not (child := os.fork()):
            try:
                file.close()  # gives its chunk to the next
                with direct_file(tmp_path / "child") as own:
                    own.write(b"own")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    assert (tmp_path / "parent").read_bytes() == b"parent"
    assert (tmp_path / "child").read_bytes() == b"own"


@needs_direct
@pytest.mark.parametrize("refused", ["the flag", "the write"])
def test_file_systems_that_refuse_get_the_same_bytes(tmp_path, monkeypatch, refused):
    content, asked = drawn(2 * CHUNK_BYTES + 5), []
    if refused == "the flag":
        set_flags = direct.fcntl.fcntl

        def refuse_flags(file, command, flags=0):
            if flags & os.O_DIRECT:
                asked.append(flags)
                raise OSError(errno.EINVAL, "Invalid argument")
            return set_flags(file, command, flags)

        monkeypatch.setattr(direct.fcntl, "fcntl", refuse_flags)
    else:
        write, get_flags = os.write, direct.fcntl.fcntl

        def refuse_write(descriptor, part):
            if get_flags(descriptor, direct.fcntl.F_GETFL) & os.O_DIRECT:
                asked.append(len(part))
                raise OSError(errno.EINVAL, "Invalid argument")
            return write(descriptor, part)

        monkeypatch.setattr(os, "write", refuse_write)
    assert not write_in(tmp_path / "rows", content, [CHUNK_BYTES])
    assert (tmp_path / "rows").read_bytes() == content
    assert len(asked) == 1


@needs_direct
def test_a_sync_that_cannot_begin_says_nothing(tmp_path, monkeypatch):
    """An error of what is in the cache is that of `fsync`."""

    def refuse(*_):
        raise OSError(errno.EINVAL, "no regular file")

    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    write_in(tmp_path / "rows", b"12345", [2])
    assert (tmp_path / "rows").read_bytes() == b"12345"


@contextmanager
def at_most(num_bytes):
    """Files of this process become no larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [CHUNK_BYTES + 4096, CHUNK_BYTES + 100, 1000])
def test_a_file_that_cannot_grow_is_named(tmp_path, limit):
    path = tmp_path / "rows"
    with at_most(limit), pytest.raises(OSError, match="File too large") as caught:
        write_in(path, drawn(2 * CHUNK_BYTES), [])
    assert Path(caught.value.filename) == path

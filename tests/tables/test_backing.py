"""Backing stores keep records; a file store says what is wrong with its file, and leaves nothing behind."""

import gc
import resource
import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.ops.memory import Buffer
from rowmesh.tables.backing import MemoryStore
from rowmesh.tables.file_store import FileStore

NUM_RECORDS = 300


def u32(values):
    return np.array(values, np.uint32)


def page_aligned(count, stride):
    return Buffer(count * stride).array(np.uint8, count, stride)


@pytest.fixture(params=["memory", "file", "one thread", "direct"])
def make_store(request, tmp_path):
    if request.param == "memory":
        return MemoryStore
    if request.param == "direct":
        try:
            FileStore(1, 1, path=tmp_path / "probe", direct=True).close()
        except ConfigurationError as error:
            pytest.skip(str(error))
    threads = 1 if request.param == "one thread" else 3
    return partial(FileStore, path=tmp_path / "rows", num_threads=threads, direct=request.param == "direct")


def open_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("rowmesh")}


def test_records_are_what_was_written_last(make_store):
    before = open_threads()
    store = make_store(NUM_RECORDS, 20)
    expected = {}

    @given(st.lists(st.integers(0, NUM_RECORDS - 1), unique=True, max_size=NUM_RECORDS), st.integers(0, 2**32 - 1))
    def write_and_read(slots, seed):
        rng = np.random.default_rng(seed)
        slots += [slot for slot in rng.permutation(NUM_RECORDS)[: seed % 200].tolist() if slot not in slots]
        records = page_aligned(len(slots), store.stride)
        records[:] = rng.integers(0, 256, records.shape)
        store.write(u32(slots), records)
        expected.update(zip(slots, records[:, :20].tolist(), strict=True))
        known = rng.permutation(list(expected)).astype(np.uint32)
        back = page_aligned(len(known), store.stride)
        store.read(known, back)
        assert back[:, :20].tolist() == [expected[slot] for slot in known.tolist()]

    write_and_read()
    store.flush()
    store.close()
    store.close()
    assert open_threads() <= before  # those of stores of other tests may end meanwhile


def test_reads_beside_writes(make_store):
    """Of other slots: neither sees the other."""
    store = make_store(4096, 64)
    fixed, moving = u32(range(0, 4096, 2)), u32(range(1, 4096, 2))
    records = page_aligned(2048, store.stride)
    records[:] = 7
    store.write(fixed, records)
    stop = threading.Event()

    def keep_writing():
        mine = page_aligned(2048, store.stride)
        mine[:] = 9
        while not stop.is_set():
            store.write(moving, mine)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for _ in range(20):
            back = page_aligned(2048, store.stride)
            store.read(fixed, back)
            assert bool((back == 7).all())
    finally:
        stop.set()
        writer.join()
        store.close()


@pytest.mark.parametrize("keep", [False, True])
def test_the_file_is_left_only_where_it_is_kept(tmp_path, keep):
    store = FileStore(10, 8, path=tmp_path / "rows", keep=keep)
    records = page_aligned(2, 8)
    records[:] = [[1] * 8, [2] * 8]
    store.write(u32([1, 3]), records)
    assert (tmp_path / "rows").exists() == keep  # however the process ends
    store.close()
    if keep:
        expected = bytes(8) + bytes([1] * 8) + bytes(8) + bytes([2] * 8)
        assert (tmp_path / "rows").read_bytes() == expected


def test_a_forgotten_store_stops_its_threads(tmp_path):
    before = open_threads()
    store = FileStore(1000, 8, path=tmp_path / "rows")
    store.write(u32(range(1000)), page_aligned(1000, 8))
    assert open_threads() - before
    del store
    gc.collect()
    assert open_threads() <= before  # those of stores of other tests may end meanwhile


def test_a_full_disk_is_named_and_harms_nothing(tmp_path):
    """The limit on the size of files stands in for the disk's."""
    store = FileStore(1000, 64, path=tmp_path / "rows", num_threads=2)
    records = page_aligned(100, 64)
    records[:] = 5
    store.write(u32(range(100)), records)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 * 64, hard))
    try:
        with pytest.raises(RowmeshError, match=r"cannot write slot \d+ to .*rows: File too large; [\d,]+ bytes are fr"):
            store.write(u32(range(150, 250)), records)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    back = page_aligned(100, 64)
    store.read(u32(range(100)), back)
    assert bool((back == 5).all())
    store.write(u32(range(150, 250)), records)
    store.close()


def test_a_file_that_was_cut_is_named(tmp_path):
    store = FileStore(10, 64, path=tmp_path / "rows", keep=True)
    store.write(u32([0, 9]), page_aligned(2, 64))
    with (tmp_path / "rows").open("r+b") as file:
        file.truncate(9 * 64 + 5)
    with pytest.raises(RowmeshError, match=r"cannot read slot 9 of .*rows: it ends 59 bytes too early"):
        store.read(u32([0, 9]), page_aligned(2, 64))
    store.close()


def test_what_cannot_be_a_store_is_refused(tmp_path):
    (tmp_path / "rows").write_text("precious")
    with pytest.raises(ConfigurationError, match="rows exists already; remove it, or name another file"):
        FileStore(10, 64, path=tmp_path / "rows")
    assert (tmp_path / "rows").read_text() == "precious"
    with pytest.raises(ConfigurationError, match=r"cannot make file store .*absent/rows: No such file or directory"):
        FileStore(10, 64, path=tmp_path / "absent" / "rows")
    with pytest.raises(ConfigurationError, match="num_threads must be 1 or more, got 0"):
        FileStore(10, 64, path=tmp_path / "other", num_threads=0)

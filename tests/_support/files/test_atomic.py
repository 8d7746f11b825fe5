import errno
import os
import threading

import pytest

from rowmesh._support.faults import arm
from rowmesh._support.files.atomic import replacing_file, write_text


def test_a_file_appears_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "plan.json"
    write_text(path, "first")
    with pytest.raises(KeyError), replacing_file(path) as file:
        file.write(b"second, in part" + {}["no such key"])
    assert path.read_text() == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_a_full_disk_names_the_file_and_leaves_the_former(tmp_path):
    path = tmp_path / "plan.json"
    write_text(path, "first")
    with arm("files.write=ENOSPC"), pytest.raises(OSError) as caught:
        write_text(path, "second")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert path.read_text() == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_what_is_no_file_is_written_and_not_replaced(tmp_path):
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(fifo, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert fifo.is_fifo()
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_a_pipe_is_written_as_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "plan")
    reader.join()
    assert read == ["plan"]
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_a_folder_in_the_way_is_named(tmp_path):
    with pytest.raises(IsADirectoryError) as caught:
        write_text(tmp_path, "plan")
    assert caught.value.filename == str(tmp_path)


def test_two_writers_of_one_file_write_apart(tmp_path):
    """The last one to end wins, and neither writes into what the other has written."""
    path = tmp_path / "plan.json"
    with replacing_file(path) as first:
        first.write(b"a" * 10)
        with replacing_file(path) as second:
            second.write(b"b" * 5)
        assert path.read_bytes() == b"b" * 5
    assert path.read_bytes() == b"a" * 10
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]

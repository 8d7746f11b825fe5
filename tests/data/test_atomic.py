"""Folders appear whole or not at all."""

import errno
import fcntl
from pathlib import Path

import pytest

from rowmesh.data.atomic import replacing_folder
from rowmesh.errors import RowmeshError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def put(target, content, overwrite=False, error=None):
    with replacing_folder(target, marker="file", overwrite=overwrite) as folder:
        (folder / "file").write_text(content)
        if error is not None:
            raise error


def test_a_folder_is_written_and_replaced(tmp_path):
    target = tmp_path / "deep" / "out"
    put(target, "one")
    with pytest.raises(RowmeshError, match=r"out exists and is not empty.*--overwrite"):
        put(target, "two")
    assert (target / "file").read_text() == "one"
    put(target, "two", overwrite=True)
    assert (target / "file").read_text() == "two"
    assert names(target.parent) == ["out"]


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "out").mkdir()
    put(tmp_path / "out", "one")
    assert (tmp_path / "out" / "file").read_text() == "one"


def test_a_file_is_not_replaced(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(RowmeshError, match="not a folder"):
        put(tmp_path / "out", "one", overwrite=True)
    assert (tmp_path / "out").read_text() == "mine"


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(RowmeshError, match=r"it has no file\), so --overwrite does not replace it"):
        put(tmp_path / "out", "one", overwrite=True)
    assert names(tmp_path / "out") == ["thesis.tex"]


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt(), SystemExit()])
def test_an_error_leaves_the_old_state(tmp_path, error):
    put(tmp_path / "out", "old")
    with pytest.raises(type(error)):
        put(tmp_path / "out", "half", overwrite=True, error=error)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "old"


def test_a_full_disk_is_named(tmp_path):
    error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RowmeshError, match=r"no space left while writing .*out .*nothing was changed"):
        put(tmp_path / "out", "half", error=error)
    assert names(tmp_path) == []


def test_an_interruption_between_the_renames_is_undone(tmp_path, monkeypatch):
    put(tmp_path / "out", "old")
    rename = Path.rename

    def interrupted(self, goal):
        if self.name == ".out.partial":
            raise KeyboardInterrupt
        return rename(self, goal)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path / "out", "new", overwrite=True)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "old"


def test_what_a_crash_left_is_cleared(tmp_path):
    """A crash in the middle of writing, and one between the two renames."""
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "file").write_text("old")
    with pytest.raises(RowmeshError, match="not empty"):
        put(tmp_path / "out", "new")
    assert (tmp_path / "out" / "file").read_text() == "old"
    put(tmp_path / "out", "new", overwrite=True)
    assert names(tmp_path) == ["out"]


def test_a_folder_in_use_is_refused(tmp_path):
    with replacing_folder(tmp_path / "out", marker="file", overwrite=False) as folder:
        (folder / "file").write_text("first")
        with pytest.raises(RowmeshError, match="being written by another process"):
            put(tmp_path / "out", "second", overwrite=True)
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert names(tmp_path) == ["out"]


def test_a_lock_that_a_crash_left_does_not_block(tmp_path):
    with (tmp_path / ".out.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    put(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"]

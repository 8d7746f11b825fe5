"""Folders appear whole or not at all."""

import errno
from pathlib import Path

import pytest

from rowmesh._support.files.folder import replacing_folder
from rowmesh._support.files.manifest import Manifest
from rowmesh.errors import RowmeshError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def put(target, content, overwrite=False, error=None, kind="test data"):
    with replacing_folder(target, kind=kind, request={"content": content}, overwrite=overwrite) as folder:
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


def test_a_name_that_is_not_known_to_be_on_disk_is_said_as_it_is(tmp_path, monkeypatch):
    target = tmp_path / "out"
    put(target, "one")

    def refuse(path):
        if path == tmp_path:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rowmesh._support.files.folder.sync_folder", refuse)
    with pytest.raises(RowmeshError, match=r"out is written and in its place, but .* cannot be synced \(No space"):
        put(target, "two", overwrite=True)
    monkeypatch.undo()
    assert (target / "file").read_text() == "two"
    put(target, "three", overwrite=True)
    assert names(tmp_path) == ["out"]


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "out").mkdir()
    put(tmp_path / "out", "one")
    assert (tmp_path / "out" / "file").read_text() == "one"


def test_a_file_is_not_replaced(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(RowmeshError, match="not a folder"):
        put(tmp_path / "out", "one", overwrite=True)
    assert (tmp_path / "out").read_text() == "mine"


FOREIGN = {
    "nothing of ours": {"thesis.tex": "mine"},
    "our names": {"metadata.json": "{}", "train.arrow": "mine", "counts": "mine"},
    "a manifest of something else": {"manifest.json": '{"name": "my web application", "icons": []}'},
    "a list as a manifest": {"manifest.json": "[]"},
}


@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN)
def test_a_folder_that_is_not_ours_is_not_replaced(tmp_path, files):
    (tmp_path / "out").mkdir()
    for name, content in files.items():
        (tmp_path / "out" / name).write_text(content)
    with pytest.raises(RowmeshError, match=r"was not written by rowmesh.*so --overwrite does not replace it"):
        put(tmp_path / "out", "one", overwrite=True)
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == files


def test_a_folder_of_another_kind_is_not_replaced(tmp_path):
    put(tmp_path / "out", "one", kind="drawn data")
    with pytest.raises(RowmeshError, match="holds drawn data, not test data"):
        put(tmp_path / "out", "two", overwrite=True)
    assert (tmp_path / "out" / "file").read_text() == "one"


def test_what_someone_put_beside_our_files_is_not_removed(tmp_path):
    put(tmp_path / "out", "one")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "notes").mkdir()
    (tmp_path / "out" / "notes" / "findings.txt").write_text("mine")
    (tmp_path / "out" / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RowmeshError, match=r"holds other files too \(link, notes/findings\.txt\)"):
        put(tmp_path / "out", "two", overwrite=True)
    assert (tmp_path / "out" / "notes" / "findings.txt").read_text() == "mine"


def test_what_appears_at_the_target_meanwhile_is_not_removed(tmp_path):
    writing = replacing_folder(tmp_path / "out", kind="test data", request={}, overwrite=False)
    writing.__enter__()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(RowmeshError, match="exists and is not empty"):
        writing.__exit__(None, None, None)
    assert names(tmp_path / "out") == ["thesis.tex"]
    assert names(tmp_path) == ["out"]


def test_a_link_stays_and_its_goal_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "data")
    for content in ("one", "two"):
        put(tmp_path / "out", content, overwrite=True)
        assert (tmp_path / "disk" / "data" / "file").read_text() == content
    assert (tmp_path / "out").is_symlink()
    assert (names(tmp_path), names(tmp_path / "disk")) == (["disk", "out"], ["data"])


def test_a_link_to_something_else_replaces_nothing(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "thesis.tex").touch()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(RowmeshError, match="was not written by rowmesh"):
        put(tmp_path / "out", "one", overwrite=True)
    with pytest.raises(RowmeshError, match="not a folder"):
        put(tmp_path / "loop", "one", overwrite=True)
    assert names(tmp_path / "disk") == ["thesis.tex"]


def test_a_link_among_our_files_is_removed_and_its_goal_stays(tmp_path):
    put(tmp_path / "out", "one")
    (tmp_path / "out" / "file").rename(tmp_path / "moved")
    (tmp_path / "out" / "file").symlink_to(tmp_path / "moved")
    put(tmp_path / "out", "two", overwrite=True)
    assert (tmp_path / "moved").read_text() == "one"


@pytest.mark.parametrize("name", [".out.partial", ".out.old"])
@pytest.mark.parametrize("is_link", [False, True])
def test_what_only_has_the_name_of_our_temporary_folders_stays(tmp_path, name, is_link):
    mine = tmp_path / ("mine" if is_link else name)
    mine.mkdir()
    (mine / "thesis.tex").touch()
    if is_link:
        (tmp_path / name).symlink_to(mine)
    with pytest.raises(RowmeshError, match=rf"{name} is in the way, and rowmesh did not write it"):
        put(tmp_path / "out", "one", overwrite=True)
    assert names(mine) == ["thesis.tex"]
    assert not (tmp_path / "out").exists()


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
    put(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.old")
    (tmp_path / ".out.partial").mkdir()
    Manifest(kind="test data").write(tmp_path / ".out.partial")
    with pytest.raises(RowmeshError, match="not empty"):
        put(tmp_path / "out", "new")
    assert (tmp_path / "out" / "file").read_text() == "old"
    put(tmp_path / "out", "new", overwrite=True)
    assert names(tmp_path) == ["out"]


def test_a_folder_in_use_is_refused(tmp_path):
    with replacing_folder(tmp_path / "out", kind="test data", request={}, overwrite=False) as folder:
        (folder / "file").write_text("first")
        with pytest.raises(RowmeshError, match="being written by another process"):
            put(tmp_path / "out", "second", overwrite=True)
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert names(tmp_path) == ["out"]


def test_what_a_crash_left_before_the_first_file_was_written_is_removed(tmp_path):
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / ".manifest.json.123.4.partial").write_text("{")
    with replacing_folder(tmp_path / "out", kind="test", request={}, overwrite=False) as folder:
        (folder / "file").write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]

"""What stands in a folder is read, or refused by name; nothing is left out silently."""

import os

import pytest

from rowmesh.data import DataSource
from rowmesh.errors import DataError


def folder_with(tmp_path, name):
    for file in ("train.csv", "README", "schema.txt", name):
        (tmp_path / file).touch()
    return tmp_path


@pytest.mark.parametrize("name", ["Test.csv", "VALIDATION.csv", "Train-2.csv"])
def test_files_named_in_capitals_are_refused(tmp_path, name):
    with pytest.raises(DataError, match=rf"{name} would not be read: .*train, validation, test, in small letters"):
        DataSource.find([folder_with(tmp_path, name)], "criteo")


@pytest.mark.parametrize(
    "name",
    [
        "train.csv.bak",
        "train.csv~",
        "train.csv.md5",
        "test.csv.tmp",
        "train.csv.part",
        "train.csv.ORIG",
        "Train.csv.swp",
    ],
)
def test_backups_checksums_and_unfinished_files_are_refused(tmp_path, name):
    with pytest.raises(DataError, match=rf"{name} would not be read: its name ends as those of backups"):
        DataSource.find([folder_with(tmp_path, name)], "criteo")


def test_folders_links_and_pipes_named_after_splits_are_refused(tmp_path):
    folder_with(tmp_path, "test-1.csv")
    assert sorted(DataSource.find([tmp_path], "criteo").files) == ["test", "train"]
    (tmp_path / "test").mkdir()
    with pytest.raises(DataError, match="test would not be read: it is a folder"):
        DataSource.find([tmp_path], "criteo")
    (tmp_path / "test").rmdir()
    (tmp_path / "test.csv").symlink_to(tmp_path / "gone.csv")
    with pytest.raises(DataError, match=r"test\.csv would not be read: it is a link that leads nowhere"):
        DataSource.find([tmp_path], "criteo")
    (tmp_path / "test.csv").unlink()
    os.mkfifo(tmp_path / "test.csv")
    with pytest.raises(DataError, match=r"test\.csv would not be read: it is no file"):
        DataSource.find([tmp_path], "criteo")


def test_a_file_is_named_once(tmp_path):
    (tmp_path / "a.csv").touch()
    (tmp_path / "b.csv").symlink_to("a.csv")
    one, link = tmp_path / "a.csv", tmp_path / "b.csv"
    for inputs, options in [([one, one], {}), ([one, link], {}), ([one], {"test": [tmp_path / ".." / one]})]:
        with pytest.raises(DataError, match=r"a\.csv and .* are one file; name it once"):
            DataSource.find(inputs, "criteo", **options)
    (tmp_path / "train.csv").symlink_to("a.csv")
    (tmp_path / "test.csv").symlink_to("b.csv")
    with pytest.raises(DataError, match="are one file"):
        DataSource.find([tmp_path], "criteo")


def test_folders_stand_alone(tmp_path):
    (tmp_path / "a.csv").touch()
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    one, two, file = tmp_path / "one", tmp_path / "two", tmp_path / "a.csv"
    for inputs, options in [([one, two], {}), ([file, one], {}), ([file], {"test": [one]})]:
        with pytest.raises(DataError, match="one is a folder; give one folder and nothing else, or list files"):
            DataSource.find(inputs, "criteo", **options)

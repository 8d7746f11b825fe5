"""One process holds a lock file at a time."""

import fcntl
import os

import pytest

from rowmesh._support.files.lock import exclusive
from rowmesh.errors import RowmeshError


def test_the_second_is_refused(tmp_path):
    with exclusive(tmp_path / "lock", "taken"):
        with pytest.raises(RowmeshError, match="taken"), exclusive(tmp_path / "lock", "taken"):
            pass
        assert (tmp_path / "lock").exists()
    assert not (tmp_path / "lock").exists()
    with exclusive(tmp_path / "lock", "taken"):
        pass


def test_a_lock_that_a_crash_left_does_not_block(tmp_path):
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    with exclusive(tmp_path / "lock", "taken"):
        pass


@pytest.mark.parametrize("remade", [False, True])
def test_a_file_that_its_holder_removed_since_it_was_opened_locks_nothing(tmp_path, monkeypatch, remade):
    path, flock = tmp_path / "lock", fcntl.flock

    def removed_first(file, how):
        os.unlink(path)  # noqa: PTH108
        if remade:
            path.touch()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with pytest.raises(RowmeshError, match="taken"), exclusive(path, "taken"):
        pass

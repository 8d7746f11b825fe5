"""The checkpoints of a run in their folder: which are whole, which stay, which are damaged."""

import errno
from pathlib import Path

import pytest

from rowmesh import EmbeddingCollection, TableSpec
from rowmesh._support.faults import arm
from rowmesh._support.files.links import link_tree
from rowmesh.checkpoint import CheckpointError, read_manifest, save
from rowmesh.checkpoint.manifest import MANIFEST
from rowmesh.checkpoint.owned import BEST, remove
from rowmesh.checkpoint.series import Series, verify


@pytest.fixture
def series(tmp_path):
    return Series(tmp_path / "checkpoints")


def make(series, *steps):
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4)])
    for step in steps:
        save(series.at(step), embeddings, {"step": step})


def test_those_that_are_whole_are_found_in_order(series):
    assert series.steps() == []
    make(series, 30, 5, 1_000_000_000)
    series.at(40).mkdir()  # begun
    (series.folder / "notes").mkdir()
    assert series.steps() == [5, 30, 1_000_000_000]


def test_the_newest_and_every_so_many_steps_stay(series):
    make(series, 10, 20, 30, 35, 40)
    series.at(38).mkdir()
    series.prune(keep_last=1, keep_every=20)
    assert series.steps() == [20, 40]
    assert len(list(series.folder.iterdir())) == 2
    series.clear()
    assert not series.folder.exists()


def test_older_ones_stay_where_the_manifest_that_may_name_them_cannot_be_read(series):
    make(series, 10, 20, 30)
    (series.at(20) / MANIFEST).write_text("{")
    series.prune(keep_last=2)
    assert series.steps() == [10, 20, 30]
    make(series, 40)
    series.prune(keep_last=2)
    assert series.steps() == [30, 40]


def test_claims_of_ranks_that_were_killed_go(series):
    make(series, 3, 6)
    claim, other = series.claim_of(9, 4711), series.folder / "step-000000009.mine"
    for removal in (lambda: series.prune(2), lambda: series.remove_after(3), series.clear):
        claim.touch()
        other.touch()
        removal()
        assert not claim.exists()
        assert other.exists()
    assert series.steps() == []


def test_those_after_a_step_go_whole_or_not(series):
    make(series, 3, 6)
    series.at(9).mkdir()
    series.remove_after(3)
    assert [path.name for path in series.folder.iterdir()] == ["step-000000003"]


def test_one_that_cannot_be_removed_whole_is_not_whole(series, monkeypatch):
    make(series, 1, 2)
    monkeypatch.setattr("shutil.rmtree", lambda *of, **options: None)
    series.prune(keep_last=1)
    assert series.steps() == [2]
    assert series.at(1).exists()


def tree(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def foreign_files(folder):
    (folder / "precious.csv").write_text("1")


def foreign_manifest(folder):
    (folder / "manifest.json").write_text('{"name": "mine", "version": 3}')
    (folder / "data").mkdir()
    (folder / "data" / "0123456789abcdef").mkdir()


def foreign_folders(folder):
    (folder / "0123456789abcdef").mkdir()
    (folder / "0123456789abcdef" / "notes.txt").write_text("mine")
    (folder / "best").mkdir()
    (folder / "best" / "model.bin").write_text("mine")


REMOVALS = {
    "prune": lambda series: series.prune(keep_last=1),
    "remove_after": lambda series: series.remove_after(0),
    "clear": lambda series: series.clear(),
    "remove": lambda series: remove(series.at(1)),
}


@pytest.mark.parametrize("removal", REMOVALS.values(), ids=REMOVALS)
@pytest.mark.parametrize("put", [foreign_files, foreign_manifest, foreign_folders])
def test_what_no_checkpoint_is_stays_whatever_it_is_called(series, removal, put):
    series.at(1).mkdir(parents=True)
    put(series.at(1))
    before = tree(series.at(1))
    assert series.steps() == []
    make(series, 2)
    removal(series)
    assert tree(series.at(1)) == before


@pytest.mark.parametrize("removal", REMOVALS.values(), ids=REMOVALS)
@pytest.mark.parametrize("is_whole", [True, False])
def test_of_a_checkpoint_with_something_else_in_it_that_stays(series, removal, is_whole):
    make(series, 1)
    link_tree(series.at(1), series.at(1) / BEST)
    foreign_files(series.at(1))
    if not is_whole:
        (series.at(1) / MANIFEST).unlink()
        (series.at(1) / f".{MANIFEST}.4711.0.partial").touch()
    assert series.steps() == ([1] if is_whole else [])
    make(series, 2)
    removal(series)
    assert tree(series.at(1)) == ["precious.csv"]


def test_a_checkpoint_replaces_no_foreign_manifest(series):
    series.at(1).mkdir(parents=True)
    foreign_manifest(series.at(1))
    before = tree(series.at(1))
    with pytest.raises(CheckpointError, match=r"step-000000001/manifest.json is in the way, and no checkpoint's; move"):
        make(series, 1)
    assert tree(series.at(1)) == before


@pytest.mark.parametrize("removal", REMOVALS.values(), ids=REMOVALS)
def test_a_checkpoint_that_was_moved_and_linked_keeps_its_files(series, tmp_path, removal):
    make(series, 1)
    series.at(1).rename(tmp_path / "moved")
    series.at(1).symlink_to(tmp_path / "moved")
    assert series.steps() == [1]
    assert verify(series.at(1))[0] == 3
    make(series, 2)
    removal(series)
    assert not series.at(1).is_symlink()
    assert verify(tmp_path / "moved")[0] == 3


def test_files_that_were_moved_and_linked_stay(series, tmp_path):
    make(series, 1)
    files = series.at(1) / read_manifest(series.at(1)).folder
    files.rename(tmp_path / "moved")
    files.symlink_to(tmp_path / "moved")
    (series.at(1) / MANIFEST).rename(tmp_path / "manifest")
    (series.at(1) / MANIFEST).symlink_to(tmp_path / "manifest")
    before = tree(tmp_path / "moved")
    assert verify(series.at(1))[0] == 3
    series.clear()
    assert not series.folder.exists()
    assert tree(tmp_path / "moved") == before
    assert (tmp_path / "manifest").exists()


def test_links_to_something_else_stay(series, tmp_path):
    (tmp_path / "mine").mkdir()
    foreign_manifest(tmp_path / "mine")
    make(series, 3)
    series.at(1).symlink_to(tmp_path / "mine")
    series.at(2).symlink_to(series.at(2))  # a circle
    (series.at(4) / MANIFEST).mkdir(parents=True)
    assert series.steps() == [3]
    series.prune(keep_last=1)
    assert series.steps() == [3]
    assert series.at(1).is_symlink()
    assert series.at(2).is_symlink()
    assert (series.at(4) / MANIFEST).is_dir()
    assert tree(tmp_path / "mine") == ["data", "data/0123456789abcdef", "manifest.json"]


@pytest.mark.parametrize("refused", ["folder", "manifest"])
def test_what_cannot_be_removed_loses_no_part(series, tmp_path, monkeypatch, refused):
    make(series, 1, 2)
    if refused == "folder":
        series.at(1).rename(tmp_path / "moved")
        series.at(1).symlink_to(tmp_path / "moved")
    place = series.at(1) if refused == "folder" else series.at(1) / MANIFEST
    unlink = Path.unlink

    def refuse(path, **options):
        if path == place:
            raise PermissionError(errno.EPERM, "no")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refuse)
    series.prune(keep_last=1)
    assert series.steps() == [1, 2]
    assert verify(series.at(1))[0] == 3


def test_a_full_disk_leaves_no_whole_one(series):
    with arm("checkpoint.publish=ENOSPC"), pytest.raises(CheckpointError):
        make(series, 1)
    assert series.steps() == []


@pytest.mark.parametrize("of_best", [False, True])
def test_a_flipped_bit_is_found(series, of_best):
    make(series, 1, 2)
    link_tree(series.at(1), series.at(2) / BEST)
    count, num_bytes = verify(series.at(2))
    assert count == 6
    assert num_bytes > 2 * 10 * 4 * 4
    folder = series.at(2) / BEST if of_best else series.at(2)
    path = folder / read_manifest(folder).folder / "item.0.values.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"item.0.values.npy is damaged: bytes 0 to \d+ are not what was written"):
        verify(series.at(2))
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        verify(series.at(2))


def test_a_linked_folder_stays_when_the_other_goes(series):
    make(series, 1)
    link_tree(series.at(1), series.folder / "other")
    series.prune(keep_last=1)
    make(series, 2)
    series.prune(keep_last=1)
    assert verify(series.folder / "other")[0] == 3

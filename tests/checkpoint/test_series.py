"""The checkpoints of a run in their folder: which are whole, which stay, which are damaged."""

import pytest

from rowmesh import EmbeddingCollection, TableSpec
from rowmesh.checkpoint import CheckpointError, read_manifest, save
from rowmesh.checkpoint.manifest import MANIFEST
from rowmesh.checkpoint.series import BEST, Series, verify
from rowmesh.faults import arm
from rowmesh.files.links import link_tree


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
    for remove in (lambda: series.prune(2), lambda: series.remove_after(3), series.clear):
        claim.touch()
        other.touch()
        remove()
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

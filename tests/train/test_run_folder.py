import pytest

from rowmesh.errors import RowmeshError
from rowmesh.train.run_folder import Claim, RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "a")


def write_and_fail(folder, claim=None):
    if claim:
        claim.keep()
    folder.config.write_text("")
    folder.model.mkdir()
    raise RowmeshError("too late")


def test_a_finished_run_stays_and_is_not_overwritten_by_accident(folder):
    with Claim(folder, overwrite=False) as claim:
        claim.keep()
        folder.metrics.write_text("{}")
    assert [path.name for path in folder.path.iterdir()] == ["metrics.jsonl"]
    with (
        pytest.raises(RowmeshError, match=r"runs/a holds a run .*run.folder=….*--overwrite"),
        Claim(folder, overwrite=False),
    ):
        pass
    assert folder.metrics.exists()
    with pytest.raises(RowmeshError, match="no data"), Claim(folder, overwrite=True):
        raise RowmeshError("no data")
    assert folder.metrics.exists(), "a run that cannot start takes nothing away"
    with Claim(folder, overwrite=True) as claim:
        claim.keep()
        assert not folder.metrics.exists()


def test_a_run_that_fails_before_it_starts_leaves_nothing(folder):
    with pytest.raises(RowmeshError, match="too late"), Claim(folder, overwrite=False):
        write_and_fail(folder)
    assert not folder.path.exists()


def test_a_run_that_fails_later_keeps_its_metrics(folder):
    with pytest.raises(RowmeshError, match="too late"), Claim(folder, overwrite=False) as claim:
        write_and_fail(folder, claim)
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.toml", "model"]


def test_two_runs_exclude_each_other(folder):
    with (
        Claim(folder, overwrite=False),
        pytest.raises(RowmeshError, match="another run is writing"),
        Claim(folder, overwrite=True),
    ):
        pass
    with Claim(folder, overwrite=False):
        pass


def test_only_runs_are_overwritten(folder):
    folder.path.mkdir(parents=True)
    (folder.path / "thesis.tex").write_text("")
    with (
        pytest.raises(RowmeshError, match=r"what no run wrote \(thesis.tex\)"),
        Claim(folder, overwrite=True),
    ):
        pass
    assert [path.name for path in folder.path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(RowmeshError, match="Not a directory"),
        Claim(RunFolder(tmp_path / "file/x"), overwrite=True),
    ):
        pass

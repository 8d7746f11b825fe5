"""A rank that dies while ranks set up: the others name it and leave nothing, long before torchrun would kill them."""

import re
from pathlib import Path

import pytest

import rowmesh
from tests.support.runs import prepare_run, start


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    return prepare_run(tmp_path_factory.mktemp("clicks"))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["mesh.connect", "mesh.subgroup", "train.plan", "train.build", "train.built"])
@pytest.mark.parametrize("transport", ["one_sided", "collective"])
def test_a_rank_that_dies_is_named_and_nothing_stays(config_file, tmp_path, point, transport):
    folder = tmp_path / "runs" / "a"
    options = [f"parallel.transport={transport}", f"run.folder={folder}"]
    process = start(config_file, *options, ranks=2, faults=f"{point}@1,rank1=kill")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Unable to shutdown process" not in err, "torchrun killed a rank that did not end"
    assert str(Path(rowmesh.__file__).parent) not in err, "a traceback"
    if point != "mesh.connect":  # before that a rank knows no other
        assert re.search(r"\(rank 0\): error: rank 1 \(process \d+\) died while ", err), err
    assert not folder.parent.exists()

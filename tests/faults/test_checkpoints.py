"""Faults at every write of a checkpoint: the model of before can be loaded after each, and so can a later one."""

import os
import resource
import signal
import subprocess
import sys

import pytest
import torch

from rowmesh import AdaGrad, EmbeddingCollection, TableSpec
from rowmesh._support.faults import arm
from rowmesh.checkpoint import CheckpointError, CheckpointWriteError, load, save
from rowmesh.tables import TensorTrain
from tests.support.ranks import RankError

TABLES = [
    TableSpec(name="item", num_rows=40, dim=4, optimizer=AdaGrad()),
    TableSpec(
        name="user", num_rows=60, dim=4, optimizer=AdaGrad(), storage="tensor_train", tensor_train=TensorTrain(rank=2)
    ),
]
POINTS = [
    "checkpoint.prepare",
    *(f"checkpoint.write_rows@{number}" for number in (1, 2)),
    *(f"checkpoint.write_cores@{number}" for number in (1, 6)),
    "checkpoint.write_dense",
    *(f"files.write@{number}" for number in (1, 5, 9, 10)),  # content is there, and not on disk
    "checkpoint.sync",
    "checkpoint.publish",
]
AFTERWARDS = ["files.replaced", "checkpoint.published", "checkpoint.remove_former"]  # the new model is whole by then


def collection(seed, mesh=None):
    return EmbeddingCollection(TABLES, mesh=mesh, seed=seed)


def rows(embeddings):
    return torch.cat([piece.values for piece in embeddings.local_rows("item")]).clone()


def loaded(folder, mesh=None):
    """The seed of the model in a folder, found by its rows, and the number beside it."""
    found = collection(99, mesh)
    number = load(folder, found)["seed"]
    found.barrier()
    assert torch.equal(rows(found), rows(collection(number, mesh)))
    return number


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "model", collection(1), {"seed": 1})
    return tmp_path / "model"


@pytest.mark.parametrize("point", [*POINTS, *AFTERWARDS[:2]])
def test_a_full_disk_leaves_a_model_that_can_be_loaded(folder, point):
    with arm(f"{point}=ENOSPC"), pytest.raises(CheckpointWriteError, match=r"rank 0 cannot write .*No space left"):
        save(folder, collection(2), {"seed": 2})
    assert loaded(folder) == (2 if point in AFTERWARDS else 1)
    assert len(list(folder.iterdir())) == (3 if point in AFTERWARDS else 2)
    save(folder, collection(3), {"seed": 3})
    assert loaded(folder) == 3
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("is_first", [True, False])
def test_a_folder_that_cannot_be_synced_is_said_as_it_is(tmp_path, is_first):
    """The new manifest has its place by then, and nobody knows whether it is on disk: the files of both stay."""
    folder = tmp_path / "model"
    if not is_first:
        save(folder, collection(1), {"seed": 1})
    said = r"rank 0 cannot write .*Input/output error.*manifest had its place .*the new one is read, and the files"
    with arm("files.replaced=EIO"), pytest.raises(CheckpointWriteError, match=said) as error:
        save(folder, collection(2), {"seed": 2})
    assert "the former checkpoint stays" not in str(error.value)
    assert loaded(folder) == 2
    assert len([path for path in folder.iterdir() if path.is_dir()]) == (1 if is_first else 2)
    with arm("files.write@6=EIO"), pytest.raises(CheckpointWriteError, match="; the former checkpoint stays until"):
        save(folder, collection(3), {"seed": 3})
    assert loaded(folder) == 2


def test_a_former_model_that_cannot_be_removed_does_no_harm(folder):
    with arm("checkpoint.remove_former=EIO"):
        save(folder, collection(2), {"seed": 2})
    assert loaded(folder) == 2


def test_all_ranks_go_on_where_the_first_cannot_remove_the_former_model(ranks, tmp_path):
    for _ in range(2):
        faults = {0: "checkpoint.remove_former=EIO"}
        assert ranks.run(save_with_faults, tmp_path / "model", faults, world_size=2) == [None, None]
    assert ranks.run(load_on, tmp_path / "model", world_size=2) == [2, 2]


def test_what_is_no_fault_of_the_system_is_not_said_to_pass(folder):
    with arm("checkpoint.write_rows=raise"), pytest.raises(CheckpointError, match="injected") as caught:
        save(folder, collection(2), {"seed": 2})
    assert not isinstance(caught.value, CheckpointWriteError)


def save_with_fault(mesh, folder, faults):
    """Rank 1 alone meets the fault; returns what each rank said."""
    return save_with_faults(mesh, folder, {1: faults})


def save_with_faults(mesh, folder, faults):
    """Ranks meet faults of their own; returns what each said."""
    with arm(faults.get(mesh.rank, "")):
        try:
            save(folder, collection(2, mesh), {"seed": 2}, peers=mesh.peers)
        except CheckpointWriteError as error:
            return str(error)
        return None


def load_on(mesh, folder):
    return loaded(folder, mesh)


def save_on(mesh, folder, seed):
    save(folder, collection(seed, mesh), {"seed": seed}, peers=mesh.peers)


@pytest.mark.parametrize(
    "point", ["checkpoint.write_rows@1", "checkpoint.write_rows@2", "files.write", "checkpoint.sync"]
)
def test_all_ranks_fail_where_another_finds_no_room(folder, ranks, point):
    said = ranks.run(save_with_fault, folder, f"{point}=ENOSPC", world_size=2)
    assert said[0] == said[1]
    assert "rank 1 cannot write the checkpoint" in said[0]
    assert ranks.run(load_on, folder, world_size=2) == [1, 1]
    assert len(list(folder.iterdir())) == 2
    ranks.run(save_on, folder, 3, world_size=2)
    assert ranks.run(load_on, folder, world_size=2) == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["checkpoint.write_rows@2", "checkpoint.sync"])
def test_a_rank_that_dies_leaves_the_model_of_before(folder, ranks, point):
    with pytest.raises(RankError) as error:
        ranks.run(save_with_fault, folder, f"{point}=kill", world_size=2)
    assert "exit code -9" in error.value.failed[1]
    assert loaded(folder) == 1


FORKS = """
import os, signal, sys
from pathlib import Path
from tests.faults.test_checkpoints import AFTERWARDS, POINTS, collection, loaded, save
from rowmesh._support.faults import arm

folder = Path(sys.argv[1])
save(folder, collection(1), {"seed": 1})
for point in [*POINTS, *AFTERWARDS]:
    if not (child := os.fork()):
        with arm(f"{point}=kill"):
            save(folder, collection(2), {"seed": 2})
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, point
    print(point, loaded(folder), flush=True)
    save(folder, collection(1), {"seed": 1})
    assert len(list(folder.iterdir())) == 2
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_a_model_that_can_be_loaded(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found == {**dict.fromkeys(POINTS, "1"), **dict.fromkeys(AFTERWARDS, "2")}


def test_what_torch_says_of_a_full_disk_is_what_the_system_said(folder):
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointWriteError, match="File too large"):
            save(folder, collection(2), {"seed": 2, "network": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert loaded(folder) == 1

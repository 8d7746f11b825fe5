"""How runs end that cannot go on: in time, naming the failed rank, leaving nothing behind."""

from pathlib import Path

import pytest

from rowmesh import Mesh
from rowmesh.errors import ConfigurationError, PeerError
from tests.support import behaviour
from tests.support.ranks import RankError, RankPool, is_running

VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def shared_files():
    return {path.name for path in Path("/dev/shm").glob("*") if path.name.startswith(("rowmesh", "torch"))}


@pytest.mark.parametrize(
    "transport, where", [("one_sided", "update"), ("collective", "update"), ("collective", "forward")]
)
def test_a_rank_that_dies_in_a_step(transport, where):
    """The others end with an error that names it, long before the timeout, and nothing stays."""
    pool = RankPool(mesh_timeout_s=60.0, world_size=3)
    before = shared_files()
    try:
        pids = pool.run(behaviour.process, world_size=3)
        with pytest.raises(RankError) as caught:
            pool.run(behaviour.outlive_a_peer, transport, 1, where, world_size=3)
    finally:
        pool.close()
    assert "exit code -9" in caught.value.failed[1]
    assert set(caught.value.returned) == {0, 2}
    for rank, (name, message, elapsed_s) in caught.value.returned.items():
        assert name == "PeerError"
        assert message.startswith(f"rank {rank}: ")
        assert "rank 1 (process" in message
        assert elapsed_s < 30
    assert not any(is_running(pid) for pid in pids)
    assert shared_files() == before


@pytest.mark.parametrize(
    "transport, where",
    [
        pytest.param("one_sided", "step", marks=pytest.mark.slow),
        pytest.param("collective", "step", marks=pytest.mark.slow),
        ("auto", "start"),
    ],
)
def test_a_rank_that_does_not_come(transport, where):
    """A waiting rank names the missing rank, and no other rank that waits."""
    pool = RankPool(world_size=3)
    try:
        left = pool.run(behaviour.leave_the_others, transport, 1.0, where, world_size=3)
    finally:
        pool.close()
    assert left[1][0] == "nothing"
    for rank in (0, 2):
        name, message, elapsed_s = left[rank]
        assert name == "PeerError"
        assert message.startswith(f"rank {rank}: waited in vain for rank 1 (process")
        assert ", alive); every rank must call forward and step equally often, and within the timeout of 1 s" in message
        assert 1.0 <= elapsed_s < 10


@pytest.mark.parametrize(
    "transport, verb, who",
    [
        ("collective", "forward", "rank 0 is in step 2, rank 1 is in forward 3, rank 2 is in step 2"),
        ("collective", "step", "rank 0 is in forward 2, rank 1 is in step 2, rank 2 is in forward 2"),
        ("one_sided", "forward", "before step 2 rank 0 made 2, rank 1 made 3, rank 2 made 2 forward passes"),
        ("one_sided", "step", "before step 2 rank 0 made 2, rank 1 made 1, rank 2 made 2 forward passes"),
    ],
)
def test_ranks_out_of_step(ranks, transport, verb, who):
    """Every rank gets an error at once that says what each rank did."""
    for rank, message in enumerate(ranks.run(behaviour.fall_out_of_step, transport, verb, world_size=3)):
        assert message == (
            f"PeerError: rank {rank}: ranks are out of step: {who}; every rank must call forward and step equally "
            "often and in the same order"
        )


@pytest.mark.parametrize("missing", [{"MASTER_PORT"}, {"RANK"}, {"WORLD_SIZE"}, {"MASTER_ADDR", "MASTER_PORT"}])
def test_some_of_the_variables_of_torchrun(monkeypatch, missing):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
        if name in missing:
            monkeypatch.delenv(name)
    with pytest.raises(ConfigurationError, match=f"{', '.join(sorted(missing))} are not; launch with torchrun"):
        Mesh.connect()


def test_nobody_to_join(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PeerError, match=r"rank 1 of 2 could not join at 127.0.0.1:1 within 1 s"):
        Mesh.connect(timeout_s=1.0)

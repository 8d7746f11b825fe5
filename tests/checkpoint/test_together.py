import pytest

from rowmesh.checkpoint.together import on_every_rank
from rowmesh.errors import CheckpointError, UnreadableError
from rowmesh.mesh.peers import Peers


def fail_on_rank_1(mesh, kind):
    def action():
        if mesh.rank == 1:
            raise kind("no room")
        return mesh.rank

    try:
        return on_every_rank(mesh.peers, action, "testing")
    except Exception as error:
        return type(error).__name__, str(error)


def test_every_rank_gets_its_own_result(ranks):
    assert ranks.run(fail_on_rank_1, KeyError, world_size=1) == [0]
    assert on_every_rank(Peers(), lambda: 3, "testing") == 3


@pytest.mark.parametrize("kind", [CheckpointError, UnreadableError])
def test_where_it_fails_on_one_it_fails_on_all(ranks, kind):
    assert ranks.run(fail_on_rank_1, kind, world_size=2) == [(kind.__name__, "no room")] * 2


def test_no_rank_waits_for_one_that_failed_otherwise(ranks):
    others, own = ranks.run(fail_on_rank_1, MemoryError, world_size=2)
    assert others == ("CheckpointError", "rank 1: MemoryError: no room")
    assert own == ("MemoryError", "no room")


def abort(mesh):
    """Each rank, while no other waits for it: the error is not that of a broken connection."""
    peers = mesh.with_process_group("aborted in a test").peers
    mesh.peers.gather(1, "testing")  # a rank may be connected while another still connects
    peers.abort()
    try:
        peers.gather(1, "testing")
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ranks_whose_group_is_aborted_stop(ranks):
    assert ranks.run(abort, world_size=2) == ["stopped testing: something else failed"] * 2

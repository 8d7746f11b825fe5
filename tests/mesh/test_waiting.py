"""Waiting for collectives: values of all ranks, and errors that name ranks that do not come."""

import threading
import time
from dataclasses import replace

import pytest

from rowmesh.errors import PeerError
from rowmesh.mesh import Mesh
from rowmesh.mesh.liveness import LivenessCheck
from rowmesh.mesh.waiting import barrier, broadcast_object, gather_objects
from tests.support.ranks import RankPool


def gather(mesh):
    """Objects of different sizes."""
    return gather_objects(mesh, {"rank": mesh.rank, "text": "x" * 1000 * mesh.rank}, "testing")


@pytest.mark.parametrize("world_size", [2, 3])
def test_values_of_all_ranks_in_their_order(ranks, world_size):
    expected = [{"rank": rank, "text": "x" * 1000 * rank} for rank in range(world_size)]
    assert ranks.run(gather, world_size=world_size) == [expected] * world_size


def test_one_rank_has_its_own():
    assert gather_objects(Mesh(), 5, "testing") == [5]
    barrier(Mesh(), "testing")


def come_late(mesh, delay_s):
    """Ranks other than 0 come late, but in time; ranks that waited leave no answer to the liveness check."""
    mesh = replace(mesh, timeout_s=4.0)
    if mesh.rank:
        time.sleep(delay_s)
    barrier(mesh, "testing")
    time.sleep(0.2)
    return LivenessCheck(mesh.rank, range(mesh.world_size), mesh.group).absent()


def test_ranks_that_come_late(ranks):
    assert ranks.run(come_late, 1.5, world_size=2) == [[0, 1], [0, 1]]


def test_messages_tell_hosts_apart():
    mesh = Mesh(rank=0, world_size=3, hosts=(0, 0, 1), pids=(5, 6, 7), timeout_s=9.0)
    assert mesh.not_come([1, 2]) == (
        "waited in vain for rank 1 (process 6, alive), rank 2 (process 7 on another host); every rank must call "
        "forward and step equally often, and within the timeout of 9 s"
    )


def broadcast(mesh):
    """Only rank 0's value counts."""
    return broadcast_object(mesh, ["x" * 10_000 * (1 - mesh.rank), mesh.rank], "testing")


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_has_the_value_of_rank_0(ranks, world_size):
    assert ranks.run(broadcast, world_size=world_size) == [["x" * 10_000, 0]] * world_size
    assert broadcast_object(Mesh(), 5, "testing") == 5


def cancelled_wait(mesh):
    """Rank 1 does not come while rank 0 waits for it and is cancelled; then both meet again."""
    own = mesh.with_process_group("tables")
    own.cancellation.event = event = threading.Event()
    message = ""
    if mesh.rank == 0:
        threading.Timer(0.5, event.set).start()
        began = time.monotonic()
        try:
            barrier(own, "testing")
        except PeerError as error:
            message = str(error)
        assert time.monotonic() - began < 5
    barrier(mesh, "testing")  # the group of the mesh itself is as it was
    return message, LivenessCheck(mesh.rank, range(mesh.world_size), mesh.group).absent()


def test_a_wait_can_be_cancelled():
    pool = RankPool(world_size=2)
    try:
        results = pool.run(cancelled_wait, world_size=2)
    finally:
        pool.close()
    assert results[0][0] == "stopped testing: something else failed"
    assert results[0][1] == [0, 1], "old answers to the liveness check stay"

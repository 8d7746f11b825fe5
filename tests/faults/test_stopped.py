"""Ranks that are stopped and continued: they are not called dead, and a stop that all share does no harm."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from rowmesh.errors import PeerError
from rowmesh.mesh.processes import state_of
from rowmesh.mesh.waiting import barrier
from tests.support.ranks import RankPool

TIMEOUT_S = 8.0
# Rank 0 is held when it begins to look for the others, and after its next look. No look counts for more than a second,
# however long it takes, so that four of them cannot use up the timeout on a machine that is busy.
MEET = f"""
from dataclasses import replace
from rowmesh import Mesh
import sys
from rowmesh._support.faults import arm, reach
from rowmesh.mesh import patience
from rowmesh.mesh.waiting import barrier
patience._SLACK_S = 0.0
with Mesh.connect(60.0) as mesh:
    barrier(mesh, "testing")
    print("met", flush=True)
    reach("test.late")
    open(f"{{sys.argv[1]}}/past{{mesh.rank}}", "w").close()
    with arm(f"mesh.look@1,rank0=hold:{{sys.argv[1]}}/first; mesh.look@2,rank0=hold:{{sys.argv[1]}}/second"):
        barrier(replace(mesh, timeout_s={TIMEOUT_S}), "testing")
    print("met again", flush=True)
"""


def wait_for_a_stopped_rank(mesh):
    """Rank 1 stops itself; rank 0 waits for it in vain, and then continues it."""
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    while state_of(mesh.pids[1]) != "stopped":
        time.sleep(0.01)
    try:
        barrier(replace(mesh, timeout_s=1.0), "testing")
    except PeerError as error:
        return str(error)
    finally:
        os.kill(mesh.pids[1], signal.SIGCONT)
    return "nothing"


@pytest.mark.slow
def test_a_stopped_rank_is_named_as_that():
    pool = RankPool(world_size=2)
    try:
        message, _ = pool.run(wait_for_a_stopped_rank, world_size=2)
    finally:
        pool.close()
    assert "rank 0: waited in vain for rank 1 (process" in message
    assert ", stopped: `kill -CONT" in message
    assert re.search(r"within the timeout of 1 s \(this rank waited \d", message)
    assert message.endswith("while testing")


def wait_for(ranks, *files):
    """Until all files are there, while all ranks run."""
    while not all(file.exists() for file in files):
        assert [rank.poll() for rank in ranks] == [None] * len(ranks), [rank.communicate() for rank in ranks]
        time.sleep(0.005)


@pytest.mark.slow
def test_ranks_that_are_all_stopped_longer_than_the_timeout_go_on(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEET, str(tmp_path)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | common | {"RANK": str(rank), "ROWMESH_FAULTS": f"test.late,rank1=hold:{tmp_path}/held"},
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout
            assert rank.stdout.readline() == "met\n", rank.communicate()
        wait_for(ranks, tmp_path / "held", tmp_path / "first")
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        time.sleep(TIMEOUT_S + 3)  # what is tested is that this time passes
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        (tmp_path / "first.go").touch()
        wait_for(ranks, tmp_path / "second")  # it has looked at the time again, while rank 1 does not come yet
        (tmp_path / "held.go").touch()
        wait_for(ranks, tmp_path / "past1")
        (tmp_path / "second.go").touch()
        for rank in ranks:
            out, err = rank.communicate(timeout=90)
            assert (out, rank.returncode) == ("met again\n", 0), err
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()

"""Ranks that are stopped and continued: they are not called dead, and a stop that all share does no harm."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from rowmesh.errors import PeerError
from rowmesh.mesh.processes import state_of
from rowmesh.mesh.waiting import barrier
from tests.support.ranks import RankPool

TIMEOUT_S = 8.0
MEET = f"""
from dataclasses import replace
from rowmesh import Mesh
import sys
from rowmesh.faults import arm, reach
from rowmesh.mesh.waiting import barrier
with Mesh.connect(60.0) as mesh:
    barrier(mesh, "testing")
    print("met", flush=True)
    reach("test.late")
    with arm(f"mesh.wait_long@1=hold:{{sys.argv[1]}}"):
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
    pool = RankPool()
    try:
        message, _ = pool.run(wait_for_a_stopped_rank, world_size=2)
    finally:
        pool.close()
    assert "rank 0: waited in vain for rank 1 (process" in message
    assert ", stopped: `kill -CONT" in message
    assert re.search(r"within the timeout of 1 s \(this rank waited \d", message)
    assert message.endswith("while testing")


@pytest.mark.slow
def test_ranks_that_are_all_stopped_longer_than_the_timeout_go_on(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEET, f"{tmp_path}/waiting{rank}"],
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
        (tmp_path / "waiting0.go").touch()
        while not (tmp_path / "held").exists() or not (tmp_path / "waiting0").exists():
            assert ranks[0].poll() is None
            assert ranks[1].poll() is None
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        time.sleep(TIMEOUT_S + 3)  # what is tested is that this time passes
        slept = psutil.Process(ranks[0].pid).num_ctx_switches().voluntary
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        while ranks[0].poll() is None and psutil.Process(ranks[0].pid).num_ctx_switches().voluntary < slept + 5:
            time.sleep(0.01)  # until rank 0 has looked at the time again, while rank 1 does not come yet
        (tmp_path / "held.go").touch()
        for rank in ranks:
            out, err = rank.communicate(timeout=90)
            assert (out, rank.returncode) == ("met again\n", 0), err
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()

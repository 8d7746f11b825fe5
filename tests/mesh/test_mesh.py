"""Mesh: joining as torchrun launches, and detecting dead ranks. Failures to join are in tests/test_failures.py."""

import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from rowmesh import Mesh
from rowmesh.errors import ConfigurationError
from rowmesh.mesh.mesh import _check_backend

JOIN = """
import os
from rowmesh import Mesh
with Mesh.connect(timeout_s=60.0) as mesh:
    assert mesh.pids[mesh.rank] == os.getpid()
    print(mesh.rank, mesh.world_size, mesh.hosts, mesh.is_one_host, mesh.dead_ranks(), len(set(mesh.pids)))
mesh.close()
"""


def test_alone():
    with Mesh.connect() as mesh:
        assert (mesh.rank, mesh.world_size, mesh.hosts, mesh.group) == (0, 1, (0,), None)
        assert mesh.is_one_host
        assert mesh.dead_ranks() == []


def test_two_processes_join_as_torchrun_launches_them():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error::UserWarning", "-c", JOIN],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(processes):
        out, errors = process.communicate(timeout=90)
        assert out.strip() == f"{rank} 2 (0, 0) True [] 2", errors
        assert process.returncode == 0, errors


def test_sees_processes_that_are_gone_but_not_those_of_other_hosts():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    mesh = Mesh(rank=1, world_size=4, hosts=(0, 0, 0, 1), pids=(process.pid, os.getpid(), os.getppid(), process.pid))
    assert mesh.dead_ranks() == [0]
    assert not mesh.is_one_host


def test_sees_a_zombie():
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, but not reaped
    try:
        assert Mesh(rank=0, world_size=2, hosts=(0, 0), pids=(os.getpid(), process.pid)).dead_ranks() == [1]
    finally:
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("cause", [RuntimeError("connection reset")])
def test_errors_of_collectives_name_the_dead(cause):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    mesh = Mesh(rank=0, world_size=2, hosts=(0, 0), pids=(os.getpid(), process.pid), timeout_s=7.0)
    text = str(mesh.peer_error("counting", cause))
    assert f"rank 0: rank 1 (process {process.pid}) died while counting" in text
    assert "unless it came to its end: all ranks must take part equally often" in text  # as this process did
    alive = Mesh(rank=0, world_size=2, hosts=(0, 1), pids=(os.getpid(), 1), timeout_s=7.0)
    assert str(alive.peer_error("counting", cause)) == (
        "rank 0: a connection between ranks broke while counting; a rank ended or stopped waiting, and its own output "
        "says why: connection reset"
    )


class NoCpu:
    """A process group without a backend for the CPU, as NCCL's is."""

    def _get_backend(self, device):
        raise RuntimeError(f"No backend type associated with device type {device}")


def test_a_process_group_that_cannot_move_cpu_memory_is_refused():
    with pytest.raises(ConfigurationError, match=r"moves CPU tensors with nothing.*cpu:gloo,cuda:nccl"):
        _check_backend(NoCpu())


def test_the_default_process_group_is_checked():
    dist.init_process_group("fake", rank=0, world_size=2, store=fake_pg.FakeStore())
    try:
        with pytest.raises(ConfigurationError, match=r"moves CPU tensors with fake, and rowmesh needs gloo.*cpu:gloo"):
            Mesh.connect()
    finally:
        dist.destroy_process_group()

"""Ranks that are gone or stopped end the waiting; one that takes long is named."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from rowmesh.errors import PeerError
from rowmesh.mesh import Mesh, watchdog
from rowmesh.mesh.processes import RankProcesses


def test_a_rank_that_dies_while_others_connect_is_named(monkeypatch):
    monkeypatch.setattr(watchdog, "CERTAIN_S", 0.2)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    mesh = Mesh(rank=0, world_size=2, hosts=(0, 0), pids=(os.getpid(), process.pid))
    never = threading.Event()
    try:
        with pytest.raises(PeerError, match=rf"rank 0: rank 1 \(process {process.pid}\) died while connecting;"):
            mesh.run_interruptibly(never.wait, "connecting")
    finally:
        never.set()


def test_a_rank_that_is_stopped_for_the_timeout_is_named():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mesh = Mesh(rank=0, world_size=2, hosts=(0, 0), pids=(os.getpid(), process.pid), timeout_s=0.3)
    never = threading.Event()
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        said = (
            rf"^rank 0: waited in vain for rank 1 \(process {process.pid}, stopped.* while writing \(the timeout is 0 s"
        )
        with pytest.raises(PeerError, match=said):
            mesh.run_interruptibly(never.wait, "writing")
    finally:
        never.set()
        process.kill()
        process.communicate()


class Calls:
    """A liveness check at which rank 1 is missing."""

    def __init__(self):
        self.said = []

    def answer(self):
        self.said.append("here")

    def withdraw(self):
        self.said.append("gone on")

    def absent(self):
        return [1]


def test_one_that_takes_long_is_named_once_and_waited_for(monkeypatch, caplog):
    """Nothing is wrong with a slow disk."""
    calls, processes = Calls(), RankProcesses(rank=0, hosts=(0, 0), pids=(os.getpid(), os.getpid()))
    look = watchdog.Watchdog(processes, calls, "writing", timeout_s=5.0, lost=threading.Event())
    monkeypatch.setattr(look.watch, "read", iter([0.1, 1.0, 4.9, 5.0, 5.1, 60.0]).__next__)
    for said in ([], ["here"], ["here"]):
        look()
        assert calls.said == said
    assert not caplog.messages
    for _ in range(3):
        look()
    (text,) = caplog.messages
    assert f"for rank 1 (process {os.getpid()}, alive), and goes on" in text
    look.close()
    assert calls.said == ["here", "gone on"]

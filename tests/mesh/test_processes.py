import os
import signal
import subprocess
import sys

from rowmesh.mesh import Mesh
from rowmesh.mesh.processes import state_of


def test_a_stopped_process_is_neither_alive_nor_gone():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mesh = Mesh(rank=0, world_size=2, hosts=(0, 0), pids=(os.getpid(), process.pid), timeout_s=9.0)
    try:
        assert state_of(process.pid) == "alive"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert state_of(process.pid) == "stopped"
        assert mesh.dead_ranks() == []
        advice = f"rank 1 (process {process.pid}, stopped: `kill -CONT {process.pid}` continues it); every rank"
        assert mesh.not_come([1]).startswith(f"waited in vain for {advice}")
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert state_of(process.pid) == "alive"
    finally:
        process.kill()
        process.communicate()
    assert state_of(process.pid) == "gone"

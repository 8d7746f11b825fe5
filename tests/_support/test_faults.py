import errno
import os
import signal
import subprocess
import sys

import pytest

from rowmesh._support.faults import arm, reach

CODE = (
    "from rowmesh._support.faults import reach; reach('a.b'); print('once', flush=True); reach('a.b'); print('twice')"
)


def start(faults):
    return subprocess.run(
        [sys.executable, "-c", CODE], env=os.environ | {"ROWMESH_FAULTS": faults}, capture_output=True, text=True
    )


def test_nothing_happens_where_nothing_is_armed():
    reach("a.b")
    with arm("a.c=ENOSPC"):
        reach("a.b")
    reach("a.c")


def test_an_error_of_the_system_names_the_path():
    with arm("a.b=ENOSPC"), pytest.raises(OSError, match="No space left on device: 'model'") as caught:
        reach("a.b", "model")
    assert caught.value.errno == errno.ENOSPC


def test_a_fault_strikes_the_time_it_is_meant_for():
    calls = []
    with arm("a.b@2=raise"), arm(point="a.b", action=lambda: calls.append(1)):
        reach("a.b")
        with pytest.raises(RuntimeError, match="injected fault"):
            reach("a.b")
        reach("a.b")
    assert len(calls) == 2


def test_a_fault_strikes_the_rank_it_is_meant_for(monkeypatch):
    with arm("a.b,rank1=raise"):
        reach("a.b")
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(RuntimeError):
            reach("a.b")


def test_processes_get_their_faults_from_the_environment():
    killed = start("a.b@2=kill")
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "once\n")
    assert start("x=kill; a.b@1=exit").returncode == 7
    assert "'nonsense' is no fault" in start("nonsense").stderr
    assert "there is no action 'explode'" in start("a.b=explode").stderr


def test_a_process_can_be_held_at_a_point(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", CODE],
        env=os.environ | {"ROWMESH_FAULTS": f"a.b@2=hold:{tmp_path}/here"},
        stdout=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "here").exists():
        assert process.poll() is None
    (tmp_path / "here.go").touch()
    assert process.communicate(timeout=60)[0] == "once\ntwice\n"

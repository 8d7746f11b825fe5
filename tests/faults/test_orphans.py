"""Ranks whose torchrun is killed: they end with it, clean up, and say why."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import is_running
from tests.support.runs import LONG, prepare_run, rank_processes, start, wait_for_steps

RANK = "from rowmesh.cli.__main__ import main; main(['env'])"
LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(rank.pid, flush=True)
rank.wait()
"""


@contextlib.contextmanager
def launched(tmp_path, faults):
    """A process in torchrun's place with one rank, which is held at a point."""
    environment = {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "ROWMESH_FAULTS": f"{faults}=hold:{tmp_path}/held"}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert launcher.stdout
    rank = int(launcher.stdout.readline())
    try:
        while not (tmp_path / "held").exists():
            assert is_running(rank)
        yield launcher, rank
    finally:
        launcher.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
        launcher.communicate(timeout=60)


def test_a_rank_ends_with_its_launcher(tmp_path):
    with launched(tmp_path, "cli.command") as (launcher, rank):
        launcher.kill()
        _, err = launcher.communicate(timeout=60)  # the rank has the other end of the pipe, too
        assert err == "rowmesh (rank 1): error: torchrun, which started this rank, is gone; the rank ends\n"
        assert not is_running(rank)


@pytest.mark.skipif(Path("/proc/1/cmdline").read_bytes().startswith(b"python"), reason="init could be a launcher")
def test_a_launcher_that_is_gone_before_the_rank_looks(tmp_path):
    with launched(tmp_path, "launcher.watch") as (launcher, rank):
        launcher.kill()
        launcher.wait()
        (tmp_path / "held.go").touch()
        _, err = launcher.communicate(timeout=60)
        assert "torchrun, which started this rank, is gone" in err
        assert not is_running(rank)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["one_sided", "collective"])
def test_no_rank_outlives_torchrun(tmp_path, transport):
    process = start(prepare_run(tmp_path), f"parallel.transport={transport}", *LONG, ranks=2)
    wait_for_steps(process, tmp_path / "run" / "metrics.jsonl")
    ranks = rank_processes(process)
    process.kill()
    _, err = process.communicate(timeout=60)  # ends when no rank has the pipe any more
    assert not any(is_running(rank.pid) for rank in ranks.values())
    assert "(rank 0): error: torchrun, which started this rank, is gone; the rank ends" in err
    assert "(rank 1): error: torchrun, which started this rank, is gone; the rank ends" in err
    assert not (tmp_path / "run" / ".lock").exists()
    assert not (tmp_path / "run" / "model").exists()

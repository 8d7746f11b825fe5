"""How pipelines end that cannot go on: in time, naming rank, stage and batch, leaving nothing behind."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import pipelines
from tests.support.pipelines import Fails
from tests.support.ranks import RankError, RankPool, is_running
from tests.support.scenario import Scenario
from tests.support.tables import table

TABLES = (table("user", 60, 3, "adam"), table("item", 200, 16, "row_wise_adagrad"))
TIERED = tuple(replace(spec, storage="tiered") for spec in TABLES)
STAGES = ("read", "copy", "route", "open", "retrieve", "final", "rows", "compute", "gradients", "norm", "update")
TIMEOUT_S = 3.0


@pytest.fixture
def pool():
    """Of its own, since no rank survives."""
    ranks = RankPool(mesh_timeout_s=30.0, world_size=2)
    yield ranks
    pids = ranks.pids
    ranks.close()
    assert not any(is_running(pid) for pid in pids)


def job(disturb=None, **options):
    sizes = {"depth": 1, "micro_batches": 2, "disturb": disturb}
    return Scenario(tables=TABLES, batch_sizes=(6, 5), num_steps=5, pipeline=sizes | options)


def job_with(stage, disturb):
    """One whose batches pass this stage."""
    made = job(disturb, copy=pipelines.copied) if stage == "copy" else job(disturb)
    return replace(made, tables=TIERED if stage == "retrieve" else TABLES, max_norm=1.0 if stage == "norm" else None)


def cases(*in_default):
    """All stages and transports; but for some collective ones, only in the slow tests."""
    return [
        pytest.param(stage, transport, marks=() if is_fast else (pytest.mark.slow,))
        for transport in ("collective", "one_sided")
        for stage in STAGES
        if (stage, transport) not in {("final", "one_sided"), ("retrieve", "one_sided")}  # when nothing is done
        for is_fast in [transport == "collective" and stage in in_default]
    ]


@pytest.mark.parametrize("stage, transport", cases("read"))
def test_an_error_in_any_stage(pool, stage, transport):
    """The rank says what and where; the others, that they waited for it."""
    ends = pool.run(pipelines.end, job_with(stage, Fails(stage, 2, "raises")), transport, TIMEOUT_S, world_size=2)
    kind, message, elapsed_s, threads = ends[1]
    where = "" if stage == "compute" else f"rank 1 in stage '{stage}' of batch 2: "
    assert (kind, message) == ("DataError", f"{where}made to fail")
    assert elapsed_s < TIMEOUT_S
    assert threads == []
    kind, message, elapsed_s, threads = ends[0]
    assert kind == "PeerError"
    assert re.match(r"rank 0( in stage '\w+' of batch \d+)?: ", message)
    if stage in ("read", "copy", "route"):  # ranks tell each other before the batch
        assert "rank 1 could not read batch 2 or make it ready" in message
    elif stage == "compute":  # and, where a loop is left, before its step
        assert "rank 1 left its loop amid batch 2" in message
    else:
        assert re.search(r"rank 1 \(process \d+, alive\)", message), message
    assert elapsed_s < TIMEOUT_S + 5
    assert threads == []


@pytest.mark.parametrize("stage, transport", cases("read", "compute", "update"))
def test_a_process_that_dies_in_any_stage(pool, stage, transport):
    with pytest.raises(RankError) as caught:
        pool.run(pipelines.end, job_with(stage, Fails(stage, 2, "dies")), transport, 60.0, world_size=2)
    assert "exit code -9" in caught.value.failed[1]
    kind, message, elapsed_s, threads = caught.value.returned[0]
    assert kind == "PeerError"
    died = r"rank 0 in stage '\w+' of batch \d+: (rank 0: )?rank 1 \(process \d+\) died while"
    assert re.match(died, message), message
    assert elapsed_s < 10
    assert threads == []


@pytest.mark.slow
def test_two_hosts(pool):
    """Direct messages end too, and their threads."""
    scenario = job(Fails("gradients", 2, "raises"))
    ends = pool.run(pipelines.end, replace(scenario, ranks_per_node=1), "collective", TIMEOUT_S, world_size=2)
    assert ends[1][:2] == ("DataError", "rank 1 in stage 'gradients' of batch 2: made to fail")
    assert ends[0][0] == "PeerError"
    assert re.search(r"rank 1 \(process \d+ on another host\)", ends[0][1]), ends[0]
    assert ends[0][2] < TIMEOUT_S + 5


@pytest.mark.parametrize("transport", [pytest.param("collective", marks=pytest.mark.slow), "one_sided"])
def test_a_rank_that_brings_more_batches(pool, transport):
    """Waiting ranks get an error, within the timeout."""
    ends = pool.run(pipelines.bring_more, job(), transport, TIMEOUT_S, world_size=2)
    kind, message, threads = ends[1]
    assert kind == "PeerError", ends
    assert re.search("rank 0|out of step", message), message
    assert threads == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, transport", [("rows", "collective"), pytest.param("gradients", "one_sided", marks=pytest.mark.slow)]
)
def test_programs_end(stage, transport):
    """With what was raised, and not by an abort while messages are under way; the peer learns it from the kernel."""
    before, port = shared_files(), free_port()
    processes = [start(rank, port, stage, transport) for rank in range(2)]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], errors
    assert f"DataError: rank 1 in stage '{stage}' of batch 2: made to fail" in errors[1]
    assert re.search(r"PeerError: rank 0 in stage '\w+' of batch \d+: rank 0: rank 1 \(process \d+\) died", errors[0])
    assert shared_files() == before


def shared_files():
    return {path.name for path in Path("/dev/shm").glob("*") if path.name.startswith(("rowmesh", "torch"))}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(rank, port, stage, transport):
    variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.pipelines", stage, transport],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {name: str(value) for name, value in variables.items()},
    )


@pytest.mark.slow
@pytest.mark.parametrize("leaves", ["open", pytest.param("done", marks=pytest.mark.slow)])
def test_programs_that_close_nothing_end(leaves):
    """With a loop half way or done, a pipeline and a mesh that are not closed."""
    port = free_port()
    processes = [start(rank, port, leaves, "closes nothing") for rank in range(2)]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors

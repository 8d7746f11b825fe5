"""Late ranks, and machines with fewer cores than ranks: waiting ranks get an error, and all can begin again."""

import os
import re
import subprocess
import sys

import pytest

from tests.support import starving
from tests.support.ranks import RankPool
from tests.support.scenario import Scenario
from tests.support.tables import table

TABLES = (table("user", 60, 3, "adam"), table("item", 200, 16, "row_wise_adagrad"))
TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def pool():
    """Of its own: a rank is held longer than others wait."""
    ranks = RankPool(mesh_timeout_s=60.0)
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_after_a_rank_came_too_late_the_next_pipeline_runs(pool, tmp_path, world_size, overlap):
    """On the same mesh, in new tables; the old ones were left within a step, and say so."""
    options = {"depth": 1, "micro_batches": 1, "overlap": overlap}
    scenario = Scenario(tables=TABLES, batch_sizes=(4,) * world_size, num_steps=4, pipeline=options)
    found = pool.run(starving.begin_again, scenario, tmp_path, TIMEOUT_S, world_size=world_size)
    for rank, (first, second, threads, is_same) in enumerate(found):
        who = r"rank 0 \(process \d+, alive\).* stopped waiting"
        if rank != starving.LATE:  # or another one lost patience first, and says so
            who = r"(waited in vain for|.* stopped waiting; its own output says why;) .*rank 1 \("
        assert re.search(rf"rank {rank}( in stage 'update' of batch 1: rank {rank})?: {who}", first), first
        assert "make their EmbeddingCollection anew and load a checkpoint" in second, second
        assert threads == []
        assert is_same


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks, cores", [(4, 2), (4, 1)])
def test_ranks_outnumber_the_cores(num_ranks, cores):
    """Twice and four times, with other work on them; `tests.faults.soak` for as many configurations as one likes."""
    usable = sorted(os.sched_getaffinity(0))[:cores]
    options = {"configurations": 12, "ranks": num_ranks, "cores": ",".join(map(str, usable)), "busy": 2}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "tests.faults.soak", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


LOOKS = """
import multiprocessing, os, resource, sys
import numpy as np
from rowmesh.mesh.barrier import Barrier
from rowmesh.mesh import Mesh

def be_busy(begun):
    begun.set()
    while os.getppid() == parent:
        sum(range(100_000))

parent = os.getpid()
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
board = np.zeros((2, 8), np.int64)
flags = np.array([line.ctypes.data for line in board], np.int64)
barrier = Barrier(Mesh(0, 2, (0, 0), (os.getpid(), os.getpid())), flags.ctypes.data)
barrier._generation = 1
barrier._missing()  # compiled
fork = multiprocessing.get_context("fork")
begun = [fork.Event() for _ in range(4)]
busy = [fork.Process(target=be_busy, args=(each,), daemon=True) for each in begun]
for process, each in zip(busy, begun):
    process.start()
    each.wait()
before = resource.getrusage(resource.RUSAGE_THREAD)
assert barrier._missing() == 1
after = resource.getrusage(resource.RUSAGE_THREAD)
sys.stdout.write(str(after.ru_nivcsw - before.ru_nivcsw))
for process in busy:
    process.kill()
    process.join()
"""


@pytest.mark.slow
def test_who_waits_looks_up_however_busy_the_core_is():
    """Whether peers died, time is up, or something else failed.

    Busy programs of the same session: a yield then gives the core to one of them for a whole time slice, so that a few
    use up the time in which a rank yields. 20,000 of them, as there once were, took minutes. What is counted is how
    often the core went to another program although this one wanted it.
    """
    ended = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 2000

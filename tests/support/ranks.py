"""A pool of ranks: real processes in real gloo groups, started once, that run functions and hand back what they return.

    def add(mesh, x):                      # at module level, so that it can be sent by name
        return mesh.rank + x

    ranks.run(add, 10, world_size=2)       # [10, 11]

Importing torch costs seconds, so the processes stay, and are forks of one that has imported it. The first 2 and 3 of
the 4 ranks have groups of their own. A rank that hangs, dies or leaves the others waiting fails the test with its name,
and the next test gets fresh processes.
"""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

WORLD_SIZE = 4
GRACE_S = 3.0  # what the other ranks get once one has failed
START_TIMEOUT_S = 120.0
MESH_TIMEOUT_S = 30.0
GROUPS_PER_RUN = 1000
# The second is what torch.optim imports at its first use, the third what runs as processes of their own need.
PRELOADED = ["tests.support.pipelines", "torch._dynamo", "rowmesh.cli.train"]


class RankError(AssertionError):
    """A function failed on some rank.

    Attributes:
        failed: rank → its traceback, or how it ended.
        returned: rank → what the function returned where it did.
    """

    def __init__(self, failed: dict[int, str], returned: dict[int, Any]) -> None:
        super().__init__("\n".join(f"rank {rank} failed:\n{text}" for rank, text in sorted(failed.items())))
        self.failed = failed
        self.returned = returned


class RankPool:
    """Four processes, started at the first `run`.

    Args:
        mesh_timeout_s: how long they wait for each other.
        world_size: how many processes; where not four, all of them run whatever is run.
    """

    def __init__(self, mesh_timeout_s: float = MESH_TIMEOUT_S, world_size: int = WORLD_SIZE) -> None:
        self._mesh_timeout_s, self._world_size = mesh_timeout_s, world_size
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: str | None = None
        self._num_runs = 0

    @property
    def pids(self) -> list[int]:
        """The processes that are running."""
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, world_size: int = 2, timeout_s: float = 180.0) -> list[Any]:
        """What `function(mesh, *args)` returns on each rank.

        Raises:
            RankError: it raised or did not return on some rank.
        """
        if not self._processes:
            self._start()
        self._num_runs += 1
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        request = pickle.dumps((function, args, world_size, is_deterministic, self._num_runs))
        for pipe in self._pipes[:world_size]:
            pipe.send_bytes(request)
        results = self._collect(world_size, timeout_s)
        failed = {rank: value for rank, (is_good, value) in results.items() if not is_good}
        returned = {rank: value for rank, (is_good, value) in results.items() if is_good}
        if failed:
            raise RankError(failed, returned)
        return [returned[rank] for rank in range(world_size)]

    def _collect(self, world_size: int, timeout_s: float) -> dict[int, tuple[bool, Any]]:
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < world_size:
            waiting = {self._pipes[rank]: rank for rank in range(world_size) if rank not in results}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    self._processes[rank].join(GRACE_S)
                    results[rank] = (False, f"the process ended (exit code {self._processes[rank].exitcode})")
                if not results[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if not ready:
                self.close(grace_s=0.1)  # a rank that hangs has had its time
                for rank in waiting.values():
                    results[rank] = (
                        False,
                        f"still running after {timeout_s:.0f} s, or {GRACE_S:.0f} s after a failure",
                    )
        if self._processes and not all(process.is_alive() for process in self._processes):
            self.close()
        return results

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="rowmesh-ranks-")
        for rank in range(self._world_size):
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(rank, there, f"{self._folder}/store", self._mesh_timeout_s, self._world_size),
                daemon=True,
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        started = self._collect(self._world_size, START_TIMEOUT_S)
        if failed := {rank: text for rank, (is_good, text) in started.items() if not is_good}:
            self.close()
            raise RankError(failed, {})

    def close(self, grace_s: float = GRACE_S) -> None:
        """Ends all processes, whatever they are doing."""
        for pipe in self._pipes:
            pipe.close()  # an idle rank ends at the end of its pipe
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes, self._pipes = [], []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _serve(rank: int, pipe: Any, store: str, mesh_timeout_s: float, world_size: int) -> None:
    """A rank's life: join, then run what is asked for until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    try:
        meshes = _join(rank, store, mesh_timeout_s, world_size)
        _compile_once(Path(store).parent)
        gc.freeze()  # else every collection of what a test left looks at a million objects of imported modules
        _answer(pipe, True, None)
    except BaseException:
        _answer(pipe, False, traceback.format_exc())
        return
    if not sys.warnoptions:  # with other versions of libraries PYTHONWARNINGS may say what is an error
        warnings.simplefilter("error")
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            os._exit(0)  # without the process group's farewell, which could wait for the others
        try:
            function, args, world_size, is_deterministic, number = pickle.loads(request)
            _count_groups_from(number * GROUPS_PER_RUN)
            torch.use_deterministic_algorithms(is_deterministic)  # as where the test runs
            result = function(meshes[world_size], *args)
        except BaseException:
            _answer(pipe, False, traceback.format_exc())
        else:
            _answer(pipe, True, result)


def _count_groups_from(number: int) -> None:
    """Has torch name the next process group by this number.

    Ranks meet in a group by its name, which is how many groups they have made. Those that had a test of fewer ranks
    for themselves may have made more than the others, which would wait in vain for them.
    """
    from torch.distributed.distributed_c10d import _world  # in the ranks alone

    _world.group_count = number


def _answer(pipe: Any, is_good: bool, value: Any) -> None:
    # Plain pickle: the pipe's own would send tensors as names of shared memory that must outlive the message.
    pipe.send_bytes(pickle.dumps((is_good, value)))


def _join(rank: int, store: str, mesh_timeout_s: float, world_size: int) -> dict[int, Any]:
    import torch.distributed as dist

    from rowmesh.mesh import Mesh

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=mesh_timeout_s),
    )
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    meshes = {1: Mesh(timeout_s=mesh_timeout_s)}
    for size in range(2, WORLD_SIZE + 1) if world_size == WORLD_SIZE else [world_size]:
        group = dist.group.WORLD if size == world_size else dist.new_group(list(range(size)))
        parts = _connect_parts(size, mesh_timeout_s)
        if rank < size:
            meshes[size] = Mesh(
                rank=rank,
                world_size=size,
                hosts=(0,) * size,
                pids=tuple(pids[:size]),
                timeout_s=mesh_timeout_s,
                group=group,
                _subgroups=parts,
            )
    return meshes


def _connect_parts(size: int, timeout_s: float) -> dict[tuple[str, tuple[int, ...]], Any]:
    """The groups of every division into nodes, and those of tables and pipelines: a mesh makes its own, but only where
    it has all ranks of the run.
    """
    import torch.distributed as dist  # in the ranks alone

    parts: dict[tuple[str, tuple[int, ...]], Any] = {}
    for per_node in (number for number in range(1, size) if size % number == 0):
        columns = [range(place, size, per_node) for place in range(per_node)]
        nodes = [range(first, first + per_node) for first in range(0, size, per_node)]
        for part in map(tuple, (*columns, *nodes)):
            if ("", part) not in parts:
                parts["", part] = dist.new_group(list(part), timeout=timedelta(seconds=timeout_s))
    for use in ("tables", "rows", "gradients", "cores", "network"):
        parts[use, tuple(range(size))] = dist.new_group(list(range(size)), timeout=timedelta(seconds=timeout_s))
    return parts


def _compile_once(folder: Path) -> None:
    """Has one rank compile a kernel, and the others load it from disk; else all would compile it at the same time."""
    from numba.core.dispatcher import Dispatcher  # in the ranks alone

    compile_now = Dispatcher.compile

    def compile_once(kernel: Any, signature: Any) -> Any:
        name = kernel.py_func.__qualname__.replace("/", "_")
        with (folder / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return compile_now(kernel, signature)

    Dispatcher.compile = compile_once


def is_running(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")

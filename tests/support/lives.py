"""Lives of a run: real processes that train, are killed by SIGKILL at a named point, and begin again.

    lives = Lives(config_file)
    lives.train(options, "loop.step@3,rank1=kill", ranks=2).statuses   # [143, -9]
    lives.train([*options, "--resume"], ranks=2).statuses              # [0, 0]

Ranks are forks of a process that has imported everything and trained once, so that a life costs little more than its
steps. They meet as under torchrun. When one has died, the others get SIGTERM, as from torchrun, and in the end SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from torch._C._distributed_c10d import TCPStore

LIMIT_S = 180.0
GRACE_S = 30.0  # as torchrun gives
PRELOADED = ["tests.support.warm"]


class Life(NamedTuple):
    """How every rank ended, below 0: by which signal; and what they printed, one after the other."""

    statuses: list[int]
    said: str


class Lives:
    """Starts the ranks of a run, again and again; threads may share it.

    Args:
        config: of the run.
    """

    def __init__(self, config: Path) -> None:
        self._config = config
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._lock = threading.Lock()  # starting a process asks for the status of all, which can be read once

    def train(self, options: Sequence[str], faults: str = "", *, ranks: int, limit_s: float = LIMIT_S) -> Life:
        """Trains until the run ends or a rank dies or fails; the others then have `GRACE_S` to end."""
        return self.run(["train", str(self._config), *options], faults, ranks=ranks, limit_s=limit_s)

    def run(
        self, words: Sequence[str], faults: str = "", *, ranks: int, limit_s: float = LIMIT_S, grace_s: float = GRACE_S
    ) -> Life:
        """Runs a command of rowmesh on ranks, likewise."""
        store, environment = _meeting(ranks)
        with tempfile.TemporaryDirectory(prefix="rowmesh-life-") as folder:
            outputs = [Path(folder) / f"rank{rank}" for rank in range(ranks)]
            started: list[Any] = []
            for rank, output in enumerate(outputs):
                mine = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if environment else {}
                started.append(self._context.Process(target=_be_rank, args=([*words], mine, output, faults)))
                with self._lock:
                    started[-1].start()
            statuses = self._end(started, limit_s, grace_s)
            del store
            return Life(statuses, "".join(path.read_text() for path in outputs if path.exists()))

    def _end(self, started: Sequence[Any], limit_s: float, grace_s: float) -> list[int]:
        """Waits as a launcher does: where one fails, it ends the others."""
        deadline, is_ending = time.monotonic() + limit_s, False
        while running := [process for process in started if self._status(process) is None]:
            if not is_ending and any(self._status(process) for process in started):  # one may have died already
                is_ending, deadline = True, time.monotonic() + grace_s
                for process in running:
                    process.terminate()
            elif time.monotonic() > deadline:
                for process in running:
                    process.kill()
            wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic()))
        return [self._status(process) for process in started]

    def _status(self, process: Any) -> Any:
        with self._lock:
            return process.exitcode


def _meeting(ranks: int) -> tuple[Any, dict[str, str]]:
    """A store, as torchrun has one, and what torchrun would tell the ranks; nothing where there is one."""
    if ranks == 1:
        return None, {}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return store, environment


def _be_rank(words: list[str], environment: dict[str, str], output: Path, faults: str) -> None:
    from rowmesh._support.faults import arm
    from rowmesh.cli.__main__ import main  # in the ranks alone

    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = "1"
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    with arm(faults):
        main(words)

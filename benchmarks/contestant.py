"""Contestants: programs of several ranks that stay up and take turns.

A benchmark starts each contestant once, under torchrun, and asks it for a short round of steps whenever its turn comes;
the others wait for a message meanwhile and use no processor. So A B A B rounds are seconds apart, not minutes.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TextIO

from benchmarks.hosts import INTERFACE, NUM_HOSTS, Hosts
from benchmarks.workload import Workload

ROOT = Path(__file__).parents[1]
ROUND_TIMEOUT_S = 900.0
_TORCHRUN = "torch/distributed/elastic"  # where torchrun's own report of a failure begins
# glibc would give the buffers of each step back to the system and fault them in again: up to half of a TorchRec step.
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


class ContestantError(RuntimeError):
    """A contestant did not start, failed or did not answer; says what it wrote last."""


class Contestant:
    """One program on all its ranks.

    Args:
        name: as it stands in reports.
        module: what every rank runs (`python -m module`); it calls `benchmarks.rank.serve`.
        workload: the case.
        ranks: how many.
        python: the interpreter; default: this one.
        hosts: where the ranks run, equally many on each, host by host; default: all here.
        options: handed to the program beside the workload.
    """

    def __init__(
        self,
        name: str,
        module: str,
        workload: Workload,
        *,
        ranks: int,
        python: str = sys.executable,
        hosts: Hosts | None = None,
        **options: Any,
    ) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        path = str(Path(self._folder.name) / "socket")  # in the file system, which all hosts share
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(ranks)
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._files: list[TextIO] = []
        self._ranks = ranks
        program = ["-m", module, path, json.dumps({"workload": asdict(workload), **options})]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._obstacle = ""
        for launcher in _launchers(python, ranks, hosts):
            try:
                process = subprocess.Popen(
                    [*launcher, *program],
                    cwd=ROOT,
                    env=_environment("lo" if hosts is None else INTERFACE),
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                )
            except OSError as error:  # there is no such Python: `connect` says so, and others still compete
                self._obstacle = str(error)
                break
            self._processes.append(process)

    def connect(self, deadline_s: float) -> None:
        """Waits until every rank is ready.

        Raises:
            ContestantError: the program did not start or ended, or the deadline passed.
        """
        if self._obstacle:
            raise ContestantError(f"{self.name} did not start: {self._obstacle}")
        files: dict[int, TextIO] = {}
        self._listener.settimeout(0.2)
        while len(files) < self._ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if any(process.poll() is not None for process in self._processes):
                    raise self._error("ended before it was ready") from None
                if time.monotonic() > deadline_s:
                    raise self._error("was not ready in time") from None
                continue
            connection.settimeout(ROUND_TIMEOUT_S)
            file = connection.makefile("rw", encoding="utf-8")
            connection.close()  # with the file, which keeps it open until then
            files[int(file.readline())] = file
        self._files = [files[rank] for rank in range(self._ranks)]

    def ask(self, command: str, **arguments: Any) -> list[dict[str, Any]]:
        """Has all ranks run a command; returns their answers, rank by rank.

        Raises:
            ContestantError: a rank failed or fell silent.
        """
        try:
            for file in self._files:
                file.write(json.dumps([command, arguments]) + "\n")
                file.flush()
            lines = [file.readline() for file in self._files]
        except OSError as error:
            raise self._error(f"did not answer {command!r} ({error})") from error
        if not all(lines):
            raise self._error(f"failed in {command!r}")
        return [json.loads(line) for line in lines]

    def _error(self, what: str) -> ContestantError:
        self._log.seek(0)
        lines = itertools.takewhile(lambda line: _TORCHRUN not in line, self._log.read().strip().splitlines())
        tail = list(lines)[-6:]
        return ContestantError(f"{self.name} {what}; its last lines: " + " | ".join(tail))

    def close(self) -> None:
        """Ends the ranks: they leave when their connection does."""
        for file in self._files:
            file.close()
        self._listener.close()
        deadline_s = time.monotonic() + (30 if self._files else 0)
        for process in self._processes:
            try:
                process.wait(timeout=max(deadline_s - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its ranks
        for process in self._processes:
            process.wait(timeout=60)
        self._log.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect_all(contestants: Sequence[Contestant], deadline_s: float) -> tuple[list[Contestant], dict[str, str]]:
    """Waits for all; returns those that are ready, and why the others are not."""
    ready, absent = [], {}
    for contestant in contestants:
        try:
            contestant.connect(deadline_s)
            ready.append(contestant)
        except ContestantError as error:
            absent[contestant.name] = str(error)
    return ready, absent


def _launchers(python: str, ranks: int, hosts: Hosts | None) -> list[list[str]]:
    """torchrun, once a host."""
    torchrun = [python, "-m", "torch.distributed.run"]
    if hosts is None:
        return [[*torchrun, "--standalone", "--nproc-per-node", str(ranks)]]
    meeting = ["--master-addr", hosts.address(0), "--master-port", str(hosts.next_port())]
    nodes = ["--nnodes", str(NUM_HOSTS), "--nproc-per-node", str(ranks // NUM_HOSTS), *meeting]
    return [hosts.command(host, [*torchrun, *nodes, "--node-rank", str(host)]) for host in range(NUM_HOSTS)]


def _environment(interface: str) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
    return {**os.environ, **TUNED_MALLOC, **threads}

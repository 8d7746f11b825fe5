"""The rank's side of a contestant: it runs what the benchmark asks for, and answers.

Imports neither rowmesh nor a peer: both environments read it.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.workload import Workload


def settings() -> tuple[Workload, dict[str, Any]]:
    """The case, and the options beside it, as `Contestant` passed them."""
    options = json.loads(sys.argv[2])
    return Workload(**options.pop("workload")), options


def serve(**commands: Callable[..., Any]) -> None:
    """Reports that this rank is ready, then answers commands until the benchmark hangs up."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(sys.argv[1])
    with connection, connection.makefile("rw", encoding="utf-8") as file:
        file.write(os.environ["RANK"] + "\n")
        file.flush()
        for line in file:
            name, arguments = json.loads(line)
            file.write(json.dumps(commands[name](**arguments)) + "\n")
            file.flush()


def alternate(
    variants: dict[str, Callable[[int], None]], workload: Workload, barrier: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of every timed step of each variant; variants take turns, all ranks start a step together.

    Args:
        variants: name → a function of the step's number.
        workload: how many steps.
        barrier: waits for all ranks.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(workload.warmup + workload.steps):
        for name, step in variants.items():
            seconds[name].append(timed(functools.partial(step, number), barrier))
    return {name: times[workload.warmup :] for name, times in seconds.items()}


def timed(function: Callable[[], None], barrier: Callable[[], Any]) -> float:
    """Seconds of one call that all ranks start together."""
    barrier()  # the first lets everyone arrive, the second lets them leave at the same moment
    barrier()
    began = time.perf_counter()
    function()
    return time.perf_counter() - began

"""A contest: rowmesh and TorchRec on one case, in turns."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.command import Options, Report
from benchmarks.contestant import Contestant, ContestantError, connect_all
from benchmarks.hosts import Hosts, HostsShape
from benchmarks.workload import Workload

PEER_MODULE = "benchmarks.peers.torchrec_step"
SHARDINGS = ("table_wise", "row_wise")

Answers = dict[str, list[list[dict[str, Any]]]]  # contestant → round → rank → answer


@contextmanager
def contestants(
    options: Options,
    report: Report,
    workload: Workload,
    ours: dict[str, tuple[str, dict[str, Any]]],
    **of_peers: str,
) -> Iterator[tuple[list[Contestant], list[Contestant]]]:
    """Ours and the peer's, ready to be asked; says which are missing and why.

    Args:
        options: of the command.
        report: where missing contestants are reported.
        workload: the case.
        ours: name → (module, its options).
        of_peers: options of the peer's ranks.

    Raises:
        ContestantError: one of ours did not start.
    """
    with ExitStack() as stack:
        own = [
            stack.enter_context(Contestant(name, module, workload, ranks=options.ranks, **settings))
            for name, (module, settings) in ours.items()
        ]
        own, absent = connect_all(own, options.deadline_s + 60.0)
        if absent:
            raise ContestantError("; ".join(absent.values()))
        peers = []
        if options.peer_python is None:
            report.line(case=workload.name, peer="torchrec", unavailable="no --peer-python was given")
        else:
            peers = [stack.enter_context(_peer(options, workload, sharding, of_peers)) for sharding in SHARDINGS]
            peers, absent = connect_all(peers, options.deadline_s)
        for name, reason in absent.items():
            report.line(case=workload.name, peer=name, unavailable=reason)
        yield own, peers


def _peer(options: Options, workload: Workload, sharding: str, settings: dict[str, Any]) -> Contestant:
    assert options.peer_python is not None
    name, ranks, python = f"torchrec {sharding}", options.ranks, options.peer_python
    return Contestant(name, PEER_MODULE, workload, ranks=ranks, python=python, sharding=sharding, **settings)


@contextmanager
def joined(options: Options) -> Iterator[tuple[Options, Hosts | None]]:
    """The hosts of `--hosts`, if any, while the context lasts, and the options with as many ranks.

    Raises:
        HostsError: hosts cannot be made here.
    """
    if not options.extra["hosts"]:
        yield options, None
        return
    shape = HostsShape.parse(options.extra["hosts"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts are removed then too
    with Hosts() as hosts:
        yield replace(options, ranks=shape.num_ranks), hosts


def take_turns(command: str, everyone: Sequence[Contestant], repeats: int) -> Answers:
    """Rounds of one command, A B C D A B C D."""
    answers: Answers = {contestant.name: [] for contestant in everyone}
    for _ in range(repeats):
        for contestant in everyone:
            answers[contestant.name].append(contestant.ask(command))
    return answers

"""A contest: rowmesh and TorchRec on one case, in turns."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.command import Options, Report
from benchmarks.contestant import Contestant, ContestantError, connect_all
from benchmarks.hosts import GIGABIT, Hosts, HostsError, HostsShape, bits_per_s
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
    hosts: Hosts | None = None,
    **of_peers: str,
) -> Iterator[tuple[list[Contestant], list[Contestant]]]:
    """Ours and the peer's, ready to be asked; says which are missing and why.

    Args:
        options: of the command.
        report: where missing contestants are reported.
        workload: the case.
        ours: name → (module, its options).
        hosts: where all of them run; default: all here.
        of_peers: options of the peer's ranks.

    Raises:
        ContestantError: one of ours did not start.
    """
    with ExitStack() as stack:
        own = [
            stack.enter_context(Contestant(name, module, workload, ranks=options.ranks, hosts=hosts, **settings))
            for name, (module, settings) in ours.items()
        ]
        own, absent = connect_all(own, options.deadline_s + 60.0)
        if absent:
            raise ContestantError("; ".join(absent.values()))
        peers = []
        if options.peer_python is None:
            report.line(case=workload.name, peer="torchrec", unavailable="no --peer-python was given")
        else:
            peers = [stack.enter_context(_peer(options, workload, hosts, sharding, of_peers)) for sharding in SHARDINGS]
            peers, absent = connect_all(peers, options.deadline_s)
        for name, reason in absent.items():
            report.line(case=workload.name, peer=name, unavailable=reason)
        yield own, peers


def _peer(
    options: Options, workload: Workload, hosts: Hosts | None, sharding: str, settings: dict[str, Any]
) -> Contestant:
    assert options.peer_python is not None
    return Contestant(
        f"torchrec {sharding}",
        PEER_MODULE,
        workload,
        ranks=options.ranks,
        hosts=hosts,
        python=options.peer_python,
        sharding=sharding,
        **settings,
    )


@contextmanager
def joined(options: Options) -> Iterator[tuple[Options, Hosts | None]]:
    """The hosts of `--hosts`, if any, while the context lasts, and the options with as many ranks.

    The cable has the speed of `--rate`, or 1 Gbit/s.

    Raises:
        HostsError: hosts cannot be made here, or this is no rate.
    """
    if not options.extra["hosts"]:
        yield options, None
        return
    shape, rate = HostsShape.parse(options.extra["hosts"]), options.extra.get("rate")
    try:
        speed = bits_per_s(rate) if rate else GIGABIT
    except argparse.ArgumentTypeError as error:
        raise HostsError(f"--rate {error}") from error
    if any(workload.global_batch % shape.num_ranks for workload in options.workloads):
        raise HostsError(f"--global-batch must divide by {shape.num_ranks} ranks")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts are removed then too
    with Hosts(speed) as hosts:
        yield replace(options, ranks=shape.num_ranks), hosts


def take_turns(command: str, everyone: Sequence[Contestant], repeats: int, hosts: Hosts | None = None) -> Answers:
    """Rounds of one command, A B C D A B C D.

    Answers of ranks on `hosts` have `cable_bytes`, too: the most that a host sent over the cable in this round.
    """
    answers: Answers = {contestant.name: [] for contestant in everyone}
    for _ in range(repeats):
        for contestant in everyone:
            before = [] if hosts is None else hosts.bytes_sent()
            answer = contestant.ask(command)
            if hosts is not None:
                sent = max(now - then for now, then in zip(hosts.bytes_sent(), before, strict=True))
                answer = [of_rank | {"cable_bytes": sent} for of_rank in answer]
            answers[contestant.name].append(answer)
    return answers

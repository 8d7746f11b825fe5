"""The sparse step by a plan against the step with cyclic rows, as without a plan (`embedding_step --plan`).

Rows stand in order of frequency, as after preparation, and the plan is made from the chances that the workload draws
ids with. Both contestants do the same steps, and must look up the same rows afterwards, to the bit.

On two hosts every round is run twice, with the cable unlimited and at 1 Gbit/s. What a step takes then is predicted:

    what it takes over the unlimited cable + bytes that the model sees between hosts / what TCP gets through the cable

with the bytes of the direction that carries more. The exchange's own counters and the interfaces count what moved. The
second term alone bounds what a plan can gain: `cable cyclic / planned` of the summary.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import Options, Report
from benchmarks.contest import joined
from benchmarks.contestant import Contestant, ContestantError, connect_all
from benchmarks.hosts import GIGABIT, NUM_HOSTS, PAYLOAD_SHARE, Hosts, HostsError
from benchmarks.measure import slowest, summarize
from benchmarks.ranks.setup import table_specs
from benchmarks.workload import Workload, Zipf
from rowmesh.errors import ConfigurationError
from rowmesh.placement import Plan, TableShape
from rowmesh.placement.cost import cost_of
from rowmesh.placement.profile import Profile, TableProfile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import STRATEGIES, search
from rowmesh.placement.topology import Topology

MODULE = "benchmarks.ranks.planned_step"
EXTRA_MEMORY = 0.05
TARGET_ACROSS_HOSTS = 1.3
CABLE_BYTES_PER_S = GIGABIT / 8 * PAYLOAD_SHARE
_LOOPBACK_BYTES_PER_S = 2e9  # of gloo within a host, about; plans depend on the ratio to the cable alone
_EVEN = 1e-3  # neighbours whose chances differ by less are one run of the profile
_CYCLIC, _PLANNED = "cyclic, one hop", "planned"


def run(options: Options, report: Report) -> None:
    """Every case asked for, with `--plan` and where given `--hosts`.

    Raises:
        SystemExit: hosts cannot be made here, or there is no such plan; says why.
    """
    if not options.extra["plan"]:
        raise SystemExit("embedding_step: --hosts needs --plan, a strategy or the file of a plan, --wire or --rate")
    if options.extra["rate"]:
        raise SystemExit("embedding_step: --rate is of steps without --plan, whose cable has 1 Gbit/s")
    if any(workload.construction != "drawn" for workload in options.workloads):
        raise SystemExit("embedding_step: --plan needs --construction drawn: its profile has chances of single ids")
    try:
        with joined(options) as (options, hosts):
            ranks_per_node = options.ranks if hosts is None else options.ranks // NUM_HOSTS
            for workload in options.workloads:
                case = Case(options, workload, ranks_per_node, hosts)
                for transport in ("one_sided", "collective") if hosts is None else ("collective",):
                    case.run(report, transport)
    except (HostsError, ConfigurationError) as error:
        raise SystemExit(f"embedding_step: {error}") from error


def true_profile(workload: Workload) -> Profile:
    """The chances that the workload draws ids with."""
    tables = []
    for table, bag_size in zip(table_specs(workload), workload.bag_sizes, strict=True):
        shape = TableShape.of(table)
        chances = Zipf(shape.num_rows, workload.zipf).probabilities * bag_size
        # Runs grow with their rank, as the law falls ever more slowly.
        ranks = np.arange(1, shape.num_rows + 1)
        starts = np.flatnonzero(np.diff(np.floor(np.log(ranks) * workload.zipf / _EVEN), prepend=-1.0))
        lengths = np.diff(starts, append=shape.num_rows)
        tables.append(TableProfile(shape, lengths, np.add.reduceat(chances, starts) / lengths))
    return Profile(tuple(tables), num_samples=1)


def topology(num_ranks: int, ranks_per_node: int) -> Topology:
    """Ranks of a host share its cable, so that each gets its part of it."""
    num_nodes = num_ranks // ranks_per_node
    ratio = _LOOPBACK_BYTES_PER_S * ranks_per_node / CABLE_BYTES_PER_S
    return Topology.grouped(num_nodes, ranks_per_node, ratio) if num_nodes > 1 else Topology.uniform(num_ranks)


def crossing(link_bytes: np.ndarray, ranks_per_node: int) -> list[float]:
    """Bytes into each node from the others.

    >>> crossing(np.array([[0, 1, 2, 3], [1, 0, 2, 3], [5, 5, 0, 1], [5, 5, 1, 0]]), 2)
    [10.0, 20.0]
    """
    node = np.arange(len(link_bytes)) // ranks_per_node
    between = np.where(node[:, None] != node, link_bytes, 0.0).sum(axis=1)
    return np.bincount(node, between).tolist()


@dataclass
class Times:
    """Seconds of one contestant's steps, and where there is a cable, of those with the cable unlimited."""

    step: list[float] = field(default_factory=list)
    unlimited: list[float] = field(default_factory=list)


class Case:
    """One workload: its plans, what the model says of them, and what is measured.

    Args:
        options: of the command.
        workload: the case.
        ranks_per_node: G.
        hosts: where ranks run, or None: all here.
    """

    def __init__(self, options: Options, workload: Workload, ranks_per_node: int, hosts: Hosts | None) -> None:
        self._options, self._workload, self._hosts = options, workload, hosts
        self._ranks_per_node = ranks_per_node
        request = Request(batch_size=workload.global_batch // options.ranks, extra_memory=EXTRA_MEMORY)
        profile = true_profile(workload)
        cyclic = Plan.cyclic(profile.shapes, options.ranks, ranks_per_node)
        self._plans = {_CYCLIC: cyclic, _PLANNED: self._plan(profile, request)}
        self._costs = {name: cost_of(plan, profile, request) for name, plan in self._plans.items()}

    def run(self, report: Report, transport: str) -> None:
        """Both contestants in turns, over one transport.

        Raises:
            ContestantError: a contestant failed, or they did not learn the same.
        """
        with self._contestants(transport) as contestants:
            times = self._take_turns(contestants)
            lines = {each.name: self._line(each, times[each.name]) for each in contestants}
            digests = {each.name: [answer["digest"] for answer in each.ask("digest")] for each in contestants}
        if digests[_CYCLIC] != digests[_PLANNED]:
            raise ContestantError(f"{self._workload.name}: after the same steps rows differ: {digests}")
        name = f"{self._workload.name}_{self._options.extra['hosts'] or transport}"
        for line in lines.values():
            report.line(
                case=name,
                dim=self._workload.dim,
                global_batch=self._workload.global_batch,
                **self._workload.bags_record,
                max_rows=self._workload.max_rows,
                zipf=self._workload.zipf,
                ranks=self._options.ranks,
                ranks_per_host=self._ranks_per_node,
                transport=transport,
                **line,
            )
        self._compare(report, name, lines)

    def _plan(self, profile: Profile, request: Request) -> Plan:
        """By a strategy, or from a file."""
        source = self._options.extra["plan"]
        if source not in STRATEGIES:
            if not Path(source).exists():
                raise ConfigurationError(
                    f"--plan {source}: neither a file nor a strategy; there are {', '.join(STRATEGIES)}"
                )
            plan = Plan.load(Path(source))
            plan.check_fits(profile.shapes, self._options.ranks, self._ranks_per_node)
            return plan
        return search(source, profile, topology(self._options.ranks, self._ranks_per_node), request)

    @contextmanager
    def _contestants(self, transport: str) -> Iterator[list[Contestant]]:
        options = self._options
        with ExitStack() as stack:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "plan.json"
            self._plans[_PLANNED].save(path)
            contestants = [
                stack.enter_context(
                    Contestant(
                        name,
                        MODULE,
                        self._workload,
                        ranks=options.ranks,
                        hosts=self._hosts,
                        transport=transport,
                        plan=plan,
                    )
                )
                for name, plan in ((_CYCLIC, None), (_PLANNED, str(path)))
            ]
            ready, absent = connect_all(contestants, options.deadline_s + 120.0)
            if absent:
                raise ContestantError("; ".join(absent.values()))
            yield ready

    def _take_turns(self, contestants: list[Contestant]) -> dict[str, Times]:
        """Every contestant's times, round by round."""
        times = {contestant.name: Times() for contestant in contestants}
        for _ in range(self._options.repeats):
            if self._hosts is not None:
                self._hosts.limit(None)
                for contestant in contestants:
                    times[contestant.name].unlimited += slowest(contestant.ask("round"), "step")
                self._hosts.limit(GIGABIT)
            for contestant in contestants:
                times[contestant.name].step += slowest(contestant.ask("round"), "step")
        return times

    def _line(self, contestant: Contestant, times: Times) -> dict[str, Any]:
        """What is reported of one contestant: time and bytes of a step, as measured and as predicted."""
        plan, cost = self._plans[contestant.name], self._costs[contestant.name]
        before = None if self._hosts is None else self._hosts.bytes_sent()
        counts = contestant.ask("count")
        counted = sum(count["row_bytes"] for count in counts)
        line: dict[str, Any] = {
            "contestant": contestant.name,
            "strategy": plan.strategy,
            "memory_bytes": max(plan.memory_bytes),
            **summarize(times.step),
            "bytes": round(counted),
            "predicted_bytes": round(cost.total_bytes),
            "predicted_over_counted_bytes": round(cost.total_bytes / counted, 4) if counted else None,
            "opening_bytes": round(sum(count["opening_bytes"] for count in counts)),
        }
        if self._hosts is None or before is None:
            return line
        moved = [now - then for now, then in zip(self._hosts.bytes_sent(), before, strict=True)]
        cable = max(moved) / counts[0]["steps"]
        predicted = max(crossing(cost.link_bytes, self._ranks_per_node))
        unlimited_ms = statistics.median(times.unlimited) * 1e3
        cable_ms = predicted / CABLE_BYTES_PER_S * 1e3
        return line | {
            "cable_bytes": round(cable),
            "predicted_cable_bytes": round(predicted),
            "predicted_over_measured_cable_bytes": round(predicted / cable, 4),
            "unlimited_step_ms": round(unlimited_ms, 4),
            "predicted_cable_ms": round(cable_ms, 4),
            "predicted_step_ms": round(unlimited_ms + cable_ms, 4),
            "predicted_over_measured_step": round((unlimited_ms + cable_ms) / line["step_ms"], 4),
        }

    def _compare(self, report: Report, name: str, lines: dict[str, dict[str, Any]]) -> None:
        """The ratios of the summary."""
        cyclic, planned = lines[_CYCLIC], lines[_PLANNED]
        target = "" if self._hosts is None else f", target {TARGET_ACROSS_HOSTS}"
        report.ratio(f"{name}: step cyclic / planned{target}", round(cyclic["step_ms"] / planned["step_ms"], 3))
        report.ratio(f"{name}: bytes cyclic / planned", round(cyclic["bytes"] / planned["bytes"], 3))
        report.ratio(f"{name}: bytes predicted / counted", planned["predicted_over_counted_bytes"])
        if self._hosts is None:
            return
        report.ratio(f"{name}: cable cyclic / planned", round(cyclic["cable_bytes"] / planned["cable_bytes"], 3))
        for line in (cyclic, planned):
            for what in ("cable_bytes", "step"):
                key = f"{name}: {what} predicted / measured, {line['contestant']}"
                report.ratio(key, line[f"predicted_over_measured_{what}"])

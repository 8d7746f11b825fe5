"""Speed between two hosts: the sparse part of a step with one replica of the tables, and with two.

Ranks are in two network namespaces joined by a cable of limited speed (`benchmarks.hosts`). With one replica, rows and
gradients travel over the cable; with a replica on each host ("shards" together), gradients or averages of touched rows
alone do; with the replicas of a shard on one host ("replicas" together), rows and gradients of a replica do.

What replicas send each other arrives while the next step begins. So no step is timed alone: a loop of them is, between
two barriers, and the time is divided by their number, for all contestants alike. With a pause between steps
(`--hosts-rest-ms`), as for work that needs no rows, what replicas send each other travels meanwhile, while all that one
replica sends is waited for within its step. A pipeline lets that travel too: hence contestants that look one batch
ahead, with one replica and with two, which have the same pause. Every round runs with the cable
unlimited, which shows what the cores need, and limited, beside what the bytes over the cable need at least.

All collections live in the same processes and do the same steps. Those that add gradients in the same order must look
up the same rows afterwards, to the bit. Whole tables (`dense`) are averaged last, in one step, which takes seconds.

Source: two-dimensional sparse parallelism §4.3, Table 2.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.command import Report
from benchmarks.contestant import Contestant, ContestantError, connect_all
from benchmarks.hosts import PAYLOAD_SHARE, Hosts, HostsError, HostsShape, bits_per_s, enter_hosts
from benchmarks.measure import median, slowest, summarize
from benchmarks.planned_step import EXTRA_MEMORY, topology, true_profile
from benchmarks.workload import Workload
from rowmesh.mesh.grid import Together
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import search

MODULE = "benchmarks.ranks.two_dimensional"
REPLICAS = 2
TARGET_STEP, TARGET_BYTES = 1.5, 20
START_S = 300.0
_QUICK = {"max_rows": 20_000, "dim": [16], "batch": [1024], "steps": 4, "warmup": 4, "repeats": 1, "rest_ms": [0]}


@dataclass(frozen=True)
class Variant:
    """One way to hold the tables.

    Attributes:
        replicas: M.
        together: which ranks of a table with replicas share a host.
        planned: by a plan that sends rows and gradients between hosts in two hops (M = 1).
        synchronization: of replicas.
        ahead: a pipeline fetches the rows of the next batch, and sends gradients, while the program pauses.
    """

    replicas: int = REPLICAS
    together: Together = "shards"
    planned: bool = False
    synchronization: Synchronization = field(default_factory=Synchronization)
    ahead: bool = False


_ONE, _PLANNED, _EXACT = "M=1", "M=1 planned", "M=2 exact"
_ONE_AHEAD, _EXACT_AHEAD = "M=1, one batch ahead", "M=2 exact, one batch ahead"
BASES = (_ONE, _PLANNED, _ONE_AHEAD)
_TOUCHED, _DENSE = "M=2 average", "M=2 average dense"
VARIANTS = {
    _ONE: Variant(replicas=1),
    _PLANNED: Variant(replicas=1, planned=True),
    _ONE_AHEAD: Variant(replicas=1, ahead=True),
    _EXACT: Variant(),
    _EXACT_AHEAD: Variant(ahead=True),
    "M=2 exact, replicas together": Variant(together="replicas"),
    _TOUCHED: Variant(synchronization=Synchronization("average")),
    "M=2 average every 4": Variant(synchronization=Synchronization("average", every=4)),
    _DENSE: Variant(synchronization=Synchronization("average", dense=True)),
}
SAME_ORDER = (*BASES, _EXACT, _EXACT_AHEAD)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this case."""
    add = parser.add_argument
    add("--hosts", default="", help="speed between two hosts, of so many ranks each: 2x2")
    add("--rate", type=bits_per_s, default="1gbit", help="of the cable in each direction, such as 100mbit")
    add("--hosts-dim", type=_integers, default=[16, 64], help="dimensions, separated by commas")
    add("--hosts-batch", type=_integers, default=[4096], help="samples a step, of all ranks together")
    add("--hosts-max-rows", type=int, default=1_000_000, help="cap on rows per table")
    add("--hosts-steps", type=int, default=20, help="steps of a timed loop")
    add("--hosts-warmup", type=int, default=4, help="steps before it")
    add("--hosts-repeats", type=int, default=6, help="rounds; in each, every contestant runs once")
    add("--hosts-rest-ms", type=_integers, default=[0], help="pause after a step, as for work without rows")


def run(report: Report, options: argparse.Namespace) -> None:
    """Every dimension and batch; says so where hosts cannot be made.

    Raises:
        SystemExit: these are no hosts.
    """
    if options.quick:
        _make_quick(options)
    try:
        shape = HostsShape.parse(options.hosts)
    except HostsError as error:
        raise SystemExit(f"two_dimensional: {error}") from error
    if any(batch % shape.num_ranks for batch in options.hosts_batch):
        raise SystemExit(f"two_dimensional: --hosts-batch must divide by {shape.num_ranks} ranks")
    with ExitStack() as stack:
        if (hosts := enter_hosts(stack, report, options.hosts)) is None:
            return
        for dim in options.hosts_dim:
            for batch in options.hosts_batch:
                workload = Workload(
                    dim=dim,
                    global_batch=batch,
                    max_rows=options.hosts_max_rows,
                    steps=options.hosts_steps,
                    warmup=options.hosts_warmup,
                )
                Case(report, options, workload, shape, hosts).run()


@dataclass
class Measured:
    """Rounds of one contestant: seconds of a step, and what one moves."""

    limited: list[float] = field(default_factory=list)
    unlimited: list[float] = field(default_factory=list)
    cable_bytes: list[float] = field(default_factory=list)  # of the direction that carries more
    counted: dict[str, list[float]] = field(default_factory=dict)  # of all ranks together


class Case:
    """One workload.

    Args:
        report: where lines go.
        options: of the command.
        workload: the case.
        shape: of the hosts.
        hosts: where ranks run.
    """

    def __init__(
        self, report: Report, options: argparse.Namespace, workload: Workload, shape: HostsShape, hosts: Hosts
    ) -> None:
        self._report, self._options, self._workload = report, options, workload
        self._shape, self._hosts = shape, hosts
        self._cable_bytes_per_s = options.rate / 8 * PAYLOAD_SHARE
        self._made: dict[str, dict[str, Any]] = {}  # what each contestant is, as lines say it

    def run(self) -> None:
        """Measures all contestants in turns, and whole tables last."""
        with (
            tempfile.TemporaryDirectory() as folder,
            Contestant("rowmesh", MODULE, self._workload, ranks=self._shape.num_ranks, hosts=self._hosts) as ranks,
        ):
            _, absent = connect_all([ranks], time.monotonic() + START_S)
            if absent:
                raise ContestantError("; ".join(absent.values()))
            touched = [name for name in VARIANTS if name != _DENSE]
            for name in touched:
                self._make(ranks, name, Path(folder))
            lines = {rest: self._compare(ranks, touched, rest) for rest in self._options.hosts_rest_ms}
            self._check(ranks)
            for name in touched:
                ranks.ask("drop", name=name)
            self._make(ranks, _DENSE, Path(folder))
            dense = Measured()
            self._round(ranks, _DENSE, dense, limited=True, warmup=0, steps=1, rest_ms=0)
            self._line(_DENSE, dense, 0)
            self._summarize(lines, median(dense.cable_bytes))

    def _make(self, ranks: Contestant, name: str, folder: Path) -> None:
        variant, path = VARIANTS[name], folder / f"{name}.json"
        self._plan(variant).save(path)
        made = ranks.ask(
            "make", name=name, plan=str(path), synchronization=asdict(variant.synchronization), ahead=variant.ahead
        )
        ranks.ask("round", name=name, warmup=1, steps=0, rest_ms=0)  # compiles
        self._made[name] = {
            "replicas": variant.replicas,
            "together": variant.together if variant.replicas > 1 else None,
            "synchronization": asdict(variant.synchronization) if variant.replicas > 1 else None,
            "transport": made[0]["transport"],
            "memory_bytes": max(answer["memory_bytes"] for answer in made),
        }

    def _plan(self, variant: Variant) -> Plan:
        num_ranks, per_host = self._shape.num_ranks, self._shape.ranks_per_host
        profile = true_profile(self._workload)
        if variant.planned:
            request = Request(batch_size=self._workload.global_batch // num_ranks, extra_memory=EXTRA_MEMORY)
            return search("cyclic", profile, topology(num_ranks, per_host), request)
        return Plan.cyclic(profile.shapes, num_ranks, per_host, replicas=variant.replicas, together=variant.together)

    def _compare(self, ranks: Contestant, names: list[str], rest_ms: int) -> dict[str, dict[str, Any]]:
        """Rounds of all contestants, A B A B."""
        measured = {name: Measured() for name in names}
        loop = {"warmup": self._workload.warmup, "steps": self._workload.steps, "rest_ms": rest_ms}
        for _ in range(self._options.hosts_repeats):
            for limited in (False, True):
                for name in names:
                    self._round(ranks, name, measured[name], limited=limited, **loop)
        return {name: self._line(name, measured[name], rest_ms) for name in names}

    def _round(
        self, ranks: Contestant, name: str, measured: Measured, *, limited: bool, warmup: int, steps: int, rest_ms: int
    ) -> None:
        self._hosts.limit(self._options.rate if limited else None)
        before = self._hosts.bytes_sent()
        answers = ranks.ask("round", name=name, warmup=warmup, steps=steps, rest_ms=rest_ms)
        after = self._hosts.bytes_sent()
        (measured.limited if limited else measured.unlimited).extend(slowest(answers, "step"))
        measured.cable_bytes.append(max(b - a for a, b in zip(before, after, strict=True)) / (warmup + steps))
        for what in ("exchange_bytes", "synchronization_bytes", "told_rows"):
            counted = sum(answer[what] for answer in answers) / (warmup + steps)
            measured.counted.setdefault(what, []).append(counted)

    def _line(self, name: str, measured: Measured, rest_ms: int) -> dict[str, Any]:
        """Reports one contestant."""
        workload, cable_bytes = self._workload, median(measured.cable_bytes)
        times, unlimited = summarize(measured.limited), [1e3 * second for second in measured.unlimited]
        floor_ms = cable_bytes / self._cable_bytes_per_s * 1e3
        line = {
            **times,
            "timed_loops": times.pop("timed_steps"),
            "rest_ms": rest_ms,
            "unlimited_step_ms": median(unlimited) if unlimited else None,
            "cable_bytes": round(cable_bytes),
            "cable_floor_ms": round(floor_ms, 3),
            **{what: round(median(counts)) for what, counts in measured.counted.items()},
        }
        self._report.line(
            hosts=self._options.hosts,
            rate_bits_per_s=self._options.rate,
            case=workload.name,
            contestant=name,
            dim=workload.dim,
            global_batch=workload.global_batch,
            max_rows=workload.max_rows,
            zipf=workload.zipf,
            **self._made[name],
            **line,
        )
        return line

    def _check(self, ranks: Contestant) -> None:
        """Raises ContestantError where contestants that must have learnt the same did not."""
        digests = {name: [answer["digest"] for answer in ranks.ask("digest", name=name)] for name in SAME_ORDER}
        if any(each != digests[_ONE] for each in digests.values()):
            raise ContestantError(f"{self._workload.name}: after the same steps rows differ: {digests}")

    def _summarize(self, lines: dict[int, dict[str, dict[str, Any]]], dense_bytes: float) -> None:
        for rest_ms, of_rest in lines.items():
            case = f"{self._workload.name}_{self._options.hosts}" + f", rest {rest_ms} ms" * bool(rest_ms)
            for base in BASES:
                for name, line in of_rest.items():
                    if VARIANTS[name].replicas > 1:
                        ratio = round(of_rest[base]["step_ms"] / line["step_ms"], 3)
                        self._report.ratio(f"{case}: step {base} / {name}, target {TARGET_STEP}", ratio)
        touched = next(iter(lines.values()))[_TOUCHED]["cable_bytes"]
        key = f"{self._workload.name}_{self._options.hosts}: cable bytes dense / touched-only, target {TARGET_BYTES}"
        self._report.ratio(key, round(dense_bytes / touched, 2))


def _make_quick(options: argparse.Namespace) -> None:
    """A small case that ends within 30 s."""
    for name, value in _QUICK.items():
        setattr(options, f"hosts_{name}", value)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]

"""Pipelines with replicas: what nested pipelining leaves to gain for two-dimensional sparse parallelism.

Four ranks on two hosts over a limited cable (`benchmarks.hosts`). Every number of replicas M is a collection of the
same tables in the same processes: with M = 2 the rows of a batch come from the ranks of one host, with M = 4 from the
rank itself, and what replicas send each other is all that crosses the cable. All M and both synchronizations ("exact"
sums gradients over replicas, "average" averages rows) run in turn and through a pipeline, and take turns. The network
is a wait, of such a length that communication takes the asked share of a step in turn with one replica.

Communication includes the update here: in it replicas merge gradients, or average rows.

Tables are dense; `--replicas-tiered` has their rows in a file, as `--ablation` does, and a line says so where that is
refused.

Source: NestPipe §VII-F, Table IV.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.command import Report
from benchmarks.contestant import Contestant, ContestantError, connect_all
from benchmarks.hosts import Hosts, HostsShape, bits_per_s, enter_hosts
from benchmarks.measure import cores
from benchmarks.pipeline_ablation import HIDDEN_WIDTH, LEAST_WAIT_MS, SHAPE, START_S, Calibration, calibrate
from benchmarks.pipeline_hosts import MODULE, Variant
from benchmarks.pipeline_rounds import MESSAGES, Player, Rounds, describe
from benchmarks.workload import Workload
from rowmesh.mesh.synchronization import Mode, Synchronization

_QUICK: dict[str, Any] = {"max_rows": 2_000, "batch": 256, "repeats": 1, "steps": 2, "warmup": 1, "micro_batches": 4}


@dataclass(frozen=True)
class Kind:
    """Tables with replicas, and how they are trained.

    Attributes:
        replicas: M.
        mode: of synchronization; of no matter with one replica.
        is_piped: whether through a pipeline; else in turn.
    """

    replicas: int
    mode: Mode
    is_piped: bool

    @property
    def tables(self) -> str:
        """The name of the collection."""
        return "M=1" if self.replicas == 1 else f"M={self.replicas} {self.mode}"

    @property
    def name(self) -> str:
        """As it stands in reports."""
        return f"{self.tables}, {'pipeline' if self.is_piped else 'in turn'}"


def kinds(replicas: list[int]) -> list[Kind]:
    """All that is compared; the first is what the others are compared with.

    Example:
        >>> [kind.name for kind in kinds([1, 2])][:3]
        ['M=1, in turn', 'M=1, pipeline', 'M=2 exact, in turn']
    """
    found = [Kind(1, "exact", is_piped) for is_piped in (False, True)]
    for count in replicas:
        if count > 1:
            found += [Kind(count, mode, is_piped) for mode in ("exact", "average") for is_piped in (False, True)]
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this case."""
    add = parser.add_argument
    add(
        "--replicas",
        type=_integers,
        nargs="?",
        const=[1, 2, 4],
        help="pipelines over so many replicas, by commas (1,2,4), on 4 ranks over a cable",
    )
    add("--replicas-rate", type=bits_per_s, default="500mbit", help="of the cable in each direction")
    add("--replicas-communication", type=float, default=0.4, help="share of a step in turn with one replica")
    add("--replicas-tiered", action="store_true", help="rows are in a file, four times fast memory")
    add("--replicas-depth", type=int, default=1, help="batches ahead")
    add("--replicas-micro-batches", type=int, default=8, help="of a pipeline")
    add("--replicas-dim", type=int, default=64, help="dimension of the tables")
    add("--replicas-batch", type=int, default=4096, help="samples a step, of all ranks together")
    add("--replicas-max-rows", type=int, default=40_000, help="cap on rows per table")
    add("--replicas-steps", type=int, default=10, help="steps of a timed loop")
    add("--replicas-warmup", type=int, default=3, help="steps before it")
    add("--replicas-repeats", type=int, default=5, help="rounds; in each, every contestant runs once")


def run(report: Report, options: argparse.Namespace) -> None:
    """The comparison; says so where hosts cannot be made, or tables with replicas."""
    if options.quick:
        for name, value in _QUICK.items():
            setattr(options, f"replicas_{name}", value)
    num_ranks = HostsShape.parse(SHAPE).num_ranks
    if any(count < 1 or num_ranks % count for count in options.replicas) or options.replicas_batch % num_ranks:
        raise SystemExit(f"pipeline: --replicas must divide {num_ranks} ranks, and these --replicas-batch")
    workload = Workload(
        dim=options.replicas_dim, global_batch=options.replicas_batch, max_rows=options.replicas_max_rows
    )
    with ExitStack() as stack:
        if (hosts := enter_hosts(stack, report, SHAPE)) is None:
            return
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ranks = stack.enter_context(Contestant("rowmesh", MODULE, workload, ranks=num_ranks, hosts=hosts))
        _, absent = connect_all([ranks], time.monotonic() + START_S)
        if absent:
            raise ContestantError("; ".join(absent.values()))
        player = Player(
            ranks,
            hosts,
            messages=(*MESSAGES, "update"),
            warmup=options.replicas_warmup,
            steps=options.replicas_steps,
        )
        tiers = {"folder": folder, "fast_rows": 1, "direct": True} if options.replicas_tiered else None
        Comparison(report, options, hosts, player).run(tiers)


class Comparison:
    """Replicas and pipelines of one workload."""

    def __init__(self, report: Report, options: argparse.Namespace, hosts: Hosts, player: Player) -> None:
        self._report, self._options, self._hosts, self._player = report, options, hosts, player

    def run(self, tiers: dict[str, Any] | None) -> None:
        """Makes all tables, and compares those that there are."""
        base, *others = kinds(self._options.replicas)
        refused: dict[str, str] = {}
        for kind in [base, *others]:
            if kind.is_piped:
                continue
            synchronization = asdict(Synchronization(kind.mode))
            refused[kind.tables] = self._player.hold(
                kind.tables, replicas=kind.replicas, synchronization=synchronization, tiers=tiers
            )
            if refused[kind.tables]:
                self._report.line(case="replicas", contestant=kind.tables, unavailable=refused[kind.tables])
        if refused[base.tables]:
            return
        present = [kind for kind in [base, *others] if not refused[kind.tables]]
        self._hosts.limit(self._options.replicas_rate)
        self._compare(present, self._calibrate(base))

    def _calibrate(self, base: Kind) -> Calibration:
        """How long computation waits."""
        found = Calibration(self._options.replicas_rate, LEAST_WAIT_MS)
        self._make(base, found)
        off = self._player.interleave({base.name: 0}, self._options.replicas_repeats)[base.name]
        self._player.drop([base.name])
        share = self._options.replicas_communication
        return calibrate(found, off, communication=share, retrieval=0.0, keeps_rate=True)

    def _make(self, kind: Kind, calibration: Calibration) -> None:
        options = self._options
        variant = Variant(overlap=False)
        if kind.is_piped:
            count = options.replicas_micro_batches
            variant = Variant(options.replicas_depth, count, sizes="light_ends", clustering="light_ends")
        self._player.make(
            kind.name, hidden=HIDDEN_WIDTH, wait_ms=calibration.wait_ms, tables=kind.tables, **asdict(variant)
        )

    def _compare(self, present: list[Kind], calibration: Calibration) -> None:
        """Rounds of all, A B A B."""
        options = self._options
        for kind in present:
            self._make(kind, calibration)
        depths = {kind.name: options.replicas_depth if kind.is_piped else 0 for kind in present}
        found: dict[str, Rounds] = self._player.interleave(depths, options.replicas_repeats)
        base = found[present[0].name]
        for kind in present:
            line = describe(found[kind.name], base, calibration.rate_bits_per_s)
            self._report.line(
                case="replicas",
                contestant=kind.name,
                replicas=kind.replicas,
                synchronization=kind.mode if kind.replicas > 1 else None,
                is_piped=kind.is_piped,
                depth=depths[kind.name],
                micro_batches=options.replicas_micro_batches if kind.is_piped else 1,
                is_tiered=options.replicas_tiered,
                dim=options.replicas_dim,
                global_batch=options.replicas_batch,
                max_rows=options.replicas_max_rows,
                cores=cores(),
                rate_bits_per_s=calibration.rate_bits_per_s,
                wait_ms=round(calibration.wait_ms, 3),
                samples_per_s=round(1e3 * options.replicas_batch / line["step_ms"]),
                **line,
            )
            if kind != present[0]:
                self._report.ratio(f"replicas: {present[0].name} / {kind.name}", line["speedup"])


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]

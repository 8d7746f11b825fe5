"""Ablation: what each half of nested pipelining is worth, and both together, over a cable and a disk.

Four ranks on two hosts (`benchmarks.hosts`), whose cable is limited. Rows are in a file that is read past the system's
page cache; a quarter of them fit into fast memory. The network's forward and backward are a wait, as for an
accelerator. All modes share one collection in the same processes and take turns:

    off           everything in turn: depth 0, one micro-batch, no threads
    look-ahead    dual buffer: K batches are read, routed and retrieved ahead, one micro-batch
    window        N micro-batches of frozen rows, nothing ahead
    both          N micro-batches, K batches ahead; "paper" is the paper's form of them: each micro-batch fetches its
                  own rows, and nothing crosses the step boundary

Window and both are run with sample clustering and without; "clustered" has light ends, or the paper's even sizes.

Before, the wait and the rate of the cable are chosen such that of a step in turn, communication (keys, rows, gradients)
takes 40 % and retrieval (reading, routing, retrieving) 20 %; `benchmarks.pipeline_rounds` says what is counted. With
`--ablation-rate` the cable is given, and the wait is chosen for the share of communication alone.

`--sweep` varies the dimension of the tables (the paper's over 8) and the layers of the network: computation grows with
layers and with the square of the dimension, as products of D × D matrices do.

Source: NestPipe §VII, Tables II and IV, Fig. 8 to 10.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.command import Report
from benchmarks.contestant import Contestant, ContestantError, connect_all
from benchmarks.hosts import Hosts, HostsShape, bits_per_s, enter_hosts
from benchmarks.measure import cores
from benchmarks.pipeline_figures import draw
from benchmarks.pipeline_hosts import MODULE, Variant
from benchmarks.pipeline_rounds import Player, Rounds, cable_ms, describe, share
from benchmarks.workload import Workload
from rowmesh.ops.window import MAX_PARTS

SHAPE = "2x2"
TARGETS = {"look-ahead": 1.25, "window": 1.3, "both": 1.8}
TARGET_EXPOSED, TARGET_HIDDEN = 0.13, 0.92
START_S = 300.0
OFF = "off"
BASE_DIM, BASE_LAYERS = 64, 4
FIRST_RATE, RATES = 500_000_000, (1_000_000, 20_000_000_000)  # of the cable: to begin with, and bounds
LEAST_WAIT_MS = 1.0
HIDDEN_WIDTH = 8  # of a network that is not computed: its gradients are averaged all the same
_QUICK: dict[str, Any] = {
    "max_rows": 2_000,
    "batch": 256,
    "batches": 12,
    "repeats": 1,
    "steps": 3,
    "warmup": 2,
    "depth": [1],
    "micro_batches": [1, 4],
    "calibrations": 1,
}


@dataclass(frozen=True)
class Mode:
    """A pipeline of the ablation.

    Attributes:
        name: off, look-ahead, window, both or paper.
        variant: its options.
    """

    name: str
    variant: Variant

    @property
    def is_clustered(self) -> bool:
        """Whether samples that share rows meet in a micro-batch."""
        return self.variant.clustering != "off"


def modes(count: int, depths: list[int]) -> dict[str, Mode]:
    """The modes that are run together, the first of which is off.

    Args:
        count: N.
        depths: K, each 1 or more.

    Example:
        >>> list(modes(1, [1]))
        ['off', 'look-ahead K=1', 'window N=1']
    """
    found = {OFF: Mode(OFF, Variant(0, 1, overlap=False))}
    if count == 1:
        found |= {f"look-ahead K={depth}": Mode("look-ahead", Variant(depth, 1)) for depth in depths}
        return found | {"window N=1": Mode("window", Variant(0, 1))}
    for mode, ahead in [("window", [0]), ("both", depths), ("paper", depths[:1])]:
        for depth in ahead:
            name = f"{mode} N={count}" if depth == 0 else f"{mode} K={depth} N={count}"
            plain = Variant(depth, count)
            clustered = replace(plain, sizes="light_ends", clustering="light_ends")
            if mode == "paper":
                plain = Variant(depth, count, exchange="naive", final_rows=False)
                clustered = replace(plain, clustering="greedy")
            variants = {name: plain, f"{name} clustered": clustered}
            if mode == "both":
                variants |= {f"{each}, no final rows": replace(variants[each], final_rows=False) for each in variants}
            found |= {each: Mode(mode, variant) for each, variant in variants.items()}
    return found


@dataclass(frozen=True)
class Calibration:
    """Settings of the cable and the wait.

    Attributes:
        rate_bits_per_s: of the cable.
        wait_ms: of a whole batch.
    """

    rate_bits_per_s: int
    wait_ms: float


def calibrate(
    before: Calibration,
    off: Rounds,
    *,
    communication: float,
    retrieval: float,
    keeps_rate: bool = False,
) -> Calibration:
    """The rate and the wait with which these are the shares of a step in turn.

    Beside what the cable needs for its bytes, communication takes the time that it took; so does all that is neither
    communication, retrieval nor the wait.

    Args:
        before: with which `off` was measured.
        off: rounds of a step in turn.
        communication: its share of a step.
        retrieval: its share of a step; not met where the rate is kept.
        keeps_rate: whether the cable is given.
    """
    communication_ms, retrieval_ms = off.part_ms("communication"), off.part_ms("retrieval")
    others_ms = off.step_ms - communication_ms - retrieval_ms - off.part_ms("accelerated")
    if keeps_rate:
        wait_ms = communication_ms / communication - communication_ms - retrieval_ms - others_ms
        return replace(before, wait_ms=max(wait_ms, LEAST_WAIT_MS))
    step_ms = retrieval_ms / retrieval
    num_bytes = sorted(off.cable_bytes)[len(off.cable_bytes) // 2]
    fixed_ms = communication_ms - cable_ms(num_bytes, before.rate_bits_per_s)
    left_ms = max(communication * step_ms - fixed_ms, 1e-3)
    rate = round(min(max(cable_ms(num_bytes, 1) / left_ms, RATES[0]), RATES[1]))
    wait_ms = step_ms * (1 - communication - retrieval) - others_ms
    return Calibration(rate, max(wait_ms, LEAST_WAIT_MS))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this case."""
    add = parser.add_argument
    add("--ablation", action="store_true", help="off, look-ahead, window and both, on 4 ranks over a cable and a disk")
    add("--sweep", action="store_true", help="with --ablation: by dimension and by layers of the network, too")
    add("--figure", type=Path, help="with --ablation: draws what was measured, beside the paper's numbers")
    add("--ablation-communication", type=float, default=0.4, help="share of a step in turn")
    add("--ablation-retrieval", type=float, default=0.2, help="share of a step in turn, routing included")
    add("--ablation-rate", type=bits_per_s, help="of the cable, such as 500mbit; default: what the shares need")
    add("--ablation-micro-batches", type=_integers, default=[1, 2, 4, 8, 16, 32], help="how many, by commas")
    add("--ablation-depth", type=_integers, default=[1, 2], help="batches ahead, by commas")
    add("--ablation-dim", type=int, default=BASE_DIM, help="dimension of the tables")
    add("--ablation-batch", type=int, default=4096, help="samples a step, of all ranks together")
    add("--ablation-max-rows", type=int, default=40_000, help="cap on rows per table")
    add("--ablation-fast-share", type=float, default=0.25, help="of the rows, how many fit into fast memory")
    add("--ablation-folder", type=Path, help="where files of rows are made; default: that for temporary files")
    add("--ablation-threads", type=int, default=4, help="of a rank that read, and as many that write")
    add("--ablation-batches", type=int, default=100, help="batches that differ: more than fast memory has rows for")
    add("--ablation-steps", type=int, default=10, help="steps of a timed loop")
    add("--ablation-warmup", type=int, default=3, help="steps before it")
    add("--ablation-repeats", type=int, default=5, help="rounds; in each, every mode runs once")
    add("--ablation-calibrations", type=int, default=3, help="how often rate and wait are corrected")
    add("--sweep-dim", type=_integers, default=[64, 96, 128], help="dimensions, by commas")
    add("--sweep-layers", type=_integers, default=[2, 4, 8], help="layers of the network, by commas")
    add("--sweep-micro-batches", type=int, default=8, help="of the sweep")


def run(report: Report, options: argparse.Namespace) -> None:
    """The ablation, and the sweeps; says so where hosts cannot be made."""
    if options.quick:
        for name, value in _QUICK.items():
            setattr(options, f"ablation_{name}", value)
        options.sweep_dim, options.sweep_layers, options.sweep_micro_batches = [], [2, 8], 4
    if options.ablation_batch % (num_ranks := HostsShape.parse(SHAPE).num_ranks):
        raise SystemExit(f"pipeline: --ablation-batch must divide by {num_ranks} ranks")
    if min(options.ablation_depth) < 1 or min(options.ablation_micro_batches) < 1:
        raise SystemExit("pipeline: --ablation-depth and --ablation-micro-batches are numbers of 1 or more")
    with ExitStack() as stack:
        if (hosts := enter_hosts(stack, report, SHAPE)) is None:
            return
        ablation = Ablation(report, options, hosts)
        ablation.run()
        if options.figure is not None:
            options.figure.write_text(draw(ablation.lines), encoding="utf-8")


class Ablation:
    """Modes of one workload, and of others in a sweep.

    Attributes:
        lines: what was reported.
    """

    def __init__(self, report: Report, options: argparse.Namespace, hosts: Hosts) -> None:
        self._report, self._options, self._hosts = report, options, hosts
        self.lines: list[dict[str, Any]] = []

    def run(self) -> None:
        """Calibrates, then runs all modes, then the sweeps."""
        options = self._options
        with self._player(options.ablation_dim) as player:
            calibration = self._calibrate(player)
            for asked in options.ablation_micro_batches:
                count = min(asked, MAX_PARTS)
                self._compare(
                    player,
                    modes(count, options.ablation_depth),
                    calibration,
                    case="ablation",
                    asked_micro_batches=asked,
                )
            self._summarize()
            if options.sweep:
                for layers in options.sweep_layers:
                    wait_ms = calibration.wait_ms * layers / BASE_LAYERS
                    self._sweep(player, replace(calibration, wait_ms=wait_ms), case="layers", layers=layers)
        if options.sweep:
            for dim in options.sweep_dim:
                wait_ms = calibration.wait_ms * (dim / options.ablation_dim) ** 2
                with self._player(dim) as player:
                    self._hosts.limit(calibration.rate_bits_per_s)
                    self._sweep(player, replace(calibration, wait_ms=wait_ms), case="dim", dim=dim)

    def _sweep(self, player: Player, calibration: Calibration, **about: Any) -> None:
        several = modes(self._options.sweep_micro_batches, self._options.ablation_depth[:1])
        chosen = {name: mode for name, mode in several.items() if mode.name in (OFF, "both")}
        self._compare(player, chosen, calibration, **about)

    @contextmanager
    def _player(self, dim: int) -> Iterator[Player]:
        """Ranks whose fast memory is as it is in the long run, over an unlimited cable."""
        options = self._options
        workload = Workload(dim=dim, global_batch=options.ablation_batch, max_rows=options.ablation_max_rows)
        self._hosts.limit(None)
        with ExitStack() as stack:
            tiers = {
                "folder": stack.enter_context(tempfile.TemporaryDirectory(dir=options.ablation_folder)),
                "fast_share": options.ablation_fast_share,
                "fast_rows": 1,
                "threads": options.ablation_threads,
                "direct": True,
            }
            num_ranks, num_batches = HostsShape.parse(SHAPE).num_ranks, options.ablation_batches
            ranks = stack.enter_context(
                Contestant(
                    "rowmesh",
                    MODULE,
                    workload,
                    ranks=num_ranks,
                    hosts=self._hosts,
                    tiers=tiers,
                    num_batches=num_batches,
                )
            )
            _, absent = connect_all([ranks], time.monotonic() + START_S)
            if absent:
                raise ContestantError("; ".join(absent.values()))
            player = Player(ranks, self._hosts, warmup=options.ablation_warmup, steps=options.ablation_steps)
            player.make(OFF, hidden=HIDDEN_WIDTH, wait_ms=LEAST_WAIT_MS, **asdict(modes(1, [1])[OFF].variant))
            player.round(OFF, 0, Rounds(), warmup=0, steps=num_batches)
            player.drop([OFF])
            yield player

    def _calibrate(self, player: Player) -> Calibration:
        """Sets the cable; returns it and the wait."""
        options = self._options
        found = Calibration(options.ablation_rate or FIRST_RATE, LEAST_WAIT_MS)
        shares = {"communication": options.ablation_communication, "retrieval": options.ablation_retrieval}
        player.make(OFF, hidden=HIDDEN_WIDTH, wait_ms=found.wait_ms, **asdict(modes(1, [1])[OFF].variant))
        for _ in range(options.ablation_calibrations):
            self._hosts.limit(found.rate_bits_per_s)
            player.wait(found.wait_ms)
            off = player.interleave({OFF: 0}, options.ablation_repeats)[OFF]
            found = calibrate(found, off, **shares, keeps_rate=options.ablation_rate is not None)
        player.drop([OFF])
        self._hosts.limit(found.rate_bits_per_s)
        return found

    def _compare(
        self,
        player: Player,
        chosen: dict[str, Mode],
        calibration: Calibration,
        asked_micro_batches: int = 0,
        **about: Any,
    ) -> None:
        """Rounds of some modes, A B A B."""
        options = self._options
        for name, mode in chosen.items():
            player.make(name, hidden=HIDDEN_WIDTH, wait_ms=calibration.wait_ms, **asdict(mode.variant))
        found = player.interleave({name: mode.variant.depth for name, mode in chosen.items()}, options.ablation_repeats)
        player.drop(chosen)
        workload = {
            "dim": options.ablation_dim,
            "layers": BASE_LAYERS,
            "global_batch": options.ablation_batch,
            "max_rows": options.ablation_max_rows,
            "fast_share": options.ablation_fast_share,
            "ranks": HostsShape.parse(SHAPE).num_ranks,
            "cores": cores(),
            "rate_bits_per_s": calibration.rate_bits_per_s,
            "wait_ms": round(calibration.wait_ms, 3),
        }
        for name, mode in chosen.items():
            off, rounds = found[OFF], found[name]
            variant = asdict(mode.variant) | {"asked_micro_batches": asked_micro_batches or mode.variant.micro_batches}
            line = workload | about | {"mode": mode.name, "is_clustered": mode.is_clustered, "contestant": name}
            line |= variant | describe(rounds, off, calibration.rate_bits_per_s)
            if mode.name == OFF:
                line["communication_share"] = round(share(off.part_ms("communication"), off.step_ms), 3)
                line["retrieval_share"] = round(share(off.part_ms("retrieval"), off.step_ms), 3)
            self._report.line(**line)
            self.lines.append(line)

    def _summarize(self) -> None:
        """The best of each mode, beside what was to be reached."""
        for mode, target in TARGETS.items():
            if lines := [line for line in self.lines if line["mode"] == mode]:
                best = max(lines, key=lambda line: line["speedup"])
                self._report.ratio(f"ablation: off / {best['contestant']}, target {target}", best["speedup"])
                if mode != "look-ahead":
                    text = f"ablation: exposed of communication, {best['contestant']}, target {TARGET_EXPOSED}"
                    self._report.ratio(text, best["exposed"])
                if mode != "window":
                    text = f"ablation: retrieval hidden, {best['contestant']}, target {TARGET_HIDDEN}"
                    self._report.ratio(text, best["retrieval_hidden"])
        shares = [(line["communication_share"], line["retrieval_share"]) for line in self.lines if line["mode"] == OFF]
        for name, values in zip(("communication", "retrieval"), zip(*shares, strict=True), strict=True):
            self._report.ratio(f"ablation: {name} of a step in turn", round(math.fsum(values) / len(values), 3))


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]

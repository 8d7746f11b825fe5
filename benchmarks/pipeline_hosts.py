"""Overlap between two hosts: full steps of a model whose communication is a given share of a step done in turn.

Each rank is in a network namespace of its own; they are joined by a cable of limited speed (`benchmarks.hosts`). The
width of the model (`benchmarks.tower`) is chosen so that, in a step that does everything in turn, keys, rows, gradients
and the averaging of the network's gradients take the share that is asked for.

With `--elsewhere` forward and backward of the network are a wait, as for an accelerator: on a rank's only core
computation slows what sends, and is slowed by it. What is chosen then is how long the wait is.

All pipelines share one collection and take turns. Each is also run without threads: the times of its tasks then, by
which the schedule is played, are the model that the step is compared with.

- speed-up: over the same micro-batches in turn (depth 0, no threads);
- exposed: what a step takes beyond the computation of those, over their communication;
- step over processor time: of all ranks together, over the cores of the machine. Without a core to spare no step is
  shorter than that.

Source: NestPipe §V, Table II (exposed 0.13 with 4 micro-batches on 1,536 workers).
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.command import Report
from benchmarks.contestant import Contestant, ContestantError, connect_all
from benchmarks.hosts import PAYLOAD_SHARE, Hosts, bits_per_s, enter_hosts
from benchmarks.measure import cores, median, slowest
from benchmarks.workload import Workload
from rowmesh.pipeline.playing import play, step_s
from rowmesh.pipeline.schedule import Task, make_schedule

MODULE, PEER = "benchmarks.ranks.pipeline", "benchmarks.peers.torchrec_step"
TARGET_PROCESSOR = 1.08
START_S = 300.0
NETWORK = ("open", "final", "rows", "gradients", "average")  # tasks that wait for the cable
WIDTHS = (16, 160)
MIDDLE = 64
CORRECTIONS = 3  # of the width, or the wait
_IN_TURN = ", in turn"
CLIPPED = "ahead, final rows, clipped"


@dataclass(frozen=True)
class Variant:
    """Options of a pipeline, and whether gradients are clipped."""

    depth: int = 0
    micro_batches: int = 1
    exchange: str = "delta"
    final_rows: bool = True
    sizes: str = "even"
    clustering: str = "off"
    overlap: bool = True
    clips: bool = False


@dataclass(frozen=True)
class Network:
    """What a rank computes.

    Attributes:
        hidden: width of the network.
        wait_ms: if not 0, how long its forward and backward are waited for instead.
    """

    hidden: int
    wait_ms: float = 0.0


def variants(count: int, *, clips: bool = False) -> dict[str, Variant]:
    """The pipelines with so many micro-batches; the first is what the others are compared with."""
    light = Variant(1, count, sizes="light_ends", clustering="light_ends")
    return {
        "in turn": Variant(0, count, overlap=False),
        "window": Variant(0, count),
        "ahead": replace(light, final_rows=False),
        "ahead, final rows": light,
        **({CLIPPED: replace(light, clips=True)} if clips else {}),
        "paper": Variant(1, count, exchange="naive", final_rows=False, clustering="greedy"),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this case."""
    add = parser.add_argument
    add("--hosts", type=int, default=0, choices=(0, 2), help="overlap between so many hosts, of one rank each")
    add("--rate", type=bits_per_s, default="500mbit", help="of the cable in each direction, such as 100mbit")
    add("--share", type=_integers, default=[20, 40, 60], help="per cent of a step that communication takes, by commas")
    add("--elsewhere", action="store_true", help="forward and backward of the network take no core: they are a wait")
    add("--micro-batches", type=_integers, default=[4, 8], help="how many, separated by commas")
    add("--clip", action="store_true", help="beside the others a pipeline whose gradients are clipped by their norm")
    add("--hosts-dim", type=int, default=64, help="dimension of the tables")
    add("--hosts-batch", type=int, default=4096, help="samples a step, of both ranks together")
    add("--hosts-max-rows", type=int, default=1_000_000, help="cap on rows per table")
    add("--hosts-steps", type=int, default=10, help="steps of a timed loop")
    add("--hosts-repeats", type=int, default=5, help="rounds; in each, every contestant runs once")


def run(report: Report, options: argparse.Namespace) -> None:
    """Every share; says so where hosts cannot be made."""
    if options.quick:
        options.share, options.micro_batches, options.hosts_repeats, options.hosts_steps = [40], [4], 1, 4
        options.hosts_batch, options.hosts_max_rows, options.peer_python = 1024, 20_000, None
    workload = Workload(
        dim=options.hosts_dim,
        global_batch=options.hosts_batch,
        max_rows=options.hosts_max_rows,
        steps=options.hosts_steps,
        warmup=2,
    )
    with ExitStack() as stack:
        if (hosts := enter_hosts(stack, report, options.hosts)) is None:
            return
        ranks = stack.enter_context(Contestant("rowmesh", MODULE, workload, ranks=2, hosts=hosts))
        _, absent = connect_all([ranks], time.monotonic() + START_S)
        if absent:
            raise ContestantError("; ".join(absent.values()))
        hosts.limit(options.rate)
        case = Case(report, options, workload, hosts, ranks)
        for share in options.share:
            case.run(share)


class Case:
    """One workload on two hosts."""

    def __init__(
        self, report: Report, options: argparse.Namespace, workload: Workload, hosts: Hosts, ranks: Contestant
    ) -> None:
        self._report, self._options, self._workload = report, options, workload
        self._hosts, self._ranks = hosts, ranks

    def run(self, share: int) -> None:
        """One share of communication."""
        for count in self._options.micro_batches:
            network = self._network(share / 100, count)
            with ExitStack() as stack:
                self._compare(share, count, network, self._peers(stack, network.hidden))

    def _network(self, share: float, count: int) -> Network:
        """With which communication is this share of a step in turn: computation is linear in the width."""
        narrow, middle, wide = (
            statistics.median(slowest(self._ranks.ask("compute", hidden=width, steps=4), "step"))
            for width in (WIDTHS[0], MIDDLE, WIDTHS[1])
        )
        slope = (wide - narrow) / (WIDTHS[1] - WIDTHS[0])
        network = Network(MIDDLE, round(1e3 * middle, 2) if self._options.elsewhere else 0.0)
        for _ in range(CORRECTIONS):
            self._make("calibration", network, variants(count)["in turn"])
            self._round("calibration")
            rounds = [self._round("calibration") for _ in range(2)]
            longer_s = communication_s(mean_tasks(rounds)) / share - median_step_s(rounds)
            if self._options.elsewhere:
                network = replace(network, wait_ms=round(max(network.wait_ms + 1e3 * longer_s, 1.0), 2))
            else:
                network = Network(max(4, round(network.hidden + longer_s / slope)))
        return network

    def _compare(self, share: int, count: int, network: Network, peers: list[Contestant]) -> None:
        """Rounds of all pipelines and of the peer, A B A B."""
        chosen = variants(count, clips=self._options.clip)
        modelled = {
            f"{name}{_IN_TURN}": replace(variant, overlap=False) for name, variant in chosen.items() if variant.overlap
        }
        everyone = {**chosen, **modelled}
        rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in everyone}
        peer_s: dict[str, list[float]] = {peer.name: [] for peer in peers}
        for name, variant in everyone.items():
            self._make(name, network, variant)
        for _ in range(self._options.hosts_repeats):
            for name in everyone:
                rounds[name].append(self._round(name))
            for peer in peers:
                peer_s[peer.name] += slowest(peer.ask("train"), "full")
        self._write(share, count, network, everyone, rounds, peer_s)

    def _write(
        self,
        share: int,
        count: int,
        network: Network,
        everyone: dict[str, Variant],
        rounds: dict[str, Any],
        peer_s: dict[str, list[float]],
    ) -> None:
        times = {name: round(1e3 * median_step_s(of), 3) for name, of in rounds.items()}
        communication = 1e3 * communication_s(mean_tasks(rounds["in turn"]))
        about = {
            "share": share,
            "micro_batches": count,
            **asdict(network),
            "dim": self._workload.dim,
            "global_batch": self._workload.global_batch,
            "rate_bits_per_s": self._options.rate,
        }
        case = f"share {share} %{', computed elsewhere' if network.wait_ms else ''}, N={count}"
        for name, variant in everyone.items():
            tasks, received = mean_tasks(rounds[name]), median([r[0]["received_bytes"] for r in rounds[name]], 0)
            processor = processor_ms(rounds[name], cores())
            line = {
                "contestant": name,
                "step_ms": times[name],
                "received_bytes": received,
                "cpu_ms": median([1e3 * rank["cpu_s"] for each in rounds[name] for rank in each]),
                "cores": cores(),
                "processor_ms": round(processor, 3),
                "cable_floor_ms": round(received / (self._options.rate / 8 * PAYLOAD_SHARE) * 1e3, 2),
                "tasks_ms": by_stage(tasks),
            }
            if name == "in turn":
                line |= {"communication_ms": round(communication, 2), "share": round(communication / times[name], 3)}
            elif variant.overlap:
                exposed = (times[name] - times["in turn"] + communication) / communication
                in_turn = rounds[f"{name}{_IN_TURN}"]
                processor_s = mean_tasks(in_turn, "processor")
                if network.wait_ms:  # computed elsewhere
                    processor_s = {task: s for task, s in processor_s.items() if not task.startswith("compute")}
                model = predicted_ms(variant, mean_tasks(in_turn), processor_s, cores() / len(in_turn[0]))
                line |= {"exposed": round(exposed, 3), "model_ms": round(model, 2)}
                self._report.ratio(f"{case}: in turn / {name}", round(times["in turn"] / times[name], 3))
                self._report.ratio(f"{case}: exposed, {name}", round(exposed, 3))
                self._report.ratio(f"{case}: step / model, {name}", round(times[name] / model, 3))
                text = f"{case}: step / processor time, {name}, target without a core to spare {TARGET_PROCESSOR}"
                self._report.ratio(text, round(times[name] / processor, 3))
            self._report.line(**about | line)
        if CLIPPED in times:
            name = CLIPPED.rpartition(",")[0]
            self._report.ratio(f"{case}: clipped / {name}", round(times[CLIPPED] / times[name], 3))
        for name, seconds in peer_s.items():
            step_ms = median([1e3 * second for second in seconds])
            self._report.line(**about, contestant=name, step_ms=step_ms)
            best = min(times[each] for each, variant in everyone.items() if variant.overlap)
            self._report.ratio(f"{case}: {name} / best", round(step_ms / best, 3))

    def _make(self, name: str, network: Network, variant: Variant) -> None:
        self._ranks.ask("make", name=name, **asdict(network), **asdict(variant))

    def _round(self, name: str) -> list[dict[str, Any]]:
        return self._ranks.ask("round", name=name, warmup=self._workload.warmup, steps=self._workload.steps)

    def _peers(self, stack: ExitStack, hidden: int) -> list[Contestant]:
        """TorchRec by both ways of cutting tables, where there is one."""
        if not self._options.peer_python or self._options.elsewhere:
            return []
        peers = [
            stack.enter_context(
                Contestant(
                    f"torchrec {sharding}",
                    PEER,
                    self._workload,
                    ranks=2,
                    hosts=self._hosts,
                    hidden=hidden,
                    python=self._options.peer_python,
                    sharding=sharding,
                )
            )
            for sharding in ("table_wise", "row_wise")
        ]
        ready, absent = connect_all(peers, time.monotonic() + START_S)
        for name, why in absent.items():
            self._report.line(contestant=name, unavailable=why)
        return ready


def mean_tasks(rounds: list[list[dict[str, Any]]], kind: str = "tasks") -> dict[str, float]:
    """Task → seconds of a step, or of them the processor's: the median over rounds of the mean over ranks."""
    names = rounds[0][0][kind]
    return {
        name: statistics.median(statistics.mean(rank[kind].get(name, 0.0) for rank in each) for each in rounds)
        for name in names
    }


def communication_s(tasks: dict[str, float]) -> float:
    """Seconds of the tasks that wait for the cable."""
    return sum(seconds for task, seconds in tasks.items() if task.split(".")[0] in NETWORK)


def median_step_s(rounds: list[list[dict[str, Any]]]) -> float:
    """Seconds of a step of the slowest rank, in the round in the middle."""
    return statistics.median(slowest(each, "step")[0] for each in rounds)


def processor_ms(rounds: list[list[dict[str, Any]]], num_cores: int) -> float:
    """Milliseconds that so many cores need at least for the processor time of a step of all ranks.

    >>> processor_ms([[{"cpu_s": 0.03}, {"cpu_s": 0.05}]], 2)
    40.0
    """
    return 1e3 * statistics.median(sum(rank["cpu_s"] for rank in each) for each in rounds) / num_cores


def by_stage(tasks: dict[str, float]) -> dict[str, float]:
    """Milliseconds of each stage, micro-batches added up."""
    stages: dict[str, float] = {}
    for name, seconds in tasks.items():
        stage = name.split(".")[0]
        stages[stage] = stages.get(stage, 0.0) + 1e3 * seconds
    return {stage: round(ms, 2) for stage, ms in stages.items()}


def predicted_ms(variant: Variant, tasks: dict[str, float], processor: dict[str, float], cores_of_rank: float) -> float:
    """Predicts a step from what its tasks take in turn; the cable carries one thing at a time.

    Args:
        variant: of the pipeline.
        tasks: seconds of each.
        processor: of them, those in which it had a processor.
        cores_of_rank: that its threads share.
    """
    finds_final = variant.final_rows and variant.depth > 0 and variant.exchange == "delta"
    schedule = make_schedule(variant.depth, variant.micro_batches, fetches_final=finds_final)

    def seconds(task: Task) -> float:
        return tasks.get(f"{task.stage}.{task.part}", 0.0)

    def share(task: Task) -> float:
        name = f"{task.stage}.{task.part}"
        return min(processor.get(name, 0.0) / tasks[name], 1.0) if tasks.get(name) else 0.0

    played_s = step_s(play(schedule, seconds, num_turns=12, cores=cores_of_rank, share=share))
    return 1e3 * max(played_s, communication_s(tasks))


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]

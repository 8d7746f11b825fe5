"""Look-ahead over a slow tier: full steps of one rank, a quarter of whose rows fit into fast memory.

The others are in a file that is read and written past the system's page cache, every row from the start, so that what
is read comes from the disk. One thread computes; the others have a core to themselves.

- speed-up: of K batches ahead over none (K = 0, in turn);
- auto: the depth that `rowmesh.pipeline.auto` chooses from the stages of the steps in turn;
- hidden: 1 − (step − step with all rows in memory) / seconds that retrieval takes in turn.

Source: NestPipe §IV; EL-Rec (SC'22) §V, Fig. 16 (1.30 x over a sequential loop).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import Report
from benchmarks.contestant import Contestant, ContestantError, connect_all
from benchmarks.measure import cores, median, slowest
from benchmarks.pipeline_hosts import by_stage, mean_tasks
from benchmarks.workload import Workload
from rowmesh.pipeline.auto import Choice, choose
from rowmesh.pipeline.schedule import make_schedule

MODULE = "benchmarks.ranks.pipeline"
_STAGES = {stage.name for stage in make_schedule(1, 1, is_tiered=True).stages}
TARGET_HIDDEN, TARGET_SPEED = 0.95, 1.3
START_S = 300.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this case."""
    add = parser.add_argument
    add("--tier", choices=("disk",), help="look-ahead over rows in a file")
    add("--tier-folder", type=Path, help="where the file is made; default: the system's folder for temporary files")
    add("--tier-share", type=float, default=0.25, help="of the rows, how many fit into fast memory")
    add("--tier-dim", type=int, default=64, help="dimension of the tables")
    add("--tier-batch", type=int, default=2048, help="samples a step")
    add("--tier-max-rows", type=int, default=40_000, help="cap on rows per table")
    add("--tier-hidden", type=int, default=64, help="width of the model, which sets what a step computes")
    add("--tier-threads", type=int, default=8, help="that read, and as many that write")
    add("--tier-depth", type=_integers, default=[1, 2], help="batches ahead, by commas")
    add("--tier-batches", type=int, default=160, help="batches that differ: more than fast memory has rows for")
    add("--tier-steps", type=int, default=15, help="steps of a timed loop")
    add("--tier-repeats", type=int, default=5, help="rounds; in each, every contestant runs once")


def run(report: Report, options: argparse.Namespace) -> None:
    """The comparison."""
    if options.quick:
        options.tier_batches = 20
        options.tier_max_rows, options.tier_batch, options.tier_repeats, options.tier_steps = 4_000, 512, 1, 4
    workload = Workload(
        dim=options.tier_dim,
        global_batch=options.tier_batch,
        max_rows=options.tier_max_rows,
        steps=options.tier_steps,
        warmup=4,
    )
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.tier_folder))
        tiers = {
            "folder": folder,
            "fast_share": options.tier_share,
            "fast_rows": 1,
            "threads": options.tier_threads,
            "direct": True,
        }
        num_batches = options.tier_batches
        tiered = stack.enter_context(
            Contestant("tiered", MODULE, workload, ranks=1, tiers=tiers, num_batches=num_batches)
        )
        fast = stack.enter_context(
            Contestant(
                "in memory", MODULE, workload, ranks=1, tiers=tiers | {"fast_share": 1.0}, num_batches=num_batches
            )
        )
        _, absent = connect_all([tiered, fast], time.monotonic() + START_S)
        if absent:
            raise ContestantError("; ".join(absent.values()))
        _compare(report, options, workload, tiered, fast)


def _compare(
    report: Report, options: argparse.Namespace, workload: Workload, tiered: Contestant, fast: Contestant
) -> None:
    in_turn = {"depth": 0, "overlap": False}
    contestants = {"K=0, in turn": (tiered, in_turn), "all in memory": (fast, in_turn)}
    contestants |= {f"K={depth}": (tiered, {"depth": depth}) for depth in options.tier_depth}
    rounds: dict[str, list[Any]] = {name: [] for name in contestants}
    for name, (ranks, pipeline) in contestants.items():
        ranks.ask("make", name=name, hidden=options.tier_hidden, **pipeline)
    for ranks in (tiered, fast):  # until fast memory is what it is in the long run
        ranks.ask(
            "round",
            name=next(name for name, (r, _) in contestants.items() if r is ranks),
            warmup=0,
            steps=options.tier_batches,
        )
    for _ in range(options.tier_repeats):
        for name, (ranks, _) in contestants.items():
            rounds[name].append(ranks.ask("round", name=name, warmup=workload.warmup, steps=workload.steps))
    times = {name: median([slowest(each, "step")[0] * 1e3 for each in of]) for name, of in rounds.items()}
    retrieve_ms = mean_tasks(rounds["K=0, in turn"])["retrieve.0"] * 1e3
    choice = _chosen(rounds["K=0, in turn"])
    report.line(case="auto", depth=choice.depth, expected_ms=1e3 * choice.step_s, in_turn_ms=1e3 * choice.in_turn_s)
    for name in contestants:
        last = rounds[name][-1][0]
        line: dict[str, Any] = {
            "contestant": name,
            "step_ms": times[name],
            "tasks_ms": by_stage(mean_tasks(rounds[name])),
            "memory_bytes": last["memory"],
            "resident_bytes": last["resident_bytes"],
            "tier": last["tier"],
        }
        if name.startswith("K=") and "turn" not in name:
            hidden = 1 - (times[name] - times["all in memory"]) / retrieve_ms
            line["hidden"] = round(hidden, 3)
            report.ratio(
                f"disk: in turn / {name}, target {TARGET_SPEED}", round(times["K=0, in turn"] / times[name], 3)
            )
            report.ratio(f"disk: hidden, {name}, target {TARGET_HIDDEN}", round(hidden, 3))
        report.line(
            case="disk",
            dim=workload.dim,
            batch=workload.global_batch,
            rows=sum(workload.table_rows),
            fast_share=options.tier_share,
            hidden_width=options.tier_hidden,
            **line,
        )


def _chosen(in_turn: list[Any]) -> Choice:
    """The choice of depth by what the stages of steps in turn took."""
    stages, processor = (
        {stage: ms / 1e3 for stage, ms in by_stage(mean_tasks(in_turn, kind)).items() if stage in _STAGES}
        for kind in ("tasks", "processor")
    )
    schedule = partial(make_schedule, is_tiered=True)
    return choose(stages, processor, cores=cores(), can_split=True, counts=(1,), schedule=schedule)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]

"""EL-Rec's system as a whole: tensor-train, tiered and dense tables of one model, through a pipeline and in turn.

A DLRM with Criteo's tables is trained on one rank: the largest are tensor-train tables, tables of a middle size are in
a file that is read past the system's page cache, small ones are in memory. A parameter server's step is the baseline:
every table is in the file, with the same share of rows in fast memory, and everything is done in turn.

- speed-up: the same system in turn over K batches ahead;
- over the parameter server: its step over that of K batches ahead;
- exposed: rows, gradients and updates while nothing is computed. Rows of cores are computed and cores are updated in
  these, one after the other with the network, which look-ahead does not change.

Source: EL-Rec (SC'22) §V, Fig. 16: pipelined 1.30 x sequential and 2.44 x DLRM with the largest table as cores and the
others in host memory; Fig. 11: 3 x DLRM.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.command import Report
from benchmarks.contestant import Contestant, ContestantError, connect_all
from benchmarks.measure import slowest
from benchmarks.pipeline_hosts import by_stage, mean_tasks
from benchmarks.workload import CRITEO_KAGGLE, Workload

MODULE = "benchmarks.ranks.pipeline"
IN_TURN, SERVER = "in turn", "parameter server"
LOOP = ("rows", "gradients", "update")
"""Stages that wait for the computation of a batch, or the next one for them."""
TARGET, PAPER_IN_TURN, PAPER_SERVER = 1.3, 1.3, 2.44
START_S = 300.0

Rounds = list[list[dict[str, Any]]]
"""Answers by round and rank."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this case."""
    add = parser.add_argument
    add("--el-rec", action="store_true", help="tensor-train, tiered and dense tables together")
    add("--el-rec-folder", type=Path, help="where files are made; default: the system's folder for temporary files")
    add("--el-rec-cored", type=int, default=1, help="how many of the largest tables are tensor-train tables")
    add("--el-rec-rank", type=int, default=16, help="of tensor-train tables")
    add("--el-rec-dense-rows", type=int, default=10_000, help="tables of fewer rows are dense")
    add("--el-rec-share", type=float, default=0.1, help="of tiered rows, how many fit into fast memory")
    add("--el-rec-dim", type=int, default=64, help="dimension of the tables")
    add("--el-rec-batch", type=int, default=2048, help="samples a step")
    add("--el-rec-max-rows", type=int, default=100_000, help="cap on rows per table")
    add("--el-rec-hidden", type=int, default=32, help="width of the model, which sets what a step computes")
    add("--el-rec-threads", type=int, default=8, help="that read, and as many that write")
    add("--el-rec-depth", type=_integers, default=[1, 2, 4], help="batches ahead, by commas")
    add("--el-rec-batches", type=int, default=100, help="batches that differ: more than fast memory has rows for")
    add("--el-rec-steps", type=int, default=15, help="steps of a timed loop")
    add("--el-rec-repeats", type=int, default=5, help="rounds; in each, every contestant runs once")


def run(report: Report, options: argparse.Namespace) -> None:
    """The comparison.

    Raises:
        ContestantError: a program did not start or failed.
    """
    if options.quick:
        options.el_rec_max_rows, options.el_rec_batch, options.el_rec_batches = 10_000, 256, 12
        options.el_rec_depth, options.el_rec_repeats, options.el_rec_steps = [1, 2], 1, 4
    workload = Workload(
        dim=options.el_rec_dim,
        global_batch=options.el_rec_batch,
        max_rows=options.el_rec_max_rows,
        steps=options.el_rec_steps,
        warmup=4,
    )
    storages = storages_of(workload, options.el_rec_cored, options.el_rec_dense_rows)
    with ExitStack() as stack:
        tiers = {
            "folder": stack.enter_context(tempfile.TemporaryDirectory(dir=options.el_rec_folder)),
            "fast_share": options.el_rec_share,
            "fast_rows": 1,
            "threads": options.el_rec_threads,
            "direct": True,
        }
        ours, server = (
            stack.enter_context(
                Contestant(
                    name,
                    MODULE,
                    workload,
                    ranks=1,
                    tiers=tiers,
                    num_batches=options.el_rec_batches,
                    storages={"tables": tables, "rank": options.el_rec_rank},
                )
            )
            for name, tables in (("EL-Rec", storages), (SERVER, ["tiered"] * len(storages)))
        )
        _, absent = connect_all([ours, server], time.monotonic() + START_S)
        if absent:
            raise ContestantError("; ".join(absent.values()))
        _compare(report, options, workload, storages, ours, server)


def storages_of(workload: Workload, cored: int, dense_rows: int) -> list[str]:
    """The storage of each table: cores of the largest, dense below so many rows, and tiered between.

    Example:
        >>> storages = storages_of(Workload(), cored=1, dense_rows=10_000)
        >>> storages[:4], [storages.count(name) for name in ("tensor_train", "tiered", "dense")]
        (['dense', 'dense', 'tensor_train', 'tiered'], [1, 9, 16])
    """
    largest = sorted(range(len(CRITEO_KAGGLE)), key=lambda number: -CRITEO_KAGGLE[number])[:cored]
    return [
        "tensor_train" if number in largest else "dense" if rows < dense_rows else "tiered"
        for number, rows in enumerate(workload.table_rows)
    ]


def _compare(
    report: Report,
    options: argparse.Namespace,
    workload: Workload,
    storages: list[str],
    ours: Contestant,
    server: Contestant,
) -> None:
    in_turn = {"depth": 0, "overlap": False}
    contestants: dict[str, tuple[Contestant, dict[str, Any]]] = {SERVER: (server, in_turn), IN_TURN: (ours, in_turn)}
    contestants |= {f"K={depth}": (ours, {"depth": depth}) for depth in options.el_rec_depth}
    for name, (ranks, pipeline) in contestants.items():
        ranks.ask("make", name=name, hidden=options.el_rec_hidden, **pipeline)
    for name in (SERVER, IN_TURN):  # until fast memory is what it is in the long run
        contestants[name][0].ask("round", name=name, warmup=0, steps=options.el_rec_batches)
    rounds: dict[str, Rounds] = {name: [] for name in contestants}
    for _ in range(options.el_rec_repeats):
        for name, (ranks, _) in contestants.items():
            rounds[name].append(
                ranks.ask("round", name=name, warmup=workload.warmup, steps=workload.steps, messages=LOOP)
            )
    counts = {name: storages.count(name) for name in ("tensor_train", "tiered", "dense")}
    for name, found in rounds.items():
        line = describe(found, rounds[IN_TURN], rounds[SERVER])
        report.line(
            case="el_rec",
            contestant=name,
            dim=workload.dim,
            batch=workload.global_batch,
            rows=sum(workload.table_rows),
            tables={"tiered": len(storages)} if name == SERVER else counts,
            rank=options.el_rec_rank,
            fast_share=options.el_rec_share,
            hidden_width=options.el_rec_hidden,
            **line,
        )
        if name.startswith("K="):
            text = f"el_rec: in turn / {name}, target {TARGET}, the paper {PAPER_IN_TURN}"
            report.ratio(text, line["over_in_turn"])
            report.ratio(f"el_rec: {SERVER} / {name}, the paper {PAPER_SERVER}", line["over_server"])


def describe(rounds: Rounds, in_turn: Rounds, server: Rounds) -> dict[str, Any]:
    """The values of a report's line: medians over rounds, ratios of steps, and what is exposed.

    Args:
        rounds: of a contestant.
        in_turn: of the same system, with everything done in turn.
        server: of the parameter server.
    """
    step_ms, tasks, last = _step_ms(rounds), mean_tasks(rounds), rounds[-1][0]
    exposed_ms = _part_ms(rounds, "exposed_communication")
    line = {
        "step_ms": step_ms,
        "over_in_turn": _step_ms(in_turn) / step_ms,
        "over_server": _step_ms(server) / step_ms,
        "computed_ms": _part_ms(rounds, "computed"),
        "loop_ms": _part_ms(rounds, "communication"),
        "exposed_loop_ms": exposed_ms,
        "exposed_loop_share": exposed_ms / step_ms,
        "retrieval_ms": _part_ms(rounds, "retrieval"),
        "exposed_retrieval_ms": _part_ms(rounds, "exposed_retrieval"),
        "cpu_ms": 1e3 * median(mean(rank["cpu_s"] for rank in each) for each in rounds),
    }
    return {name: round(value, 3) for name, value in line.items()} | {
        "tasks_ms": by_stage(tasks),
        "memory_bytes": last["memory"],
        "disk": last["disk"],
    }


def _step_ms(rounds: Rounds) -> float:
    return median(1e3 * slowest(each, "step")[0] for each in rounds)


def _part_ms(rounds: Rounds, name: str) -> float:
    return median(1e3 * mean(rank["parts"][name] for rank in each) for each in rounds)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]

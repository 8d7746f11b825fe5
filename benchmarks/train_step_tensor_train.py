"""`benchmarks.train_step --tensor-train`: a full DLRM step with large tables as cores, beside all of them dense."""

from __future__ import annotations

from typing import Any

from benchmarks.command import Options, Report
from benchmarks.contest import Answers, contestants, take_turns
from benchmarks.measure import slowest, summarize
from benchmarks.workload import Workload

MODULE = "benchmarks.ranks.train_step"
TRANSPORTS = ("one_sided", "collective")
TARGET = 1.3  # times the dense step


def run_case(options: Options, report: Report, workload: Workload) -> None:
    """One case: dense and tensor-train tables in turns, by both transports."""
    rank, rows = options.extra["tensor_train_rank"], options.extra["tensor_train_rows"]
    rows = min(rows, max(workload.table_rows))
    cored: dict[str, Any] = {"cored_rows": rows, "tensor_train_rank": rank}
    ours = {
        f"{kind} {name}": (MODULE, {"transport": name, **settings})
        for name in TRANSPORTS
        for kind, settings in (("dense", {}), ("tensor_train", cored))
    }
    num_cored = sum(each >= rows for each in workload.table_rows)
    with contestants(options, report, workload, ours) as (own, _):
        rounds = take_turns("parts", own, options.repeats)
    for name in TRANSPORTS:
        dense = _measured(rounds, f"dense {name}")
        report.line(case=workload.name, contestant=f"dense {name}", **dense)
        found = _measured(rounds, f"tensor_train {name}")
        ratio = round(found["full_ms"] / dense["full_ms"], 4)
        report.line(
            case=workload.name,
            contestant=f"tensor_train {name}",
            tables=num_cored,
            min_rows=rows,
            rank=rank,
            **found,
            times_dense=ratio,
            sparse_times_dense=round(found["sparse_ms"] / dense["sparse_ms"], 3),
            target=TARGET,
            times_smaller=round(dense["table_bytes_of_all_ranks"] / found["table_bytes_of_all_ranks"], 2),
        )
        report.ratio(f"{workload.name}_{name}", ratio)


def _measured(rounds: Answers, name: str) -> dict[str, Any]:
    """The full step, its sparse part, and the memory of tables and their optimizer state."""
    measured: dict[str, Any] = {}
    for part in ("full", "sparse"):
        measured |= summarize([second for answers in rounds[name] for second in slowest(answers, part)], part)
    return measured | {"table_bytes_of_all_ranks": sum(answer["table_bytes"] for answer in rounds[name][-1])}

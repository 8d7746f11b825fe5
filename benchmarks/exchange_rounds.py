"""All-to-all rounds and bytes of a step over gloo: tables fused, one exchange a table, and no deduplication.

    python -m benchmarks.exchange_rounds

For 1, 4 and 26 tables of one spec, the largest ones of the workload.
"""

from __future__ import annotations

from typing import Any

from benchmarks.command import Options, Report, parse
from benchmarks.contest import take_turns
from benchmarks.contestant import Contestant, ContestantError, connect_all
from benchmarks.measure import slowest, summarize
from benchmarks.workload import Workload

MODULE = "benchmarks.ranks.exchange_rounds"
NUM_TABLES = (1, 4, 26)
VARIANTS = ("fused", "per_table", "no_dedup")


def measure(options: Options, workload: Workload, num_tables: int) -> dict[str, dict[str, Any]]:
    """Each variant's rounds, bytes and times.

    Raises:
        ContestantError: the ranks did not start, or failed.
    """
    name = f"rowmesh, {num_tables} tables"
    with Contestant(name, MODULE, workload, ranks=options.ranks, num_tables=num_tables) as contestant:
        ready, absent = connect_all([contestant], options.deadline_s + 60.0)
        if absent:
            raise ContestantError(absent[name])
        rounds = take_turns("round", ready, options.repeats)[name]
        counts = contestant.ask("count")
    result = {}
    for variant in VARIANTS:
        seconds = [second for answers in rounds for second in slowest(answers, variant)]
        sent = sum(answer[variant][1] for answer in counts) / len(counts)
        rounds_a_step = round(counts[0][variant][0], 2)
        result[variant] = {"rounds": rounds_a_step, "bytes_sent_a_rank": round(sent), **summarize(seconds)}
    return result


def run_case(options: Options, report: Report, workload: Workload, num_tables: int) -> None:
    """One number of tables: a line for each variant."""
    result = measure(options, workload, num_tables)
    fused = result["fused"]
    for variant, line in result.items():
        ratios = {name: round(line[name] / fused[name], 2) for name in ("rounds", "bytes_sent_a_rank", "step_ms")}
        report.line(
            case=workload.name,
            variant=variant,
            tables=num_tables,
            dim=workload.dim,
            global_batch=workload.global_batch,
            pooling=workload.pooling,
            **line,
            times_fused=ratios,
        )
        if variant != "fused":
            for name, ratio in ratios.items():
                report.ratio(f"{workload.name} {num_tables} tables: {variant} / fused {name}", ratio)


def main() -> None:
    """Runs every case asked for."""
    options = parse((__doc__ or "").splitlines()[0])
    report = Report("exchange_rounds", options.output)
    for workload in options.workloads:
        for num_tables in NUM_TABLES:
            run_case(options, report, workload, num_tables)
    report.finish()


if __name__ == "__main__":
    main()

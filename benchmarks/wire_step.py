"""The sparse step with rounded messages against that with whole ones, between hosts (`embedding_step --wire --hosts`).

Every round is run with each speed of the cable; the ratio is that of the medians. What the bytes alone would give is 2,
for rows and gradients are halved, less the ids, which are not.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from benchmarks.command import Options, Report
from benchmarks.contest import joined
from benchmarks.contestant import Contestant, ContestantError, connect_all
from benchmarks.hosts import GIGABIT, Hosts, HostsError
from benchmarks.measure import slowest, summarize
from benchmarks.workload import Workload

MODULE = "benchmarks.ranks.planned_step"
SPEEDS = {"unlimited": None, "10gbit": 10 * GIGABIT, "1gbit": GIGABIT}
WHOLE, ROUNDED = "whole", "rounded"


def run(options: Options, report: Report) -> None:
    """Every case asked for.

    Raises:
        SystemExit: hosts cannot be made here; says why.
    """
    try:
        with joined(options) as (options, hosts):
            assert hosts is not None
            for workload in options.workloads:
                _run_case(options, report, workload, hosts)
    except HostsError as error:
        raise SystemExit(f"embedding_step: {error}") from error


def _run_case(options: Options, report: Report, workload: Workload, hosts: Hosts) -> None:
    wires = {WHOLE: "", ROUNDED: options.extra["wire"]}
    with ExitStack() as stack:
        everyone = [
            stack.enter_context(
                Contestant(
                    name,
                    MODULE,
                    workload,
                    ranks=options.ranks,
                    hosts=hosts,
                    transport="collective",
                    plan=None,
                    wire_dtype=wire,
                )
            )
            for name, wire in wires.items()
        ]
        ready, absent = connect_all(everyone, options.deadline_s + 120.0)
        if absent:
            raise ContestantError("; ".join(absent.values()))
        seconds: dict[tuple[str, str], list[float]] = {(speed, name): [] for speed in SPEEDS for name in wires}
        for _ in range(options.repeats):
            for speed, bits_per_s in SPEEDS.items():
                hosts.limit(bits_per_s)
                for each in ready:
                    seconds[speed, each.name] += slowest(each.ask("round"), "step")
        moved = {each.name: each.ask("count")[0] for each in ready}
    for speed in SPEEDS:
        lines = {name: summarize(seconds[speed, name]) for name in wires}
        for name, line in lines.items():
            _report_line(report, options, workload, speed, name, {**line, **moved[name]})
        ratio = lines[WHOLE]["step_ms"] / lines[ROUNDED]["step_ms"]
        report.ratio(f"{workload.name}_{options.extra['hosts']}_{speed}", round(ratio, 2))


def _report_line(
    report: Report, options: Options, workload: Workload, speed: str, name: str, values: dict[str, Any]
) -> None:
    report.line(
        case=workload.name,
        hosts=options.extra["hosts"],
        cable=speed,
        contestant=name,
        wire_dtype=options.extra["wire"] if name == ROUNDED else "float32",
        dim=workload.dim,
        global_batch=workload.global_batch,
        **workload.bags_record,
        max_rows=workload.max_rows,
        **values,
    )

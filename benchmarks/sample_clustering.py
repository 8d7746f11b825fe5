"""Rows that a batch moves when it is cut into micro-batches: naive, clustered, delta and unsplit.

    python -m benchmarks.sample_clustering

On one thread, without ranks: rows are counted (`benchmarks.sample_clustering_window`), and orders of samples are timed.
*Naive* and *clustered* fetch the distinct rows of each micro-batch, of samples as they come and of clusters; *unsplit*
fetches those of the batch once, and so does *delta*. What clustering closes is its share of the gap between naive and
unsplit.
Of delta the first fetch and the last push count, which computation cannot hide.

`--global-batch` is the samples of one rank, of which real data has about 8,000. Times are given for 8,192.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import Options, Report, parse
from benchmarks.measure import summarize
from benchmarks.sample_clustering_data import FILES, SOURCES, read
from benchmarks.sample_clustering_peers import minhash, sort_by_column
from benchmarks.sample_clustering_window import WindowRows, count_window
from benchmarks.workload import Workload
from rowmesh.ops.cluster import cluster
from rowmesh.pipeline.cutter import BatchRows
from rowmesh.pipeline.sizes import WindowWork, choose_sizes, rows_exponent
from rowmesh.sparse import micro_batches

TIMED_SAMPLES = 8192
TARGET_CLOSED, TARGET_MS, TARGET_COUNT = 0.55, 1.5, 8  # the last is the number of micro-batches that they are for
COMMUNICATION_SHARE, LATENCY_SHARE = 0.4, 0.002  # of a sequential step: of all exchange, and of each; to choose sizes

Method = Callable[[BatchRows, Sequence[int]], Tensor]

METHODS: dict[str, Method] = {
    "rowmesh cluster": lambda rows, sizes: cluster(rows.keys, rows.bags, rows.counts, sizes),
    "sort by column": sort_by_column,
    "MinHash": minhash,
}


def even(batch_size: int, count: int) -> list[int]:
    """Sizes that differ by one at most.

    >>> even(8, 3)
    [2, 3, 3]
    """
    return [batch_size * (m + 1) // count - batch_size * m // count for m in range(count)]


def timed(function: Callable[[], Any], batch_size: int, calls: tuple[int, int]) -> dict[str, Any]:
    """Milliseconds for TIMED_SAMPLES; `calls` that are not timed, and that are."""
    seconds = []
    for _ in range(sum(calls)):
        began = time.perf_counter()
        function()
        seconds.append((time.perf_counter() - began) * TIMED_SAMPLES / max(batch_size, 1))
    return summarize(seconds[calls[0] :], "per_8192")


def chosen_sizes(rows: BatchRows, count: int) -> tuple[int, ...]:
    """Uneven sizes for a window whose communication is COMMUNICATION_SHARE of a sequential step."""
    half = even(rows.batch_size, 2)
    exponent = rows_exponent(rows.num_rows, rows.batch_size, count_window(rows, half).own[0], half[0])
    one_way = COMMUNICATION_SHARE / 2
    work = WindowWork(
        compute_ms=1 - 2 * one_way, fetch_ms=one_way, push_ms=one_way, latency_ms=LATENCY_SHARE, rows_exponent=exponent
    )
    return choose_sizes(rows.batch_size, count, work)


def run_case(options: Options, report: Report, source: str, workload: Workload) -> None:
    """One batch, in every number of micro-batches."""
    try:
        batch, numbering = read(source, workload, Path(options.extra["data"]))
    except FileNotFoundError as error:
        report.line(case=source, unavailable=str(error))
        return
    calls = (workload.warmup, options.repeats * workload.steps)
    rows, case = (
        numbering(batch),
        f"{source} {batch.batch_size}" + (f"x{batch.bag_size}" if batch.bag_size != 1 else ""),
    )
    sizes = even(batch.batch_size, TARGET_COUNT)
    order = cluster(rows.keys, rows.bags, rows.counts, sizes)
    for name, function in (
        ("row numbering", lambda: numbering(batch)),
        ("cutting", lambda: micro_batches(batch, sizes, order)),
    ):
        report.line(case=case, contestant=name, **timed(function, batch.batch_size, calls))
    for count in map(int, options.extra["micro_batches"].split(",")):
        _compare_methods(report, f"{case}, N={count}", source, rows, count, calls)
        _compare_ends(report, f"{case}, N={count}", rows, count, calls)


def _compare_methods(
    report: Report, case: str, source: str, rows: BatchRows, count: int, calls: tuple[int, int]
) -> None:
    """Rows of the paper's form with every method, beside delta and unsplit."""
    sizes = even(rows.batch_size, count)
    plain = count_window(rows, sizes)
    naive, has_target = sum(plain.fetched("naive")), source in FILES and count == TARGET_COUNT
    about: dict[str, Any] = {"case": case, "samples": rows.batch_size, "ids": rows.keys.numel(), "micro_batches": count}
    for exchange in ("unsplit", "naive", "delta"):
        moved = sum(plain.fetched(exchange))
        report.line(
            **about,
            contestant=exchange,
            rows=moved,
            times_unsplit=_ratio(moved, rows.num_rows),
            closed=_closed(naive, moved, rows.num_rows),
        )
        if exchange == "delta":
            report.ratio(f"{case}: delta closes", _closed(naive, moved, rows.num_rows))
    for name, method in METHODS.items():
        moved = sum(count_window(rows, sizes, method(rows, sizes)).fetched("naive"))
        timing = timed(lambda method=method: method(rows, sizes), rows.batch_size, calls)
        closed, is_ours = _closed(naive, moved, rows.num_rows), name == "rowmesh cluster"
        targets = {"target_closed": TARGET_CLOSED, "target_ms": TARGET_MS} if is_ours and has_target else {}
        report.line(
            **about,
            contestant=name,
            rows=moved,
            times_unsplit=_ratio(moved, rows.num_rows),
            closed=closed,
            **timing,
            **targets,
        )
        report.ratio(f"{case}: {name} closes", closed)
        if is_ours:
            report.ratio(f"{case}: {name}, ms for {TIMED_SAMPLES}", timing["per_8192_ms"])


def _compare_ends(report: Report, case: str, rows: BatchRows, count: int, calls: tuple[int, int]) -> None:
    """The shares of the first fetch and the last push under delta, and the time to find light ends."""
    for sizes_are, sizes in (("even", even(rows.batch_size, count)), ("chosen", chosen_sizes(rows, count))):
        for order_is, order, timing in (("as it comes", None, {}), ("light ends", *_light(rows, sizes, calls))):
            window = count_window(rows, sizes, order)
            first, last = _ends(window)
            report.line(
                case=case,
                contestant="delta",
                sizes_are=sizes_are,
                order=order_is,
                sizes=list(sizes),
                rows=window.num_rows,
                first_fetch_share=first,
                last_push_share=last,
                **timing,
            )
            report.ratio(f"{case}: delta, {sizes_are} sizes, {order_is}: first fetch", first)


def _light(rows: BatchRows, sizes: Sequence[int], calls: tuple[int, int]) -> tuple[Tensor, dict[str, Any]]:
    """The order with light ends, and how long it takes to find."""

    def find() -> Tensor:
        return cluster(rows.keys, rows.bags, rows.counts, sizes, light_ends=True)

    return find(), timed(find, rows.batch_size, calls)


def _ends(window: WindowRows) -> tuple[float, float]:
    return _ratio(window.fetched("delta")[0], window.num_rows), _ratio(window.pushed("delta")[-1], window.num_rows)


def _ratio(part: int, whole: int) -> float:
    return round(part / max(whole, 1), 4)


def _closed(naive: int, moved: int, unsplit: int) -> float:
    """The share of the gap between naive and unsplit.

    >>> _closed(200, 150, 100)
    0.5
    """
    return _ratio(naive - moved, naive - unsplit)


def main(arguments: list[str] | None = None) -> None:
    """Runs every case asked for."""
    options = parse(
        (__doc__ or "").splitlines()[0],
        arguments,
        {"global_batch": [TIMED_SAMPLES], "ranks": 1},
        micro_batches="2,4,8,16,32",
        sources=",".join(SOURCES),
        data="../shared/data",
    )
    torch.set_num_threads(1)
    report = Report("sample_clustering", options.output)
    for source in options.extra["sources"].split(","):
        for workload in options.workloads:
            run_case(options, report, source, workload)
    report.finish()


if __name__ == "__main__":
    main()

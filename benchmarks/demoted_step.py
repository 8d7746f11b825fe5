"""Steps of a DLRM with a quarter of the ids of its large tables in fast memory, over the same steps with all of them.

    python -m benchmarks.demoted_step --stores rocksdb,redis,file

All tables are dynamic. Of those with `--least-rows` ids or more, a share stays in fast memory, and the records of the
others are in a store, from which they come back when they are asked for, batches ahead of their steps. Ids are drawn
anew at every step, with the frequencies of `--zipf`, so that hits are those of an endless stream. The model is that of
`train_step`. Contestants take turns; `cpu` is the processor time of all threads of the slowest rank.

`store_ms` is what the store takes by itself, nothing beside it, for the records of a step of one rank, in calls as
large: those that come back are read, those that leave are written, and those that came back are removed. For Redis
`get_ms_of_redis_benchmark` is what as many keys of MGET take there.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import Options, Report, parse
from benchmarks.contestant import Contestant, ContestantError, connect_all
from benchmarks.dynamic_table_tiers import mget_us, record_of, server
from benchmarks.measure import median, slowest
from benchmarks.workload import Workload
from rowmesh.tables.dynamic.stores import open_records

MODULE = "benchmarks.ranks.demoted_step"
TARGET = 1.3
_ALL, _MOVED = "all in memory", ("hits", "promoted", "demoted")
_ALONE = 100_000  # records


def run(options: Options, report: Report, workload: Workload, stores: list[str]) -> None:
    """One case."""
    extra: dict[str, Any] = {name: options.extra[name] for name in ("least_rows", "depth")}
    if options.quick:
        extra["least_rows"] = min(extra["least_rows"], workload.max_rows)
    share = options.extra["percent"] / 100
    with contextlib.ExitStack() as stack:
        urls = {}
        for name in stores:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.extra["folder"] or None)))
            urls[name] = _url(stack, name, folder)
            if urls[name] is None:
                report.line(case=workload.name, contestant=name, unavailable="there is no redis-server; install it")
        ready = {_ALL: "", **{name: url for name, url in urls.items() if url is not None}}
        ranks = [
            stack.enter_context(
                Contestant(name, MODULE, workload, ranks=options.ranks, store=url, share=share, **extra)
            )
            for name, url in ready.items()
        ]
        _, absent = connect_all(ranks, options.deadline_s)
        if absent:
            raise ContestantError("; ".join(absent.values()))
        for each in ranks:  # until fast memory has what it has in the long run
            each.ask("round", warmup=0, steps=5 if options.quick else options.extra["settle"])
        rounds: dict[str, list[Any]] = {name: [] for name in ready}
        for _ in range(options.repeats):
            for each in ranks:
                rounds[each.name].append(each.ask("round", warmup=workload.warmup, steps=workload.steps))
        ratios = _report(report, workload, options.ranks, rounds)
        num_tables = sum(rows >= extra["least_rows"] for rows in workload.table_rows)
        for name, url in ready.items():
            if url:
                moved = [round(ratios[name][what] / (options.ranks * num_tables)) for what in _MOVED[1:]]
                _report_alone(report, workload, name, url, num_tables, *moved)


def _url(stack: contextlib.ExitStack, name: str, folder: Path) -> str | None:
    if name != "redis":
        return name if name == "memory" else f"{name}:{folder}"
    return (
        None if shutil.which("redis-server") is None else f"redis://127.0.0.1:{stack.enter_context(server(folder))}/0"
    )


def _report_alone(
    report: Report, workload: Workload, name: str, url: str, num_tables: int, num_in: int, num_out: int
) -> None:
    """What the store takes for a step's records of one rank, each table's in a call."""
    width, times = 4 * workload.dim + 28, []
    with contextlib.ExitStack() as stack:
        store = open_records(url, "alone", width, max_records=_ALONE)
        stack.callback(store.close)
        ids = np.arange(_ALONE)
        shards = ids % 100
        for first in range(0, _ALONE, 1000):
            some = slice(first, first + 1000)
            store.put(shards[some], ids[some], record_of(ids[some], width))
        random = np.random.default_rng(0)
        for _ in range(20):
            elapsed_s = 0.0
            for _ in range(num_tables):
                came, left = (random.choice(_ALONE, count, replace=False) for count in (num_in, num_out))
                records = record_of(left, width)
                began = time.perf_counter()
                store.get(shards[came], came, np.empty((num_in, width), np.uint8))
                store.delete(shards[came], came)
                store.put(shards[left], left, records)
                elapsed_s += time.perf_counter() - began
            times.append(elapsed_s * 1e3)
    bound = {}
    if url.startswith("redis") and shutil.which("redis-benchmark") is not None:
        port = int(url.rsplit(":", 1)[1].split("/")[0])
        bound = {"get_ms_of_redis_benchmark": round(mget_us(port, _ALONE, width) * num_in * num_tables / 1e3, 3)}
    line: dict[str, Any] = {"store_ms": median(times), "tables": num_tables, "in": num_in, "out": num_out, **bound}
    report.line(case=workload.name, contestant=f"{name} alone", **line)


def _report(report: Report, workload: Workload, ranks: int, rounds: dict[str, list[Any]]) -> dict[str, dict[str, int]]:
    """Emits steps and ratios; returns what each has moved in a step, on all ranks."""
    found = {}
    steps = {name: median([slowest(each, "step")[0] * 1e3 for each in of]) for name, of in rounds.items()}
    cpu = {name: median([max(rank["cpu_s"] for rank in each) * 1e3 for each in of]) for name, of in rounds.items()}
    for name, of in rounds.items():
        moved = {what: round(median([sum(rank[what] for rank in each) for each in of])) for what in _MOVED}
        found[name] = moved
        report.line(
            case=workload.name, contestant=name, ranks=ranks, step_ms=steps[name], cpu_ms=cpu[name], a_step=moved
        )
        if name != _ALL:
            for what, times in (("step", steps), ("processor", cpu)):
                ratio = round(times[name] / times[_ALL], 3)
                report.ratio(f"{workload.name}, {ranks} ranks: {name} over all in memory, {what}", ratio)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Runs every case asked for."""
    options = parse(
        (__doc__ or "").splitlines()[0],
        arguments,
        {"max_rows": 200_000, "steps": 60, "warmup": 5},
        stores="rocksdb,redis",
        percent=25,
        least_rows=10_000,
        depth=2,
        settle=120,
        folder="",
    )
    report = Report("demoted_step", options.output)
    for workload in options.workloads:
        run(options, report, workload, options.extra["stores"].split(","))
    report.finish()


if __name__ == "__main__":
    main()

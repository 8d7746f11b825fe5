"""The cached arena of tiered tables: what a pin costs, and what stays in a cache that is smaller than its table.

    python -m benchmarks.tiered

One process without ranks, row-wise AdaGrad. `--dim` are the dimensions, `--global-batch` the rows of a pin, `--rows`
the table's; the file is in `--folder` (default: the system's temporary one), read and written past the page cache, by
`--threads` threads.

- *found*: rows are in the cache. `table` is its hash alone; `pin` and `unpin` are the calls.
- *read*: none is. Pins over host memory and over the file, beside the store's own reads. Nothing is written back.
- *ahead*: batches of `--samples` samples of a Zipf-distributed workload that touch four times as many rows as the
  cache has slots (fewer, where batches in sight would not fit), each pinned `--ahead` batches before its update. Rows
  are evicted once they are written back, as in the papers, or retained until their cache slots are needed. Rows are
  counted; `--step-ms` is the pause after each update, in which a model would compute and rows are written back.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import Options, Report, parse
from benchmarks.measure import summarize
from benchmarks.workload import Workload, make_batches
from rowmesh.errors import ConfigurationError
from rowmesh.ops.cache_table import MISSING, CacheTable
from rowmesh.ops.memory import Buffer
from rowmesh.placement import Piece
from rowmesh.tables import CachedArena, FileStore, MemoryStore, PinnedRows, TableSpec, fuse
from rowmesh.tables.backing import BackingStore, MakeStore

TARGET_NS = 20.0  # to find a row in the table of the cache
TIMES_CACHED = 4  # rows that batches touch, over cache slots


def make_arena(dim: int, num_rows: int, num_cached: int, make_store: MakeStore, retain: bool = True) -> CachedArena:
    """An arena of one table."""
    (group,) = fuse([TableSpec(name="table", num_rows=num_rows, dim=dim)])
    arena = CachedArena(group, num_rows, num_cached, make_store, retain=retain)
    arena.initialize(0, [[Piece(range(num_rows), range(num_rows))]])
    return arena


def warm_up(dim: int) -> None:
    """Compiles what the thread that writes back calls."""
    with make_arena(dim, 2, 2, MemoryStore, retain=False) as arena:
        arena.pin(np.array([0], np.uint32)).unpin(changed=True)
        arena.flush()


def draws(num_rows: int, count: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Distinct slots, again and again."""
    generator = np.random.default_rng(seed)
    while True:
        yield np.unique(generator.integers(0, num_rows, count + count // 8).astype(np.uint32))[:count]


def seconds_of(function: Callable[[], Any]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def run_found(report: Report, workload: Workload, num_rows: int, calls: tuple[int, int]) -> None:
    """Pins of rows that are in the cache already: all of them are."""
    count, seconds = workload.global_batch, {"table": [], "pin": [], "unpin": []}
    with make_arena(workload.dim, num_rows, num_rows, MemoryStore) as arena:
        everything = np.arange(num_rows, dtype=np.uint32)
        arena.pin(everything).unpin()
        table, cache_slots = CacheTable(num_rows), np.full(num_rows, MISSING, np.uint32)
        table.assign(everything, cache_slots)
        generator, found = draws(num_rows, count), np.empty(count, np.uint32)
        for _ in range(sum(calls)):
            slots = np.random.default_rng(1).permutation(next(generator))
            other = arena.pin(slots)
            seconds["table"].append(seconds_of(partial(table.find, slots, found)))
            pins: list[PinnedRows] = []
            seconds["pin"].append(seconds_of(lambda slots=slots, to=pins: to.append(arena.pin(slots))))
            other.unpin(changed=True)
            seconds["unpin"].append(seconds_of(partial(pins[0].unpin, changed=True)))
    for name, times in seconds.items():
        timing = summarize(times[calls[0] :], "call")
        nanoseconds = round(timing["call_ms"] * 1e6 / count, 1)
        target = {"target_ns": TARGET_NS} if name == "table" else {}
        report.line(
            case=f"found, dim {workload.dim}",
            contestant=name,
            rows=count,
            cache_slots=num_rows,
            row_ns=nanoseconds,
            **target,
            **timing,
        )
        report.ratio(f"found, dim {workload.dim}, {count} rows: {name}, ns a row", nanoseconds)


def fill(arena: CachedArena, num_rows: int) -> None:
    """Writes every row once, so that there is a record of it."""
    step = 1 << 16
    for first in range(0, num_rows, step):
        slots = np.arange(first, min(first + step, num_rows))
        arena.write_rows(slots, *arena.read_rows(slots))


def run_read(
    report: Report, workload: Workload, num_rows: int, calls: tuple[int, int], name: str, make_store: MakeStore
) -> None:
    """Pins of rows none of which is in the cache."""
    count = workload.global_batch
    with make_arena(workload.dim, num_rows, count, make_store, retain=False) as arena:
        fill(arena, num_rows)
        generator, seconds = draws(num_rows, count), {"store alone": [], "pin": []}
        records = Buffer(count * arena.store.stride).array(np.uint8, count, arena.store.stride)
        for slots in (next(generator) for _ in range(sum(calls))):
            seconds["store alone"].append(seconds_of(partial(arena.store.read, slots, records)))
            slots = next(generator)
            pins: list[PinnedRows] = []
            seconds["pin"].append(seconds_of(lambda slots=slots, to=pins: to.append(arena.pin(slots))))
            pins[0].unpin()
        for contestant, times in seconds.items():
            timing = summarize(times[calls[0] :], "call")
            microseconds = round(timing["call_ms"] * 1e3 / count, 3)
            case = f"read, dim {workload.dim}, {name}"
            report.line(
                case=case,
                contestant=contestant,
                rows=count,
                table_rows=num_rows,
                record_bytes=arena.store.stride,
                row_us=microseconds,
                **timing,
            )
            report.ratio(f"{case}, {count} rows: {contestant}, µs a row", microseconds)


def distinct_slots(workload: Workload, count: int) -> list[np.ndarray]:
    """The distinct slots of batches that all differ, of all tables together."""
    bases = np.cumsum([0, *workload.table_rows[:-1]])[:, None, None]
    batches = make_batches(workload, 0, 1, count)
    return [np.unique(batch.ids.numpy() + bases).astype(np.uint32) for batch in batches]


def most_in_sight(slots: list[np.ndarray], depth: int) -> int:
    """The most distinct slots that as many batches and one more in a row have."""
    windows = (slots[first : first + depth + 1] for first in range(len(slots)))
    return max(len(np.unique(np.concatenate(window))) for window in windows)


def run_ahead(
    report: Report, workload: Workload, slots: list[np.ndarray], depth: int, retain: bool, step_s: float
) -> None:
    """A loop that pins batches before it unpins earlier ones."""
    num_rows, touched = sum(workload.table_rows), len(np.unique(np.concatenate(slots)))
    num_cached = max(touched // TIMES_CACHED, most_in_sight(slots, depth) * 5 // 4)
    with make_arena(workload.dim, num_rows, num_cached, MemoryStore, retain) as arena:
        live: list[PinnedRows] = []
        for batch in slots:
            live.append(arena.pin(batch))
            if len(live) > depth:
                live.pop(0).unpin(changed=True)
                time.sleep(step_s)
        while live:
            live.pop(0).unpin(changed=True)
        arena.flush()
        counters, policy = arena.counters, "retained" if retain else "evicted"
        asked = sum(map(len, slots))
        share = round(counters.rows_found / asked, 4)
        written = round(counters.rows_written / asked, 4)
        report.line(
            case="ahead",
            contestant=policy,
            ahead=depth,
            rows=asked // len(slots),
            batches=len(slots),
            table_rows=num_rows,
            touched_rows=touched,
            cache_slots=num_cached,
            found_share=share,
            read_share=round(counters.rows_read / asked, 4),
            written_share=written,
            peak_frames=counters.peak_frames,
        )
        report.ratio(f"ahead by {depth}, {policy}: share of rows found", share)


def stores(options: Options, folder: Path) -> Iterator[tuple[str, MakeStore]]:
    """Every backing store, by name."""
    yield "memory", MemoryStore
    for number in map(int, options.extra["threads"].split(",")):

        def make(num_records: int, record_bytes: int, threads: int = number) -> BackingStore:
            path = folder / f"rows_{os.getpid()}"
            return FileStore(num_records, record_bytes, path=path, num_threads=threads, direct=True)

        yield f"file, {number} threads", make


def main(arguments: list[str] | None = None) -> None:
    """Runs every case asked for."""
    options = parse(
        (__doc__ or "").splitlines()[0],
        arguments,
        {"global_batch": [4096, 30000], "dim": [64], "ranks": 1},
        rows=1_000_000,
        threads="1,2,4,8",
        ahead="0,1,4",
        samples=2048,
        batches=64,
        step_ms=30,
        folder="",
    )
    torch.set_num_threads(1)
    report, num_rows = Report("tiered", options.output), options.extra["rows"]
    if options.quick:
        num_rows = min(num_rows, 50_000)
    for workload in options.workloads:
        calls = (workload.warmup, options.repeats * workload.steps)
        run_found(report, workload, num_rows, calls)
        with tempfile.TemporaryDirectory(dir=options.extra["folder"] or None) as folder:
            for name, make_store in stores(options, Path(folder)):
                try:
                    run_read(report, workload, num_rows, calls, name, make_store)
                except ConfigurationError as error:
                    report.line(case=f"read, {name}", unavailable=str(error))
    samples = 256 if options.quick else options.extra["samples"]
    step_s = options.extra["step_ms"] * 1e-3
    zipf = replace(options.workloads[0], global_batch=samples)
    slots = distinct_slots(zipf, 8 if options.quick else options.extra["batches"])
    warm_up(options.workloads[0].dim)
    for depth in map(int, options.extra["ahead"].split(",")):
        for retain in (False, True):
            run_ahead(report, zipf, slots, depth, retain, step_s)
    report.finish()


if __name__ == "__main__":
    main()

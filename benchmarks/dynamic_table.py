"""The index of dynamic tables on one thread: probe, insert, insert and evict when full, growth, bytes an id.

    python -m benchmarks.dynamic_table

Times are processor time of the one thread, so that other work on the machine adds less: the median of the steps, and
the smallest (`_min`). `growth_p99` is that of steps in which no shard is full yet.

Peers: `pandas.Index.get_indexer`, `cykhash`, TorchRec's managed collision module and a dynamic variable of TensorFlow
Recommenders Addons, where the Python of `--peer-python` (or, without it, this one) has them. The first two only find
and insert: no counts, no scores, no eviction. The module counts; it and the variable, whose time is that of all
threads, evict every ten steps. An `open` of ours does all of these each step, with admission at the first sighting.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks import dynamic_table_stream, dynamic_table_tiers
from benchmarks.command import Report
from benchmarks.measure import median
from benchmarks.peers.dynamic_table import draw
from rowmesh.ops.dynamic_index import cpu
from rowmesh.ops.dynamic_index.scored import ScoredIndex
from rowmesh.tables.dynamic.shards import DynamicShards
from rowmesh.tables.dynamic.spec import Dynamic

TARGETS = {"probe_ns": 40.0, "insert_evict_ns": 150.0, "index_and_score_bytes": 24.0, "growth_p99": 1.2}
_SCORE_BYTES = 8


def ns_an_id(began: float, count: int) -> float:
    return (time.thread_time() - began) * 1e9 / count


def open_batch(shards: DynamicShards, ids: np.ndarray, step: int) -> float:
    """Opens a step; returns nanoseconds an id, without sorting the ids and without release."""
    ids = np.sort(ids)
    counts = np.ones(len(ids), np.int64)
    began = time.thread_time()
    opened = shards.open(ids, counts, step)
    elapsed = ns_an_id(began, len(ids))
    shards.release(opened.evicted_frames)
    return elapsed


def index_bytes(index: ScoredIndex) -> dict[str, float]:
    """Bytes an id, where the shards are as full as now."""
    used = int(index.headers[:, cpu.USED].sum())
    lookup = index.num_bytes / used + 8  # an id stands in its record
    heap = index.selection.num_bytes / used
    record = 8.0 * index.records.shape[1]
    return {
        "index_and_score_bytes": round(lookup + heap + _SCORE_BYTES, 2),
        "all_bytes_with_statistics": round(lookup - 8 + heap + record, 2),
    }


def measure(num_ids: int, batch: int, eviction: str, turnovers: float) -> dict[str, float]:
    """Fills a table, probes it, and changes ids while it is full."""
    rules = Dynamic(capacity=num_ids, eviction=eviction)  # type: ignore[arg-type]
    shards = DynamicShards("benchmark", rules, range(rules.num_shards), num_ids + 2 * batch)
    open_batch(DynamicShards("benchmark", Dynamic(capacity=64), range(1), 128), draw(64, 9), 0)  # compiles
    new = draw(2 * num_ids, 1)
    insert, step = [], 0
    for start in range(0, num_ids, batch):
        insert.append(open_batch(shards, new[start : start + batch], step))
        step += 1
    room = np.flatnonzero(shards.find(new[:num_ids]) >= 0)
    known = np.random.default_rng(0).permutation(new[:num_ids][room])
    find = []
    for start in range(0, len(known) - batch, batch):
        ids = known[start : start + batch]
        began = time.thread_time()
        shards.find(ids)
        find.append(ns_an_id(began, batch))
    fill = draw(num_ids // 4, 2)  # shards are full to the last place after this
    for start in range(0, len(fill), batch):
        open_batch(shards, fill[start : start + batch], step)
        step += 1
    evict = []
    for start in range(num_ids, num_ids + int(num_ids * turnovers), batch):
        evict.append(open_batch(shards, new[start : start + batch], step))
        step += 1
    last = 9 * len(insert) // 10  # before the first shard is full
    per_step = np.array(insert[len(insert) // 10 : last])  # past the first groups of each shard
    return {
        "probe_ns": median(find, 1),
        "probe_min_ns": round(min(find), 1),
        "insert_ns": median(insert, 1),
        "insert_evict_ns": median(evict, 1),
        "insert_evict_min_ns": round(min(evict), 1),
        "insert_evict_mean_ns": round(float(np.mean(evict)), 1),
        "growth_p99": round(float(np.percentile(per_step, 99) / np.median(per_step)), 2),
        "growth_p99_until_full": round(float(np.percentile(insert[len(insert) // 10 :], 99) / np.median(per_step)), 2),
        **index_bytes(shards.host_index),
    }


def measure_peers(python: str, num_ids: int, batch: int) -> dict[str, dict[str, float]]:
    """Runs the peers that a Python has, in a process of their own; the others are left out."""
    command = [python, "-m", "benchmarks.peers.dynamic_table", str(num_ids), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return {line.pop("contestant"): line for line in map(json.loads, done.stdout.splitlines())}


def main(arguments: list[str] | None = None) -> None:
    """Runs ours by policy, and the peers that are installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ids", type=int, default=10_000_000, help="capacity of the table")
    parser.add_argument("--batch", type=int, default=50_000, help="distinct ids a step")
    parser.add_argument("--eviction", default="lru,lfu", help="policies, separated by commas")
    parser.add_argument(
        "--turnovers", type=float, default=0.5, help="share of the ids replaced while the table is full"
    )
    parser.add_argument("--peer-python", help="Pythons of environments with peers, separated by commas")
    parser.add_argument(
        "--tier", help=f"measure stores of records instead: {', '.join(dynamic_table_tiers.TIERS)}, with commas between"
    )
    parser.add_argument("--stream", action="store_true", help="measure training from raw files instead, in samples/s")
    parser.add_argument("--rows", type=int, default=200_000, help="of the files, with --stream")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, with --stream")
    parser.add_argument("--record-bytes", type=int, default=160, help="of a record, with --tier")
    parser.add_argument("--steps", type=int, default=50, help="measured steps, with --tier")
    parser.add_argument(
        "--quick", action="store_true", help="100,000 ids; 20,000 and 10 steps with --tier; 10,000 rows with --stream"
    )
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    options = parser.parse_args(arguments)
    num_ids, batch = (100_000, 5_000) if options.quick else (options.ids, options.batch)
    report = Report("dynamic_table", options.output)
    if options.stream:
        rows, batch, repeats = (10_000, 1000, 1) if options.quick else (options.rows, 4096, options.repeats)
        dynamic_table_stream.run(report, rows, batch, repeats)
        report.finish()
        return
    if options.tier:
        tiers, steps = options.tier.split(","), 10 if options.quick else options.steps
        size = (20_000, 2_000) if options.quick else (num_ids, batch)
        dynamic_table_tiers.run(report, tiers, *size, options.record_bytes, steps)
        report.finish()
        return
    found = {}
    for python in options.peer_python.split(",") if options.peer_python else [sys.executable]:
        found |= measure_peers(python, num_ids, batch)
    for name, numbers in found.items():
        report.line(case=f"{num_ids} ids", contestant=name, **numbers)
    for eviction in options.eviction.split(","):
        numbers = measure(num_ids, batch, eviction, options.turnovers)
        case = f"{num_ids} ids {eviction}"
        report.line(case=case, contestant="rowmesh DynamicShards", batch=batch, **numbers, target=TARGETS)
        for name, theirs in found.items():
            report.ratio(f"{case} probe, {name} over ours", round(theirs["probe_ns"] / numbers["probe_ns"], 2))
    report.finish()


if __name__ == "__main__":
    main()

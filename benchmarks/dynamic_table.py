"""The index of dynamic tables on one thread: probe, insert, insert and evict when full, growth, bytes an id.

    python -m benchmarks.dynamic_table

Peers: `pandas.Index.get_indexer`, and `cykhash` where it is installed. They only find and insert: no counts, no
scores, no eviction. An `open` of ours does all of these, with admission at the first sighting.
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.command import Report
from benchmarks.measure import median
from rowmesh.dynamic import DynamicShards
from rowmesh.ops.dynamic_index import Index, cpu
from rowmesh.tables.dynamic import Dynamic

TARGETS = {"probe_ns": 40.0, "insert_evict_ns": 150.0, "index_and_score_bytes": 24.0, "growth_p99": 1.2}
_SCORE_BYTES = 8


def draw(count: int, seed: int) -> np.ndarray:
    """Distinct ids of 64 bits, in no order: an odd multiplier is a bijection."""
    first = np.uint64(seed << 40)
    return ((np.arange(count, dtype=np.uint64) + first) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def ns_an_id(began: float, count: int) -> float:
    return (time.perf_counter() - began) * 1e9 / count


def open_batch(shards: DynamicShards, ids: np.ndarray, step: int) -> float:
    """Opens a step; returns nanoseconds an id, without sorting the ids and without release."""
    ids = np.sort(ids)
    counts = np.ones(len(ids), np.int64)
    began = time.perf_counter()
    opened = shards.open(ids, counts, step)
    elapsed = ns_an_id(began, len(ids))
    shards.release(opened.evicted_frames)
    return elapsed


def index_bytes(index: Index, heap_bytes: int) -> dict[str, float]:
    """Bytes an id, where the shards are as full as now."""
    used = int(index.headers[:, cpu.USED].sum())
    lookup = index.num_bytes / used + 8  # an id stands in its record
    heap = heap_bytes / used
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
        began = time.perf_counter()
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
    per_step = np.array(insert[len(insert) // 10 :])  # past the first groups of each shard
    return {
        "probe_ns": median(find, 1),
        "insert_ns": median(insert, 1),
        "insert_evict_ns": median(evict, 1),
        "insert_evict_mean_ns": round(float(np.mean(evict)), 1),
        "growth_p99": round(float(np.percentile(per_step, 99) / np.median(per_step)), 2),
        **index_bytes(shards._index, shards._selection.num_bytes),
    }


def measure_pandas(num_ids: int, batch: int) -> dict[str, float]:
    """`Index.get_indexer` of ids in another order; its table is built at the first call."""
    import pandas as pd  # type: ignore[import-not-found]

    ids = draw(num_ids, 1)
    began = time.perf_counter()
    index = pd.Index(ids)
    index.get_indexer(ids[:1])
    insert = ns_an_id(began, num_ids)
    known = np.random.default_rng(0).permutation(ids)
    find = []
    for start in range(0, num_ids - batch, batch):
        began = time.perf_counter()
        index.get_indexer(known[start : start + batch])
        find.append(ns_an_id(began, batch))
    return {"probe_ns": median(find, 1), "insert_ns": round(insert, 1)}


def measure_cykhash(num_ids: int, batch: int) -> dict[str, float]:
    """`Int64Set`: whether ids are in it; it knows no slots."""
    import cykhash  # type: ignore[import-not-found]

    ids = draw(num_ids, 1)
    began = time.perf_counter()
    known_ids = cykhash.Int64Set_from_buffer(ids)
    insert = ns_an_id(began, num_ids)
    known, found = np.random.default_rng(0).permutation(ids), np.empty(batch, np.uint8)
    find = []
    for start in range(0, num_ids - batch, batch):
        part = known[start : start + batch]
        began = time.perf_counter()
        cykhash.isin_int64(part, known_ids, found)
        find.append(ns_an_id(began, batch))
    return {"probe_ns": median(find, 1), "insert_ns": round(insert, 1)}


def main(arguments: list[str] | None = None) -> None:
    """Runs ours by policy, and the peers that are installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ids", type=int, default=10_000_000, help="capacity of the table")
    parser.add_argument("--batch", type=int, default=50_000, help="distinct ids a step")
    parser.add_argument("--eviction", default="lru,lfu", help="policies, separated by commas")
    parser.add_argument(
        "--turnovers", type=float, default=0.5, help="share of the ids replaced while the table is full"
    )
    parser.add_argument("--quick", action="store_true", help="100,000 ids")
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    options = parser.parse_args(arguments)
    num_ids, batch = (100_000, 5_000) if options.quick else (options.ids, options.batch)
    report = Report("dynamic_table", options.output)
    peers = {"pandas": measure_pandas, "cykhash": measure_cykhash}
    found = {name: run(num_ids, batch) for name, run in peers.items() if find_spec(name) is not None}
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

"""Stores of records below a dynamic table with a quarter of its rows in fast memory: what a step moves, and how long.

    python -m benchmarks.dynamic_table --tier memory,file,rocksdb,redis

Index and store alone, one thread, nothing at the same time: no model, no exchange, no look-ahead. A record that comes
back is compared with what left, so a store that mixes records up fails here.
"""

from __future__ import annotations

import contextlib
import csv
import io
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.command import Report
from rowmesh.tables.dynamic.hashing import shard_of
from rowmesh.tables.dynamic.shards import DynamicShards
from rowmesh.tables.dynamic.spec import Dynamic
from rowmesh.tables.dynamic.stores import RecordStore, open_records

TIERS = ("memory", "file", "rocksdb", "redis")
_TABLE, _SKEW, _CHUNK = "benchmark", 3.0, 50_000
_MGET_KEYS, _MOST_KEYS = 100, 100_000


def run(report: Report, tiers: list[str], num_ids: int, batch: int, record_bytes: int, steps: int) -> None:
    """Measures each tier, and Redis beside `redis-benchmark`."""
    if strange := set(tiers) - set(TIERS):
        raise SystemExit(f"--tier takes {', '.join(TIERS)}, separated by commas, got {', '.join(sorted(strange))}")
    for tier in tiers:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            port = 0
            if tier == "redis":
                if shutil.which("redis-server") is None:
                    report.line(case="redis", skipped="there is no redis-server; install it")
                    continue
                port = stack.enter_context(server(folder))
            url = {"memory": "memory", "redis": f"redis://127.0.0.1:{port}/0"}.get(tier, f"{tier}:{folder}")
            store = open_records(url, _TABLE, record_bytes, max_records=num_ids + 4 * batch)
            stack.callback(store.close)
            numbers = measure(store, num_ids, batch, record_bytes, steps)
            report.line(case=tier, ids=num_ids, batch=batch, record_bytes=record_bytes, **numbers)
            if tier == "redis" and shutil.which("redis-benchmark") is not None:
                bound = mget_us(port, num_ids, record_bytes)
                report.line(case=tier, contestant="redis-benchmark MGET", keys_a_command=_MGET_KEYS, get_us=bound)
                report.ratio("redis: a get of ours over MGET of redis-benchmark", round(numbers["get_us"] / bound, 2))
            report.ratio(f"{tier}: step with the store over the index alone", numbers["over_index_alone"])


def measure(store: RecordStore, num_ids: int, batch: int, record_bytes: int, steps: int) -> dict[str, float]:
    """Fills a store with all records, and moves what steps ask for and push out."""
    rules = Dynamic(capacity=num_ids // 4, eviction="lru")
    num_frames = rules.capacity + 2 * batch
    shards = DynamicShards(_TABLE, rules, range(rules.num_shards), num_frames)
    rows = np.zeros((num_frames, record_bytes), np.uint8)
    everything = np.arange(num_ids, dtype=np.int64)
    for first in range(0, num_ids, _CHUNK):
        ids = everything[first : first + _CHUNK]
        store.put(shard_of(_TABLE, ids, rules.num_shards), ids, record_of(ids, record_bytes))
    random, warm = np.random.default_rng(0), 2 + 2 * rules.capacity // batch
    open_s, get_s, put_s, delete_s, num_in, num_out = 0.0, 0.0, 0.0, 0.0, 0, 0
    for step in range(warm + steps):
        ids = np.unique((num_ids * random.random(batch) ** _SKEW).astype(np.int64))
        times = [time.perf_counter()]
        opened = shards.open(ids, np.ones(len(ids), np.int64), step)
        times.append(time.perf_counter())
        fresh, frames = ids[opened.fresh], opened.frames[opened.fresh]
        places, records = shard_of(_TABLE, fresh, rules.num_shards), np.empty((len(fresh), record_bytes), np.uint8)
        found = store.get(places, fresh, records)
        times.append(time.perf_counter())
        if not found.all() or (records != record_of(fresh, record_bytes)).any():
            raise AssertionError("the store has not what left for it")
        out = opened.evicted_ids
        times.append(time.perf_counter())
        store.put(shard_of(_TABLE, out, rules.num_shards), out, rows[opened.evicted_frames])
        times.append(time.perf_counter())
        store.delete(places, fresh)
        times.append(time.perf_counter())
        rows[frames] = records
        shards.release(opened.evicted_frames)
        if step >= warm:
            spent = np.diff(times)
            open_s, get_s, put_s, delete_s = open_s + spent[0], get_s + spent[1], put_s + spent[3], delete_s + spent[4]
            num_in, num_out = num_in + len(fresh), num_out + len(out)
    moving_s = get_s + put_s + delete_s
    return {
        "records_in_a_step": round(num_in / steps, 1),
        "records_out_a_step": round(num_out / steps, 1),
        "index_ms": round(1e3 * open_s / steps, 3),
        "store_ms": round(1e3 * moving_s / steps, 3),
        "get_us": round(1e6 * get_s / max(num_in, 1), 3),
        "put_us": round(1e6 * put_s / max(num_out, 1), 3),
        "delete_us": round(1e6 * delete_s / max(num_in, 1), 3),
        "over_index_alone": round((open_s + moving_s) / open_s, 2),
    }


def record_of(ids: np.ndarray, record_bytes: int) -> np.ndarray:
    """Bytes that tell records apart."""
    words = (ids.astype(np.uint64)[:, None] + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    columns = np.arange(-(-record_bytes // 8), dtype=np.uint64)
    return (words ^ columns).view(np.uint8)[:, :record_bytes]


@contextlib.contextmanager
def server(folder: Path) -> Iterator[int]:
    """A server on a free port of the loopback interface, which keeps nothing on the disk."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "no"]
    with subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield port  # a client that comes too early tries again
        finally:
            process.kill()


def mget_us(port: int, num_keys: int, record_bytes: int) -> float:
    """Microseconds a key of MGET, one connection, one command after the other."""
    num_keys = min(num_keys, _MOST_KEYS)
    own = ["redis-benchmark", "-p", str(port), "-c", "1", "-r", str(num_keys), "--csv"]
    fill = [*own, "-n", str(5 * num_keys), "-P", "64", "-d", str(record_bytes), "-t", "set"]
    subprocess.run(fill, check=True, capture_output=True)
    command = [*own, "-n", "3000", "MGET", *["key:__rand_int__"] * _MGET_KEYS]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    [*_, last] = csv.DictReader(io.StringIO(done.stdout))
    return round(1e6 / (float(last["rps"]) * _MGET_KEYS), 3)

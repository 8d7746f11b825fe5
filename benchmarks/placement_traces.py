"""Real accesses: planned on the first half, judged on the second, which drifts and comes in bursts."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import Report
from benchmarks.fit_shapes import avazu_columns, kaggle_columns
from benchmarks.placement_plans import MIB, WORLD_SIZE, find, value_links
from rowmesh.placement.cost import cost_of, degree_of_balance
from rowmesh.placement.plan import Plan, TableShape
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.sketch import AccessSketch
from rowmesh.placement.strategies import QUICK
from rowmesh.placement.topology import Topology

BATCH_SIZE = 128  # samples a rank; the samples of Criteo and Avazu have about 4,000 in each half
META_ROWS, META_BATCH_SIZE = 500_000, 1024
ROW_BYTES = 64


def traces(report: Report, folder: Path) -> None:
    """Criteo and Avazu samples, and Meta's trace of one table."""
    kaggle = {f"C{i + 1}": column for i, column in enumerate(kaggle_columns(folder))}
    _judge_halves(report, "criteo_kaggle", _numbered(kaggle), BATCH_SIZE)
    _judge_halves(report, "avazu", _numbered(avazu_columns(folder)), BATCH_SIZE)
    with gzip.open(folder / "meta_traces" / "meta_reuse_medium_table500K.txt.gz", "rt") as file:
        accesses = np.array(file.read().split(), np.int64)
    _judge_halves(report, "meta", {"table": (accesses, META_ROWS)}, META_BATCH_SIZE)


def _numbered(columns: Mapping[str, Sequence[str]]) -> dict[str, tuple[NDArray[np.int64], int]]:
    """Each column as numbers, and how many distinct values it has."""
    numbered = {}
    for name, values in columns.items():
        distinct, ids = np.unique(np.array(values), return_inverse=True)
        numbered[name] = (ids.astype(np.int64), len(distinct))
    return numbered


def _judge_halves(
    report: Report, name: str, columns: Mapping[str, tuple[NDArray[np.int64], int]], batch_size: int
) -> None:
    shapes = [TableShape(table, rows, ROW_BYTES, ROW_BYTES, 4) for table, (_, rows) in columns.items()]
    ids = {table: _rows_of_first_half(values, rows) for table, (values, rows) in columns.items()}
    first, second = (_profile(shapes, ids, half, batch_size) for half in (0, 1))
    best = _profile(shapes, {t: _rows_of_second_half(v, columns[t][1]) for t, v in ids.items()}, 1, batch_size)
    topology = Topology.uniform(WORLD_SIZE)
    for exchange, deduplicated in (("raw", False), ("deduplicated", True)):
        request = Request(batch_size=batch_size, mode="infer", extra_memory=0.05, deduplicated=deduplicated)
        oracle = find("cyclic", best, topology, request).plan
        assert oracle is not None
        for strategy in QUICK:
            line: dict[str, Any] = {"trace": name, "exchange": exchange, "strategy": strategy}
            found = find(strategy, first, topology, request)
            if found.plan is None:
                report.line(**line, unavailable=found.why_not)
                continue
            values = value_links(cost_of(found.plan, second, request))
            planned = value_links(cost_of(found.plan, first, request))
            known = value_links(cost_of(oracle, best, request))
            ratio = round(float(values.mean() / known.mean()), 4)
            report.line(
                **line,
                mean_kib=round(float(values.mean()) * MIB / 1024, 4),
                planned_kib=round(float(planned.mean()) * MIB / 1024, 4),
                over_oracle=ratio,
                balance=round(degree_of_balance(values), 4),
                covered=_covered(found.plan, second),
                oracle_covered=_covered(oracle, best),
            )
            if strategy in ("cyclic", "partitioned"):
                report.ratio(f"trace {name} {exchange}: {strategy} over the oracle on the second half", ratio)


def _rows_of_first_half(ids: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """Ids as rows in order of their frequency in the first half, as preparation does; ties in no order."""
    return _ordered(ids, ids[: len(ids) // 2], num_rows)


def _rows_of_second_half(rows: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    return _ordered(rows, rows[len(rows) // 2 :], num_rows)


def _ordered(ids: NDArray[np.int64], counted: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    counts = np.bincount(counted, minlength=num_rows)
    order = np.lexsort((np.random.default_rng(0).random(num_rows), -counts))
    rows = np.empty(num_rows, np.int64)
    rows[order] = np.arange(num_rows)
    return rows[ids]


def _profile(shapes: Sequence[TableShape], ids: Mapping[str, NDArray[np.int64]], half: int, batch_size: int) -> Profile:
    """Accesses and batches of one half."""
    sketch = AccessSketch(shapes, capacity=META_ROWS)
    middle = len(next(iter(ids.values()))) // 2
    stop = middle if half == 0 else 2 * middle
    for start in range(half * middle, stop, batch_size):
        end = min(start + batch_size, stop)
        sketch.add({name: values[start:end] for name, values in ids.items()}, end - start)
    return sketch.profile()


def _covered(plan: Plan, profile: Profile) -> float:
    """The share of accesses to rows that are on every rank."""
    hot = total = 0.0
    for planned, counted in zip(plan.tables, profile.tables, strict=True):
        reads = np.concatenate([[0.0], np.cumsum(counted.lengths * counted.accesses)])
        total += reads[-1]
        for part in planned.ranges:
            if part.rule == "replicated":
                ends = np.interp([part.start, part.stop], counted.starts, reads)
                hot += ends[1] - ends[0]
    return round(hot / total, 4)

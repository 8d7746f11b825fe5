"""Segment unique on one thread: duplicates removed within each of 26 segments, against torch.unique.

    python -m benchmarks.segment_unique

`--global-batch` is the number of ids of each segment. Peers: `torch.unique` on every segment, and one `torch.unique`
over ids to which their segment's offset was added; both return the inverse. Ours counts occurrences as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.command import Options, Report, parse
from benchmarks.measure import summarize
from benchmarks.workload import NUM_TABLES, Workload, make_batches
from rowmesh.ops.segment_unique import segment_unique
from rowmesh.ops.segment_unique.cpu import SegmentHash

TARGETS = {"per_segment": 5.0, "combined": 2.0}


class Reused:
    """The hash as an exchange uses it: sizes of the tables are known, buffers stay from call to call."""

    def __init__(self, workload: Workload, offsets: Tensor) -> None:
        num_ids = int(offsets[-1])
        self._hash = SegmentHash(workload.table_rows)
        self._offsets, self._segments = offsets, np.arange(NUM_TABLES)
        self.unique = torch.empty(num_ids, dtype=torch.int64)
        self._counts = torch.empty(num_ids, dtype=torch.int32)
        self.inverse = torch.empty(num_ids, dtype=torch.int32)
        self._unique_offsets = torch.empty(NUM_TABLES + 1, dtype=torch.int64)

    def __call__(self, ids: Tensor) -> int:
        """Fills `unique` and `inverse`; returns how many ids are distinct."""
        self._hash(
            ids.data_ptr(),
            self._offsets.data_ptr(),
            8,
            self._segments.ctypes.data,
            NUM_TABLES,
            self.unique.data_ptr(),
            self._counts.data_ptr(),
            self.inverse.data_ptr(),
            self._unique_offsets.data_ptr(),
        )
        return int(self._unique_offsets[-1])


def variants(workload: Workload) -> dict[str, Callable[[Tensor], int]]:
    """For each name, a function of ids `[tables · n]` that returns how many are distinct within their table."""
    count = workload.global_batch * workload.pooling
    offsets = torch.arange(NUM_TABLES + 1) * count
    bases = torch.tensor([0, *workload.table_rows[:-1]]).cumsum(0).repeat_interleave(count)

    def per_segment(ids: Tensor) -> int:
        return sum(torch.unique(part, return_inverse=True)[0].numel() for part in ids.split(count))

    return {
        "rowmesh SegmentHash": Reused(workload, offsets),
        "rowmesh segment_unique": lambda ids: segment_unique(ids, offsets)[0].numel(),
        "per_segment": per_segment,
        "combined": lambda ids: torch.unique(ids + bases, return_inverse=True)[0].numel(),
    }


def measure(options: Options, workload: Workload) -> tuple[dict[str, list[float]], int]:
    """Seconds of every call, variants in turns; and how many of the last batch's ids are distinct.

    Raises:
        AssertionError: variants disagree on how many ids are distinct.
    """
    batches = [batch.ids.flatten() for batch in make_batches(workload, 0, 1, workload.num_batches)]
    functions = variants(workload)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    found: dict[str, int] = {}
    for number in range(workload.warmup + options.repeats * workload.steps):
        ids = batches[number % len(batches)]
        for name, function in functions.items():
            began = time.perf_counter()
            found[name] = function(ids)
            seconds[name].append(time.perf_counter() - began)
        assert len(set(found.values())) == 1, f"variants disagree on the number of distinct ids: {found}"
    return {name: times[workload.warmup :] for name, times in seconds.items()}, found["combined"]


def run_case(options: Options, report: Report, workload: Workload) -> None:
    """One number of ids a segment."""
    seconds, unique = measure(options, workload)
    timings: dict[str, dict[str, Any]] = {name: summarize(times, "call") for name, times in seconds.items()}
    count = workload.global_batch * workload.pooling
    case = f"{NUM_TABLES}x{count}"
    ratios = {}
    for peer in TARGETS:
        report.line(case=case, contestant=f"torch.unique {peer}", **timings[peer])
    for ours in ("rowmesh SegmentHash", "rowmesh segment_unique"):
        ratios = {peer: round(timings[peer]["call_ms"] / timings[ours]["call_ms"], 2) for peer in TARGETS}
        report.line(
            case=case,
            contestant=ours,
            ids=NUM_TABLES * count,
            unique_ids=unique,
            **timings[ours],
            peer_ms={peer: timings[peer]["call_ms"] for peer in TARGETS},
            ratio=ratios,
            target=TARGETS,
        )
        for peer, ratio in ratios.items():
            report.ratio(f"{case} {ours.split()[1]} over torch.unique {peer}", ratio)


def main(arguments: list[str] | None = None) -> None:
    """Runs every case asked for."""
    options = parse((__doc__ or "").splitlines()[0], arguments, {"global_batch": [16384, 4096]})
    torch.set_num_threads(1)
    report = Report("segment_unique", options.output)
    for case in dict.fromkeys(replace(workload, dim=1) for workload in options.workloads):  # no rows, so no dims
        run_case(options, report, case)
    report.finish()


if __name__ == "__main__":
    main()

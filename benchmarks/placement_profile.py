"""Profiles from a stream: what a sketch costs, how exact it is, and what a plan made from it loses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import Report
from benchmarks.placement_plans import BATCH_SIZE, WORLD_SIZE, find, judge, value_links
from benchmarks.shapes import Shape, draw
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.sketch import AccessSketch
from rowmesh.placement.topology import Topology

CAPACITIES = (4_096, 16_384, 65_536)


def profiles(report: Report, shapes: Sequence[str], quick: bool) -> None:
    """Sketches of some sizes beside exact counts of the same stream, and the plans made from both."""
    for name in shapes:
        shape = draw(name)
        num_batches = 8 if quick else 64
        began = time.perf_counter()
        exact = _count_exactly(shape, num_batches)
        request = Request(batch_size=BATCH_SIZE, mode="infer", extra_memory=0.01)
        known = _planned_mib(exact, shape, request)
        report.line(
            profile="exact",
            shape=name,
            batches=num_batches,
            link_mib=round(known, 6),
            seconds=round(time.perf_counter() - began, 2),
        )
        for capacity in CAPACITIES[::2] if quick else CAPACITIES:
            _sketch(report, shape, num_batches, capacity, known, request)


def _sketch(report: Report, shape: Shape, num_batches: int, capacity: int, known: float, request: Request) -> None:
    sketch = AccessSketch(shape.counted.shapes, capacity=capacity)
    seconds = []
    for batch in _stream(shape, num_batches):
        began = time.perf_counter()
        sketch.add(batch, BATCH_SIZE)
        seconds.append(time.perf_counter() - began)
    moved = _planned_mib(sketch.profile(), shape, request)
    names = [table.name for table in shape.counted.shapes]
    heavy = [sketch.heavy(name) for name in names]
    num_ids = BATCH_SIZE * len(names)
    report.line(
        profile="sketch",
        shape=shape.name,
        capacity=capacity,
        batches=num_batches,
        ns_per_id=round(float(np.mean(seconds[1:])) / num_ids * 1e9, 2),
        memory_mib=round(sketch.memory_bytes / 2**20, 2),
        floor=max(sketch.floor(name) for name in names),
        bound=num_batches * BATCH_SIZE // (capacity + 1),
        heavy_rows=sum(len(rows.rows) for rows in heavy),
        exact_rows=sum(int((rows.error == 0).sum()) for rows in heavy),
        link_mib=round(moved, 6),
        over_exact=round(moved / known, 5),
    )
    report.ratio(
        f"profile {shape.name} sketch of {capacity}: plan's links over those from exact counts", round(moved / known, 5)
    )


def _planned_mib(profile: Profile, shape: Shape, request: Request) -> float:
    """The mean link of the plan that is made from a profile."""
    plan = find("cyclic", profile, Topology.uniform(WORLD_SIZE), request).plan
    assert plan is not None
    return float(value_links(judge(plan, shape, request)).mean())


def _count_exactly(shape: Shape, num_batches: int) -> Profile:
    """Accesses and batches of every row of the stream."""
    shapes = shape.counted.shapes
    counts = {s.name: np.zeros(s.num_rows, np.int32) for s in shapes}
    for batch in _stream(shape, num_batches):
        for name, ids in batch.items():
            np.add.at(counts[name], ids, 1)
    return Profile.from_counts(counts, shapes, num_batches * BATCH_SIZE)


def _stream(shape: Shape, num_batches: int) -> Iterator[dict[str, NDArray[np.int64]]]:
    """Batches drawn from the true frequencies: a run by its share of the accesses, then any row of it.

    Rows are numbered as a long count ordered them, like the rows of prepared data.
    """
    rng = np.random.default_rng(0)
    tables = shape.truth.tables
    ends = [np.cumsum(table.lengths * table.accesses) for table in tables]
    starts = [table.starts for table in tables]
    for _ in range(num_batches):
        batch = {}
        for table, end, start in zip(tables, ends, starts, strict=True):
            run = np.searchsorted(end, rng.random(BATCH_SIZE) * end[-1], "right").clip(max=len(end) - 1)
            batch[table.name] = start[run] + (rng.random(BATCH_SIZE) * table.lengths[run]).astype(np.int64)
        yield batch

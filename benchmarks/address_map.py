"""Where a row lives, in nanoseconds an id: the address map against binary search and an array of all rows.

    python -m benchmarks.address_map

One table of 33 M rows, cyclic over 8 ranks by several kinds of plans; distinct ids of a batch, drawn by a power law or
evenly. `locate` finds owner and slot; `route` is the whole kernel, which counts and sorts by (rank, segment) beside.
Both peers are kernels of the same compiler and give the same owners and slots:

    binary search   among the starts of all ranges, then the range's arithmetic
    array           one uint32 a row, the owner in its upper and the slot in its lower bits
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.command import Options, Report, parse
from benchmarks.measure import summarize
from benchmarks.workload import Zipf
from rowmesh.ops.memory import Buffer
from rowmesh.ops.route import locate, route
from rowmesh.ops.simd import kernel, load_f64, load_i64, load_u32, store_u32
from rowmesh.placement import AddressMap, Plan, RowRange, TablePlan, TableShape

WORLD_SIZE, RANKS_PER_NODE = 8, 4
NUM_PARTITIONS, NUM_HEAD_ROWS = 1500, 256
SCATTERED = (256, 4095, 16383)  # rows: the last two make as many ranges as a table may have, and four times as many
DIM = 16
OWNER_BITS = 3
TARGET_NS = 1.0
QUICK_IDS = 16384


@kernel
def _search(starts, ranges, num_ranges, ids, count, owners, slots):
    """Binary search among the starts (int64) of ranges, then the same arithmetic as `locate`."""
    for i in range(count):
        row = load_i64(ids + 8 * i)
        low, left = 0, num_ranges
        while left > 1:
            half = left >> 1
            low += half * np.int64(load_i64(starts + 8 * (low + half)) <= row)
            left -= half
        part = ranges + 88 * low
        x = row - load_i64(part + 64)
        y = x + load_i64(part + 8)
        modulus = load_i64(part + 16)
        owner = y - np.int64((np.float64(y) + 0.5) * load_f64(part + 72)) * modulus + load_i64(part + 24)
        store_u32(owners + 4 * i, owner)
        store_u32(slots + 4 * i, load_i64(part + 40) + np.int64((np.float64(x) + 0.5) * load_f64(part + 80)))


@kernel
def _read(places, ids, count, owners, slots):
    """One load from an array that has the place of every row."""
    for i in range(count):
        place = load_u32(places + 4 * load_i64(ids + 8 * i))
        store_u32(owners + 4 * i, place >> 29)
        store_u32(slots + 4 * i, place & 0x1FFFFFFF)


def make_plans(num_rows: int) -> dict[str, Plan]:
    """Kinds of plans of one table, from one range to many."""
    shape = TableShape("item", num_rows, 4 * DIM, 4 * DIM, 4)
    hot, warm, head = num_rows // 1000, num_rows // 50, NUM_HEAD_ROWS
    levels = [RowRange(0, hot, "replicated"), RowRange(hot, warm, "node", shift=1), RowRange(warm, num_rows, shift=2)]
    balanced = [RowRange(row, row + 1, "fixed", rank=row * 5 % WORLD_SIZE) for row in range(head)]
    bounds = np.unique(np.geomspace(1, num_rows, 2 * NUM_PARTITIONS).astype(np.int64) - 1)
    bounds = np.append(bounds[np.linspace(0, len(bounds) - 1, NUM_PARTITIONS).astype(int)], num_rows)
    partitions = [
        RowRange(int(start), int(stop), "fixed", rank=number * 5 % WORLD_SIZE)
        for number, (start, stop) in enumerate(pairwise(bounds))
        if start < stop
    ]
    ranges = {
        "cyclic": [RowRange(0, num_rows, shift=3)],
        "hot, warm, cold": levels,
        f"{head} balanced rows": [*balanced, RowRange(head, num_rows, shift=2)],
        f"{len(partitions)} partitions": partitions,
        **{f"{2 * count + 1} ranges of rows in no order": _scattered(num_rows, count) for count in SCATTERED},
    }
    return {name: Plan((TablePlan(shape, tuple(parts)),), WORLD_SIZE, RANKS_PER_NODE) for name, parts in ranges.items()}


def _scattered(num_rows: int, count: int) -> list[RowRange]:
    """Rows that stand all over a table and are replicated, and the others in one cycle, as where ids are hashes."""
    rows = np.sort(np.random.default_rng(0).permutation(num_rows // 2 - 1)[:count] * 2 + 1).tolist()
    ranges, taken = [], 0
    for start, stop in pairwise([-1, *rows, num_rows]):
        if start >= 0:
            ranges.append(RowRange(start, start + 1, "replicated"))
        place = taken % WORLD_SIZE
        ranges.append(RowRange(start + 1, stop, shift=place, phase=place))
        taken += stop - start - 1
    return ranges


class Places:
    """Owners and slots that a kernel writes."""

    def __init__(self, count: int) -> None:
        self._memory = Buffer(8 * count)
        self.owners, self.slots = self._memory.address, self._memory.address + 4 * count
        self.values = self._memory.array(np.uint32, 2, count)


class Lookup:
    """The contestants for one plan.

    Args:
        plan: of one table.
        most: ids of the largest batch.
    """

    def __init__(self, plan: Plan, most: int) -> None:
        self._map = AddressMap(plan, [plan.tables[0].name], rank=0)
        self._arenas = np.zeros(plan.world_size, np.int64)
        self._header = self._map.header(self._arenas.ctypes.data, 4 * DIM)
        self._starts = np.ascontiguousarray(self._map.ranges[:, 0])
        self._sorter = Sorter(self._map, most)
        self._places = self._fill()
        self.num_bytes = {
            "rowmesh": self._map.num_bytes,
            "binary search": self._map.ranges.nbytes + self._starts.nbytes,
            "array": self._places.nbytes,
        }

    def functions(self) -> dict[str, Callable[[np.ndarray, Places], None]]:
        """Of ids and where places go."""
        ranges, starts = self._map.ranges, self._starts
        return {
            "rowmesh locate": self._locate,
            "binary search": lambda ids, out: _search(
                starts.ctypes.data, ranges.ctypes.data, len(starts), ids.ctypes.data, len(ids), out.owners, out.slots
            ),
            "array": lambda ids, out: _read(self._places.ctypes.data, ids.ctypes.data, len(ids), out.owners, out.slots),
            "rowmesh route": lambda ids, out: self._sorter(self._header.ctypes.data, ids),
        }

    def _locate(self, ids: np.ndarray, out: Places) -> None:
        locate(self._header.ctypes.data, 0, ids.ctypes.data, len(ids), out.owners, out.slots)

    def _fill(self) -> np.ndarray:
        """The array: owner and slot of every row."""
        num_rows, step = self._map.num_rows[0], 1 << 20
        places, out = np.zeros(num_rows, np.uint32), Places(step)
        for first in range(0, num_rows, step):
            ids = np.arange(first, min(first + step, num_rows))
            self._locate(ids, out)
            owners, slots = out.values[:, : len(ids)]
            places[first : first + len(ids)] = owners << (32 - OWNER_BITS) | slots
        return places


class Sorter:
    """`route` with the buffers of an exchange."""

    def __init__(self, address_map: AddressMap, most: int) -> None:
        world_size, segments = address_map.plan.world_size, address_map.num_segments
        sizes = {
            "counts": 4 * most,
            "stops": 4 * most,
            "keys": 4 * most,
            "sorted": 4 * most,
            "uniques": 4 * most,
            "offsets": 8 * world_size * (segments + 1),
            "accesses": 8 * world_size * segments,
            "replies": 8 * (world_size + 1),
            "addresses": 8 * most,
        }
        self._buffers = {name: Buffer(size) for name, size in sizes.items()}
        self._buffers["counts"].array(np.uint32, most)[:] = 1
        self._bounds = np.zeros(2, np.int64)

    def __call__(self, header: int, ids: np.ndarray) -> None:
        """Routes distinct ids."""
        self._bounds[1] = len(ids)
        counts, stops, keys, *out = (buffer.address for buffer in self._buffers.values())
        refused = route(header, ids.ctypes.data, self._bounds.ctypes.data, counts, stops, keys, 0, *out)
        assert refused == -1, f"id {ids[refused]} is no row"


def draw(kind: str, num_rows: int, zipf: float, size: int, count: int) -> list[np.ndarray]:
    """Batches of the distinct ids among `size` drawn ones, in the order in which they first come."""
    law, generator = Zipf(num_rows, zipf, scattered=False), np.random.default_rng(0)
    batches = []
    for _ in range(count):
        ids = law.sample(generator, (size,)) if kind == "zipf" else generator.integers(0, num_rows, size)
        unique, first = np.unique(ids, return_index=True)
        batches.append(unique[np.argsort(first)])
    return batches


def measure(lookup: Lookup, batches: list[np.ndarray], options: Options) -> dict[str, list[float]]:
    """Seconds an id of every call, contestants in turns.

    Raises:
        AssertionError: they do not find the same places.
    """
    workload, functions = options.workloads[0], lookup.functions()
    most = max(map(len, batches))
    places = {name: Places(most) for name in functions}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(workload.warmup + options.repeats * workload.steps):
        ids = batches[number % len(batches)]
        for name, function in functions.items():
            began = time.perf_counter()
            function(ids, places[name])
            seconds[name].append((time.perf_counter() - began) / len(ids))
        expected = places["rowmesh locate"].values[:, : len(ids)]
        for name in ("binary search", "array"):
            assert np.array_equal(places[name].values[:, : len(ids)], expected), f"{name} finds other places"
    return {name: times[workload.warmup :] for name, times in seconds.items()}


def run_case(options: Options, report: Report, name: str, lookup: Lookup, kind: str, batches: list[np.ndarray]) -> None:
    """One plan and one law of ids."""
    seconds = measure(lookup, batches, options)
    nanoseconds = {each: _nanoseconds(times) for each, times in seconds.items()}
    case = f"{name}, {kind}"
    for contestant, timing in nanoseconds.items():
        num_bytes = lookup.num_bytes[contestant.replace(" locate", "").replace(" route", "")]
        report.line(
            case=case,
            contestant=contestant,
            ids=round(float(np.mean([len(ids) for ids in batches]))),
            **timing,
            map_bytes=num_bytes,
            target_ns=TARGET_NS if contestant == "rowmesh locate" else None,
        )
    ours = nanoseconds["rowmesh locate"]["id_ns"]
    report.ratio(f"{case}: ns an id, target about {TARGET_NS:.0f}", ours)
    for peer in ("binary search", "array"):
        report.ratio(f"{case}: {peer} / rowmesh", round(nanoseconds[peer]["id_ns"] / ours, 2))


def _nanoseconds(times: list[float]) -> dict[str, Any]:
    """`summarize`, an id and in nanoseconds."""
    of_calls = summarize([second * 1e6 for second in times], "id")
    return {name.replace("_ms", "_ns"): value for name, value in of_calls.items()}


def main(arguments: list[str] | None = None) -> None:
    """Runs every case asked for."""
    defaults = {"global_batch": [65536], "max_rows": 33_000_000}
    options = parse((__doc__ or "").splitlines()[0], arguments, defaults)
    workload = options.workloads[0]
    size = QUICK_IDS if options.quick else workload.global_batch  # fewer, and calls would be what is measured
    report = Report("address_map", options.output)
    for kind in ("zipf", "uniform"):
        batches = draw(kind, workload.max_rows, workload.zipf, size, workload.num_batches)
        for name, plan in make_plans(workload.max_rows).items():
            run_case(options, report, name, Lookup(plan, max(map(len, batches))), kind, batches)
    report.finish()


if __name__ == "__main__":
    main()

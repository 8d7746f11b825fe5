"""What reordering costs and gives: time, memory, and the distinct prefixes of batches before and after.

    python -m benchmarks.reordering                          planted communities, one table of 10⁵ and 10⁶ ids
    python -m benchmarks.reordering --ids 100000000 --batches 5000
    python -m benchmarks.reordering --data data/prepared     a prepared data set; --min-rows, --batch-size

Planted data: every batch shows a few of many communities of 300 ids (`--active`), and a part of its ids is noise from
all of them; popularity is Zipf-distributed. Prefixes are counted in batches that the order was not made of, the
validation split. Planted data are written by another process, so that the peak of memory is that of reordering.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.command import Report
from rowmesh._support.files.checksums import checksums_of
from rowmesh._support.files.manifest import Manifest, contents
from rowmesh.data import Prepared, ReorderOptions, Schema, reorder
from rowmesh.data.prepared import PREPARED, Split, Table, arrow_schema, counts_path, vocabulary_path, write_vocabulary
from rowmesh.data.reorder.groups import count_prefixes
from rowmesh.data.writer import SplitWriter

COMMUNITY_IDS = 300
BLOCK = 16_384
BATCH = 4096
VALIDATION_BATCHES = 64


class Planted:
    """Batches of ids of which some occur together.

    Args:
        num_ids: of the table.
        zipf: exponent of the popularity of ids; a community has ids of all popularities.
        noise: share of a batch's ids that are from any community.
        active: communities of a batch.
        seed: of all draws.
    """

    def __init__(self, num_ids: int, zipf: float, noise: float, active: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._num_communities = max(1, num_ids // COMMUNITY_IDS)
        self._size = num_ids // self._num_communities
        self._noise, self._active = noise, active
        self._within = np.cumsum((np.arange(self._size) + 0.5) ** -zipf)
        self._shuffle = self._rng.permutation(num_ids).astype(np.int32)  # ids before preparation are in no order

    def batch(self) -> NDArray[np.int32]:
        """The next BATCH ids."""
        rng = self._rng
        active = rng.integers(0, self._num_communities, self._active)
        community = active[rng.integers(0, self._active, BATCH)]
        stray = rng.random(BATCH) < self._noise
        community[stray] = rng.integers(0, self._num_communities, int(stray.sum()))
        place = np.searchsorted(self._within, rng.random(BATCH) * self._within[-1])
        return self._shuffle[community * self._size + place]


def write_planted(folder: Path, num_ids: int, num_batches: int, options: argparse.Namespace) -> Prepared:
    """A prepared data set of one table, as preparation would write it."""
    planted = Planted(num_ids, options.zipf, options.noise, options.active, options.seed)
    batches = {"train": num_batches, "validation": VALIDATION_BATCHES}
    drawn = {name: [planted.batch() for _ in range(count)] for name, count in batches.items()}
    counts = np.zeros(num_ids, np.int64)
    for ids in drawn["train"]:
        np.add.at(counts, ids, 1)
    order = np.argsort(-counts, kind="stable")
    row = np.empty(num_ids, np.int32)
    row[order] = np.arange(num_ids, dtype=np.int32)
    (folder / "counts").mkdir(parents=True)
    (folder / "vocabulary").mkdir()
    np.save(counts_path(folder, "item"), np.append(counts[order], 0))
    write_vocabulary(vocabulary_path(folder, "item"), pa.array(order))
    schema = Schema.parse({"format": "parquet", "label": "y", "categorical": ["item"]})
    for name, parts in drawn.items():
        with SplitWriter(folder / f"{name}.arrow", arrow_schema(schema, (False,)), BLOCK) as writer:
            for ids in parts:
                writer.write([pa.array(np.zeros(BATCH, np.float32)), pa.array(row[ids])])
    data = Prepared(
        folder=folder,
        schema=schema,
        min_count=1,
        bad_rows=0,
        block_samples=BLOCK,
        rowmesh_version="",
        tables=(Table(name="item", num_rows=num_ids + 1, multi_hot=False, num_distinct=num_ids, rare_share={}),),
        splits={
            name: Split(samples=len(parts) * BATCH, positive_rate=0.0, label_means={"y": 0.0})
            for name, parts in drawn.items()
        },
        sources={},
    )
    data.save()
    files = contents(folder)
    sums = {name: checksums_of(folder / name) for name in files}
    request = {"planted": [num_ids, num_batches, options.seed]}
    Manifest(kind=PREPARED, request=request, files=tuple(files), checksums=sums).write(folder)
    return data


def batches_of(data: Prepared, split: str, name: str, size: int) -> Iterator[NDArray[np.int32]]:
    """The ids of each whole batch of a split, in its order."""
    with pa.memory_map(str(data.split_path(split))) as file:
        column = pa.ipc.open_file(file).read_all()[name]
        for start in range(0, len(column) - size + 1, size):
            part = column.slice(start, size).combine_chunks()
            yield (part.flatten() if data.table(name).multi_hot else part).to_numpy()


def measure(report: Report, case: str, data: Prepared, options: argparse.Namespace) -> None:
    """Reorders a data set, and counts the prefixes of its tables before and after."""
    how = ReorderOptions(batch_size=options.batch_size, max_edges=options.max_edges, max_ids=options.max_ids)
    before_mb, began = peak_mb(), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        new = reorder(data, Path(folder) / "out", min_rows=options.min_rows, options=how)
        elapsed_s = time.perf_counter() - began
        report.line(
            case=case,
            samples=data.splits["train"].samples,
            elapsed_s=round(elapsed_s, 1),
            peak_mb=round(peak_mb()),
            peak_before_mb=round(before_mb),
        )
        assert new.reordering is not None
        split = "validation" if "validation" in data.splits else "train"
        for name, facts in new.reordering["tables"].items():
            p3 = facts["prefix_rows"]
            before, after = (list(batches_of(part, split, name, options.batch_size)) for part in (data, new))
            counted = prefixes(before, after, p3) if before else {}
            report.line(
                case=case,
                table=name,
                rows=data.table(name).num_rows,
                split=split,
                prefix_rows=p3,
                **counted,
                **{key: facts[key] for key in ("num_ids", "num_edges", "communities", "resolution")},
                elapsed_s=round(facts["elapsed_s"], 1),
            )
            if counted:
                ratio = round(counted["prefixes_before"] / counted["prefixes_after"], 2)
                report.ratio(f"{case} {name}: prefixes before / after", ratio)


def prefixes(before: list[NDArray[np.int32]], after: list[NDArray[np.int32]], p3: int) -> dict[str, float]:
    """Distinct ids and prefixes of a batch; also where samples are shuffled, so that batches show all alike."""
    mixed = np.random.default_rng(0).permutation(np.concatenate(after))
    orders = {"before": before, "after": after, "after_shuffled": np.array_split(mixed, len(after))}
    counted = {f"prefixes_{name}": round(count_prefixes(batches, p3).mean(), 1) for name, batches in orders.items()}
    return {"unique_ids": round(count_prefixes(before, 1).mean(), 1), **counted}


def peak_mb() -> float:
    """The most memory that the process has had; mapped files count while they are in use."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, defaults = parser.add_argument, ReorderOptions()
    add("--ids", type=lambda text: [int(part) for part in text.split(",")], default=[100_000, 1_000_000])
    add("--batches", type=int, default=2000, help="planted training batches")
    add("--zipf", type=float, default=1.1)
    add("--noise", type=float, default=0.3, help="share of planted ids that occur with any others")
    add("--active", type=int, default=10, help="planted communities of a batch")
    add("--data", type=Path, help="instead: a prepared data set")
    add("--min-rows", type=int, default=10_000)
    add("--batch-size", type=int, default=BATCH)
    add("--max-ids", type=int, default=defaults.max_ids)
    add("--max-edges", type=int, default=defaults.max_edges)
    add("--seed", type=int, default=1)
    add("--scratch", type=Path, help="folder for what is written meanwhile")
    add("--quick", action="store_true", help="a small case that ends within 30 s")
    add("--output", type=Path, help="also append the lines to this file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.ids, options.batches, options.active = [50_000], 400, 4
    return options


def main(arguments: list[str] | None = None) -> None:
    """Runs every case asked for."""
    options = parse(arguments)
    report = Report("reordering", options.output)
    if options.data:
        measure(report, str(options.data.name), Prepared.open(options.data), options)
    for num_ids in [] if options.data else options.ids:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.scratch)))
            pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
            data = pool.submit(write_planted, folder / "planted", num_ids, options.batches, options).result()
            pool.shutdown()
            measure(report, f"planted_{num_ids}", data, options)
    report.finish()


if __name__ == "__main__":
    main()

"""Samples a second from files of rows into trained rows of tables: raw rows and dynamic tables, beside prepared ones.

    python -m benchmarks.dynamic_table --stream

Drawn rows in Criteo's format, as text, compressed text and Parquet. `loader` is reading alone; `end to end` looks every
batch up too, and updates the rows by a gradient: all of a training step but the network, which is the same for both.
Preparing is timed once, since training reads what it wrote many times. One process; a thread reads ahead.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.command import Report
from benchmarks.measure import median
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, TableSpec
from rowmesh.data import Batch, Loader, Prepared, Schema, prepare
from rowmesh.data.quarantine import NoBadRows
from rowmesh.data.raw import FileSource, RawLoader
from rowmesh.data.schema import criteo_schema
from rowmesh.tables import Dynamic, Uniform

NUM_DENSE, NUM_IDS, DIM, SKEW = 13, 26, 16, 3.0
WARM_UP = 3  # batches, in which kernels compile
Make = Callable[[], Iterable[Batch]]


def run(report: Report, num_rows: int, batch_size: int, repeats: int) -> None:
    """Measures every kind of file, in rounds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_rows(folder, num_rows)
        began = time.perf_counter()
        prepared = prepare({"train": [files["text"][0]]}, folder / "prepared", criteo_schema(), min_count=1)
        report.line(case="preparing text, once", samples_per_s=round(num_rows / (time.perf_counter() - began)))
        makes: dict[str, Make] = {"prepared": lambda: Loader(prepared, "train", batch_size=batch_size, shuffle=True)}
        for kind, (file, schema) in files.items():
            makes[f"raw {kind}"] = _raw(file, schema, batch_size)
        specs = {name: _specs(None if name.startswith("raw") else prepared, num_rows) for name in makes}
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(repeats):
            for name, make in makes.items():
                found.setdefault((name, "loader"), []).append(_rate(make()))
                found.setdefault((name, "end to end"), []).append(_rate(_trained(make(), specs[name])))
    rates = {case: median(values) for case, values in found.items()}
    for (name, what), rate in rates.items():
        report.line(case=what, contestant=name, rows=num_rows, batch=batch_size, samples_per_s=round(rate))
        if name != "prepared":
            report.ratio(f"{what}: {name} over prepared", round(rate / rates["prepared", what], 3))


def write_rows(folder: Path, count: int) -> dict[str, tuple[Path, Schema]]:
    """The same rows in files of each kind, with how to read them."""
    draw = np.random.default_rng(0)
    sizes = np.geomspace(10, max(count // 2, 11), NUM_IDS).astype(np.int64)
    ids = (sizes * draw.random((count, NUM_IDS)) ** SKEW).astype(np.int64)
    dense, clicks = draw.integers(0, 100, (count, NUM_DENSE)), draw.integers(0, 2, count)
    text, compressed, parquet = (folder / name for name in ("rows.tsv", "rows.tsv.gz", "rows.parquet"))
    with text.open("w") as file:
        for click, numbers, row in zip(clicks.tolist(), dense.tolist(), ids.tolist(), strict=True):
            file.write("\t".join([str(click), *map(str, numbers), *(f"{each:08x}" for each in row)]) + "\n")
    with text.open("rb") as file, gzip.open(compressed, "wb", compresslevel=1) as packed:
        shutil.copyfileobj(file, packed)
    columns = {"label": clicks} | {f"I{i + 1}": dense[:, i] for i in range(NUM_DENSE)}
    columns |= {f"C{i + 1}": ids[:, i] for i in range(NUM_IDS)}
    pq.write_table(pa.table(columns), parquet)
    as_text, as_parquet = criteo_schema(), criteo_schema(file_format="parquet")
    return {"text": (text, as_text), "gzip": (compressed, as_text), "Parquet": (parquet, as_parquet)}


def _raw(file: Path, schema: Schema, batch_size: int) -> Make:
    return lambda: RawLoader(FileSource([file], schema), schema, batch_size=batch_size, quarantine=NoBadRows())


def _specs(prepared: Prepared | None, num_rows: int) -> list[TableSpec]:
    """Dense tables of prepared data; dynamic ones that hold all ids of raw rows."""
    own, dynamic = Uniform(bound=0.01), Dynamic(capacity=2 * num_rows)
    if prepared is None:
        names = criteo_schema().features
        return [TableSpec(name=name, dim=DIM, storage="dynamic", dynamic=dynamic, initializer=own) for name in names]
    return [TableSpec(name=table.name, num_rows=table.num_rows, dim=DIM, initializer=own) for table in prepared.tables]


def _trained(batches: Iterable[Batch], specs: list[TableSpec]) -> Iterator[Batch]:
    """The batches, each after the rows that it looks up were updated."""
    embeddings = EmbeddingCollection(specs)
    optimizer = EmbeddingOptimizer(embeddings)
    for batch in batches:
        optimizer.zero_grad()
        embeddings(batch.sparse).values.square().mean().backward()
        optimizer.step()
        yield batch
    embeddings.close()


def _rate(batches: Iterable[Batch]) -> float:
    """Samples a second after the first batches."""
    count, began = 0, time.perf_counter()
    for number, batch in enumerate(batches):
        if number < WARM_UP:
            began = time.perf_counter()
        else:
            count += batch.num_samples
    return count / (time.perf_counter() - began)

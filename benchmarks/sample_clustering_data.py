"""Batches to cluster: real rows of Criteo and Avazu, the workload of the other benchmarks, and planted clicks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.click_sets import CRITEO_FILES
from benchmarks.workload import Workload, make_batches
from rowmesh.data import Loader, PlantedConfig, Schema, prepare
from rowmesh.data.planted import PlantedModel
from rowmesh.pipeline.cutter import BatchRows, RowNumbering
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec

FILES = {
    "criteo": tuple(f"criteo_kaggle/{name}" for name in CRITEO_FILES),
    "avazu": ("avazu/train.csv.gz",),
}
SOURCES = (*FILES, "zipf", "planted")


def read(source: str, workload: Workload, data: Path) -> tuple[SparseBatch, RowNumbering]:
    """One batch, and what numbers its rows.

    Real data has less than the batch asked for: all of it is one batch then. Every id has a row of its own there, since
    with so few samples most would otherwise share the row of rare ids.

    Raises:
        FileNotFoundError: the real data is not there.
    """
    if source in FILES:
        return _real(source, workload, data)
    num_rows, ids = (_zipf if source == "zipf" else _planted)(workload)
    names = [f"C{table + 1}" for table in range(len(num_rows))]
    return SparseBatch.from_dense(names, ids), _numbering(dict(zip(names, num_rows, strict=True)))


def keys_by_feature(rows: BatchRows) -> np.ndarray:
    """Keys `[F, B, L]`; all bags hold as many ids here."""
    assert isinstance(rows.bags, int)
    return rows.keys.numpy().reshape(-1, rows.batch_size, rows.bags)


def _real(source: str, workload: Workload, data: Path) -> tuple[SparseBatch, RowNumbering]:
    files = [data / name for name in FILES[source]]
    if missing := [str(path) for path in files if not path.is_file()]:
        raise FileNotFoundError(f"{', '.join(missing)}: no such file; give its folder with --data")
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare({"train": files}, Path(folder) / "prepared", Schema.load(source), min_count=1)
        loader = Loader(
            prepared, "train", batch_size=workload.global_batch, shuffle=True, seed=workload.seed, prefetch=0
        )
        batch = next(iter(loader)).sparse
        return batch, _numbering({table.name: table.num_rows for table in prepared.tables})


def _zipf(workload: Workload) -> tuple[list[int], torch.Tensor]:
    (batch,) = make_batches(workload, 0, 1, 1)
    return workload.table_rows, batch.ids


def _planted(workload: Workload) -> tuple[list[int], torch.Tensor]:
    """One id a bag, whatever the workload; values are numbered, and a missing one is a value."""
    model = PlantedModel(PlantedConfig(seed=workload.seed, max_rows=workload.max_rows or None))
    samples = model.draw(workload.global_batch, stream=(0,))
    values, ids = zip(*(np.unique(drawn, return_inverse=True) for drawn in samples.ids), strict=True)
    return [len(distinct) for distinct in values], torch.from_numpy(np.stack(ids))


def _numbering(num_rows: dict[str, int]) -> RowNumbering:
    return RowNumbering([TableSpec(name=name, num_rows=rows, dim=1) for name, rows in num_rows.items()])

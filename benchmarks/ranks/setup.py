"""What the ranks of all benchmarks make: the tables of a workload, and its batches."""

from __future__ import annotations

import torch

from benchmarks.workload import Workload, WorkloadBatch
from rowmesh import RowWiseAdaGrad, SparseBatch, TableSpec


def table_specs(workload: Workload) -> list[TableSpec]:
    """One table a feature, all of one spec, so that they fuse into one group."""
    optimizer = RowWiseAdaGrad(lr=workload.lr)
    return [
        TableSpec(name=f"t{i}", num_rows=rows, dim=workload.dim, optimizer=optimizer)
        for i, rows in enumerate(workload.table_rows)
    ]


def sparse_batch(tables: list[TableSpec], batch: WorkloadBatch) -> SparseBatch:
    """The ids of a batch, without a copy."""
    return SparseBatch.from_dense([table.name for table in tables], batch.ids)


def output_gradient(workload: Workload, world_size: int, columns: int) -> torch.Tensor:
    """A gradient for the look-up's output where there is no model above it: `[b, columns]`."""
    return torch.randn(workload.global_batch // world_size, columns) * 1e-3

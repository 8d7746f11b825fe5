"""What the ranks of all benchmarks share: the tables of a workload, its batches, and serving commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import rank
from benchmarks.workload import Workload, WorkloadBatch
from rowmesh import Mesh, RowWiseAdaGrad, SparseBatch, TableSpec


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


def serve(make: Callable[..., Any], *names: str) -> None:
    """Joins the mesh and serves commands on one thread until the benchmark hangs up.

    Args:
        make: makes what has the commands from (workload, mesh, **options); closed at the end.
        names: of its methods that are commands.
    """
    torch.set_num_threads(1)
    workload, options = rank.settings()
    with Mesh.connect() as mesh:
        commands = make(workload, mesh, **options)
        rank.serve(**{name: getattr(commands, name) for name in names})
        commands.close()

"""What the ranks of all benchmarks share: the tables of a workload, its batches, and serving commands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch

from benchmarks import rank
from benchmarks.workload import Workload, WorkloadBatch
from rowmesh import AdaGrad, Mesh, RowWiseAdaGrad, SparseBatch, TableSpec
from rowmesh.tables import Dynamic, TensorTrain, Uniform
from rowmesh.tables.spec import Send


def table_specs(
    workload: Workload, cored_rows: int = 0, rank: int = 0, sums: Collection[int] = (), send: Send = "rows"
) -> list[TableSpec]:
    """One table a feature, all of one spec, so that they fuse into one group.

    Args:
        workload: says how large they are.
        cored_rows: tables of so many rows or more are tensor-train tables; 0: none.
        rank: of those.
        sums: numbers of tables that send sums.
        send: what the others send.
    """
    dense: dict[str, Any] = {"optimizer": RowWiseAdaGrad(lr=workload.lr)}
    cored: dict[str, Any] = {
        "optimizer": AdaGrad(lr=workload.lr),
        "storage": "tensor_train",
        "tensor_train": TensorTrain(rank=rank),
    }
    return [
        TableSpec(
            name=f"t{i}",
            num_rows=rows,
            dim=workload.dim,
            send="sums" if i in sums else send,
            **(cored if 0 < cored_rows <= rows else dense),
        )
        for i, rows in enumerate(workload.table_rows)
    ]


def dynamic_specs(workload: Workload, rules: Mapping[int, Dynamic] = MappingProxyType({})) -> list[TableSpec]:
    """The same tables as dynamic ones: by number with these rules, else with room for all ids wherever they fall."""
    return [
        TableSpec(
            name=f"t{i}",
            dim=workload.dim,
            optimizer=RowWiseAdaGrad(lr=workload.lr),
            initializer=Uniform(bound=0.01),  # of all, so that they fuse
            storage="dynamic",
            dynamic=rules.get(i) or Dynamic(capacity=rows + rows // 4 + 64),
        )
        for i, rows in enumerate(workload.table_rows)
    ]


def sparse_batch(tables: list[TableSpec], batch: WorkloadBatch) -> SparseBatch:
    """The ids of a batch, without a copy."""
    names = [table.name for table in tables]
    if batch.ids.dim() > 1:
        return SparseBatch.from_dense(names, batch.ids)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), batch.lengths.cumsum(0)])
    return SparseBatch(tuple(names), batch.ids, len(batch.labels), jagged_offsets=offsets)


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

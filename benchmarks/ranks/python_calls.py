"""One rank that counts the Python functions of rowmesh which each part of a step calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import rowmesh
from benchmarks.ranks.setup import serve
from benchmarks.workload import Workload
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch, TableSpec

DIMS = (16, 64)  # of two groups
TABLES = 3  # of each
_PACKAGE = str(Path(rowmesh.__file__).parent)


class Commands:
    """What the benchmark may ask for."""

    def __init__(self, workload: Workload, mesh: Mesh, transport: Any) -> None:
        tables = [
            TableSpec(name=f"{dim}-{i}", num_rows=workload.max_rows, dim=dim) for dim in DIMS for i in range(TABLES)
        ]
        self._embeddings = EmbeddingCollection(tables, mesh=mesh, transport=transport)
        self._optimizer = EmbeddingOptimizer(self._embeddings)
        samples = workload.global_batch // mesh.world_size
        generator = torch.Generator().manual_seed(mesh.rank)
        ids = torch.randint(0, workload.max_rows, (len(tables), samples), generator=generator)
        self._batch = SparseBatch.from_dense([table.name for table in tables], ids)
        self._gradient = torch.randn(samples, TABLES * sum(DIMS))

    def count(self) -> dict[str, int]:
        """Calls of each part of a step, after a few steps that make buffers."""
        for _ in range(5):
            self._step(lambda part: part())
        return dict(zip(("forward", "backward", "step"), self._step(count_calls), strict=True))

    def _step(self, run: Callable[[Callable[[], Any]], Any]) -> list[Any]:
        looked_up: list[Any] = []
        return [
            run(lambda: looked_up.append(self._embeddings(self._batch).values)),
            run(lambda: looked_up[0].backward(self._gradient)),
            run(self._optimizer.step),
        ]

    def close(self) -> None:
        """Lets go of shared memory."""
        self._embeddings.close()


def count_calls(function: Callable[[], Any]) -> int:
    """How many Python functions of rowmesh are called."""
    calls = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(_PACKAGE)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "count")


if __name__ == "__main__":
    main()

"""One rank that writes and reads a checkpoint of one table."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.ranks.setup import serve
from benchmarks.workload import Workload
from rowmesh import EmbeddingCollection, Mesh, TableSpec, checkpoint


class Commands:
    """What the benchmark may ask for."""

    def __init__(self, workload: Workload, mesh: Mesh, num_rows: int, folder: str) -> None:
        table = TableSpec(name="item", num_rows=num_rows, dim=workload.dim)
        self._mesh, self._folder = mesh, Path(folder)
        self._embeddings = EmbeddingCollection([table], mesh=mesh)

    def write(self) -> dict[str, Any]:
        """Writes it and waits for the disk; seconds."""
        return self._timed(lambda: checkpoint.save(self._folder, self._embeddings, {}, peers=self._mesh.peers))

    def read(self) -> dict[str, Any]:
        """Reads this rank's rows; seconds."""
        return self._timed(lambda: checkpoint.load(self._folder, self._embeddings))

    def _timed(self, action: Any) -> dict[str, Any]:
        self._meet()
        began_s = time.perf_counter()
        action()
        self._meet()
        return {"seconds": time.perf_counter() - began_s}

    def _meet(self) -> None:
        if self._mesh.group is not None:
            dist.barrier()

    def close(self) -> None:
        """Frees the rows."""
        self._embeddings.close()


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "write", "read")


if __name__ == "__main__":
    main()

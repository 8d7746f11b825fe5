"""One rank of rowmesh: the sparse part of a step by a plan, or with cyclic rows, as without a plan."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from benchmarks import rank as rank_side
from benchmarks.ranks.embedding_step import SparsePart
from benchmarks.ranks.setup import serve
from benchmarks.workload import Workload
from rowmesh import Mesh
from rowmesh.placement import Plan


class Commands:
    """What the benchmark may ask for."""

    def __init__(self, workload: Workload, mesh: Mesh, transport: Any, plan: str | None, wire_dtype: str = "") -> None:
        self._workload = workload
        torch.manual_seed(workload.seed + mesh.rank)  # gradients, which contestants must share to end with equal rows
        loaded = None if plan is None else Plan.load(Path(plan))
        narrow = getattr(torch, wire_dtype) if wire_dtype else None
        self._part = SparsePart.of(workload, mesh, transport, loaded, scattered=False, wire_dtype=narrow)
        self._part.step(0)  # compiles

    def round(self) -> dict[str, Any]:
        """Seconds of the timed steps."""
        barrier = self._part.embeddings.barrier
        return {"seconds": rank_side.alternate({"step": self._part.step}, self._workload, barrier)}

    def count(self) -> dict[str, Any]:
        """What this rank receives in a step, the mean over the batches: of rows, and of messages that open a round."""
        part, steps = self._part, len(self._part.batches)
        everything = [part.embeddings.common_counters, *part.embeddings.counters]
        before = [counters.bytes_received for counters in everything]
        for number in range(steps):
            part.step(number)
        opening, *rows = (
            (counters.bytes_received - then) / steps for counters, then in zip(everything, before, strict=True)
        )
        return {"row_bytes": sum(rows), "opening_bytes": opening, "steps": steps}

    def digest(self) -> dict[str, Any]:
        """What the first batch looks up now, by its bits: equal where training was."""
        with torch.no_grad():
            values = self._part.embeddings(self._part.batches[0]).values
        return {"digest": hashlib.blake2b(values.contiguous().numpy().tobytes(), digest_size=8).hexdigest()}

    def close(self) -> None:
        """Lets go of shared memory."""
        self._part.embeddings.close()


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "round", "count", "digest")


if __name__ == "__main__":
    main()

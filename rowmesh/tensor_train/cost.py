"""What a tensor-train table costs a step, measured here and now."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from rowmesh.ops.memory import Buffer
from rowmesh.tables import TableSpec, fuse
from rowmesh.tables.cores import CoreArena


def step_seconds(table: TableSpec, ids: Tensor, repeats: int = 7) -> float:
    """Seconds that the look-up of distinct ids, their gradients and the update of the cores take one thread.

    Finding the distinct ids, pooling, and the sum over ranks come on top; the first two are the same for dense rows.

    Args:
        table: a tensor-train table.
        ids: int64 `[U]`, distinct.
        repeats: steps, of which the median counts; one more goes before them, which compiles.
    """
    (group,) = fuse([table])
    arena = CoreArena(group)
    arena.initialize(seed=0)
    rows = Buffer(len(ids) * table.dim * table.dtype.itemsize)
    generator = torch.Generator("cpu").manual_seed(0)
    gradients = 1e-3 * torch.randn(len(ids), table.dim, generator=generator, dtype=table.dtype, device="cpu")
    elapsed = []
    for step in range(1, repeats + 2):
        began = time.perf_counter()
        lookup = arena.look_up(0, ids, rows.address, keep=True)
        arena.update(0, lookup, gradients, table.optimizer.numbers(table.optimizer.lr, 1.0, step))
        elapsed.append(time.perf_counter() - began)
    return statistics.median(elapsed[1:])

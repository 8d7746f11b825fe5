"""`benchmarks.tensor_train --versus-dense`: a table too large for memory, as cores, beside a dense one that fits.

Both are collections of one table on one rank; a step is look-up, gradient and update of a batch, one id a sample.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.command import Report
from benchmarks.measure import summarize
from benchmarks.workload import Zipf
from rowmesh import SGD, EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.tables import TensorTrain

NUM_ROWS, DIM = 40_000_000, 128  # EL-Rec §VI-B, Fig. 13


class Steps:
    """Trains one table.

    Args:
        num_rows: of the table.
        options: of the command.
        more: of the table's specification.
    """

    def __init__(self, num_rows: int, options: argparse.Namespace, **more: Any) -> None:
        batch = options.batch[0]
        self._collection = EmbeddingCollection(
            [TableSpec(name="table", num_rows=num_rows, dim=DIM, optimizer=SGD(), **more)]
        )
        self._optimizer = EmbeddingOptimizer(self._collection)
        self._gradient = 1e-3 * torch.randn(batch, DIM, generator=torch.Generator().manual_seed(0))
        zipf, drawn = Zipf(num_rows, options.zipf), np.random.default_rng(options.seed)
        self._batches = [torch.from_numpy(zipf.sample(drawn, (1, batch, 1))) for _ in range(16)]
        self._number = 0

    def __call__(self, _: Tensor) -> None:
        ids = self._batches[self._number % len(self._batches)]
        self._number += 1
        self._collection(SparseBatch.from_dense(["table"], ids)).values.backward(self._gradient)
        self._optimizer.step()

    @property
    def facts(self) -> dict[str, Any]:
        """Distinct ids of a batch, and memory."""
        distinct = int(np.median([len(ids.unique()) for ids in self._batches]))
        return {"unique_ids": distinct, "rows_mb": round(self._collection.memory_bytes["rows"] / 1e6, 2)}


def run(report: Report, options: argparse.Namespace, measure: Any) -> None:
    """The large table at every rank, and the dense one, in turns."""
    dense_rows = min(NUM_ROWS, options.dense_bytes // (4 * DIM))
    if options.quick:
        dense_rows = min(dense_rows, 100_000)
    everyone = {"dense": Steps(dense_rows, options)}
    for rank in options.rank:
        everyone[f"tensor_train rank {rank}"] = Steps(
            NUM_ROWS, options, storage="tensor_train", tensor_train=TensorTrain(rank=rank)
        )
    seconds = measure(everyone, [torch.empty(0)], options)
    timings = {name: summarize(times) for name, times in seconds.items()}
    for name, timing in timings.items():
        rows = dense_rows if name == "dense" else NUM_ROWS
        ratio = round(timing["step_ms"] / timings["dense"]["step_ms"], 2)
        report.line(
            case="versus_dense",
            contestant=name,
            num_rows=rows,
            dim=DIM,
            batch=options.batch[0],
            **timing,
            **everyone[name].facts,
            dense_mb_of_so_many_rows=round(rows * DIM * 4 / 1e6),
            times_dense=ratio,
            samples_per_s=round(options.batch[0] / timing["step_ms"] * 1e3),
        )
        report.ratio(name, ratio)

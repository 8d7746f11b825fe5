"""`benchmarks.tensor_train --footprint`: the tables of three data sets as cores, beside the paper's Table III.

Sizes follow from shapes alone; nothing is trained here, so the quality at these sizes is not shown by it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.command import Report
from benchmarks.shapes import FILE
from rowmesh.tables.tensor_train import TensorTrain

PAPER = {"avazu": 6.22, "kaggle": 7.29, "terabyte": 74.19}  # times smaller, EL-Rec Table III
MIN_ROWS = (1_000_000, 100_000)  # the paper's own rule, §VI-A, and ours where smaller tables matter
ELEMENT_BYTES = 4


def sizes(rows: Sequence[int], dim: int, rank: int, min_rows: int) -> tuple[int, int, int]:
    """Bytes of dense tables, of the same with cores in place of large tables, and how many those are.

    >>> sizes([1_000_000, 10], 64, rank=16, min_rows=1_000_000)
    (256002560, 463360, 1)
    """
    large = [count for count in rows if count >= min_rows]
    cores = 0
    for count in large:
        full = TensorTrain().shape(count, dim).full_ranks
        cores += TensorTrain(rank=(min(rank, full[0]), min(rank, full[1]))).shape(count, dim).num_parameters
    small = sum(rows) - sum(large)
    return ELEMENT_BYTES * dim * sum(rows), ELEMENT_BYTES * (cores + dim * small), len(large)


def run(report: Report, options: argparse.Namespace) -> None:
    """A line for each data set, rank and least number of rows."""
    shapes: Mapping[str, Any] = json.loads(FILE.read_text())
    for name, paper in PAPER.items():
        dim = shapes[name]["dim"]
        rows = [table["num_rows"] for table in shapes[name]["tables"].values()]
        for min_rows in MIN_ROWS:
            for rank in options.rank:
                dense, cored, count = sizes(rows, dim, rank, min_rows)
                ratio = round(dense / cored, 2)
                report.line(
                    case=name, dim=dim, rows=sum(rows), rank=rank, min_rows=min_rows, tables=count,
                    dense_mb=round(dense / 1e6, 1), cored_mb=round(cored / 1e6, 1), times_smaller=ratio,
                    paper_times_smaller=paper,
                )  # fmt: skip
                report.ratio(f"{name} rank {rank} from {min_rows} rows", ratio)

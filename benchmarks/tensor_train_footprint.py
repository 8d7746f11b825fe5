"""`benchmarks.tensor_train --footprint`: the tables of three data sets as cores, beside the paper's Table III.

Sizes follow from shapes alone; nothing is trained here. What they cost in quality is `--quality`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.command import Report
from benchmarks.shapes import FILE
from rowmesh.tables.tensor_train import TensorTrain, TensorTrainShape

PAPER = {"avazu": 6.22, "kaggle": 7.29, "terabyte": 74.19}  # times smaller, EL-Rec Table III
MIN_ROWS = (1_000_000, 100_000)  # the paper's own rule, §VI-A, and ours where smaller tables matter
ELEMENT_BYTES = 4


def sizes(rows: Sequence[int], dim: int, rank: int, min_rows: int) -> tuple[int, int, int]:
    """Bytes of dense tables, of the same with cores in place of large tables, and how many those are.

    >>> sizes([1_000_000, 10], 64, rank=16, min_rows=1_000_000)
    (256002560, 463360, 1)
    """
    large = [count for count in rows if count >= min_rows]
    cores = sum(cored(count, dim, rank).num_parameters for count in large)
    small = sum(rows) - sum(large)
    return ELEMENT_BYTES * dim * sum(rows), ELEMENT_BYTES * (cores + dim * small), len(large)


def cored(num_rows: int, dim: int, rank: int) -> TensorTrainShape:
    """A table as cores of a rank, or of the largest that it can have."""
    return TensorTrain().shape(num_rows, dim).at(rank)


@dataclass(frozen=True)
class Footprint:
    """A data set of the paper.

    Attributes:
        tables: name → rows.
        dim: of all.
    """

    tables: Mapping[str, int]
    dim: int

    @staticmethod
    def of(name: str) -> Footprint:
        """One of PAPER's."""
        shape: Mapping[str, Any] = json.loads(FILE.read_text())[name]
        return Footprint({table: facts["num_rows"] for table, facts in shape["tables"].items()}, shape["dim"])

    def compressions(self, rank: int, min_rows: int) -> dict[str, float]:
        """How many times smaller cores make each table of so many rows or more."""
        return {
            table: cored(rows, self.dim, rank).compression for table, rows in self.tables.items() if rows >= min_rows
        }


def run(report: Report, options: argparse.Namespace) -> None:
    """A line for each data set, rank and least number of rows."""
    for name, paper in PAPER.items():
        footprint = Footprint.of(name)
        rows, dim = list(footprint.tables.values()), footprint.dim
        for min_rows in MIN_ROWS:
            for rank in options.rank:
                dense, smaller, count = sizes(rows, dim, rank, min_rows)
                ratio = round(dense / smaller, 2)
                report.line(
                    case=name,
                    dim=dim,
                    rows=sum(rows),
                    rank=rank,
                    min_rows=min_rows,
                    tables=count,
                    dense_mb=round(dense / 1e6, 1),
                    cored_mb=round(smaller / 1e6, 1),
                    times_smaller=ratio,
                    paper_times_smaller=paper,
                )
                report.ratio(f"{name} rank {rank} from {min_rows} rows", ratio)

"""Fits the curves of `shapes.json` to samples of real data: `python -m benchmarks.fit_shapes ../shared/data`.

A table's frequencies are those of the values that a sample has ten times or more, then a power law s · k^−a that does
not fall below one access in the whole data set. The exponent is the one under which a sample of this size is expected
to meet as many distinct values as it did; s follows from the share of the accesses that the head leaves.

Rows of the whole data sets are those of OPER Table 1. Terabyte has no sample here: its tables take the columns of
Kaggle, matched by size.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import FILE, power_law
from benchmarks.workload import CRITEO_KAGGLE

MIN_HEAD_COUNT = 10
AVAZU_ROWS = {
    "C1": 7,
    "banner_pos": 7,
    "site_id": 4737,
    "site_domain": 7745,
    "site_category": 26,
    "app_id": 8552,
    "app_domain": 559,
    "app_category": 36,
    "device_id": 2686408,
    "device_ip": 6729486,
    "device_model": 8251,
    "device_type": 5,
    "device_conn_type": 4,
    "C14": 2626,
    "C15": 8,
    "C16": 9,
    "C17": 435,
    "C19": 68,
    "C20": 172,
    "C21": 60,
}
TERABYTE_ROWS = (
    39884406,
    39043,
    17289,
    7420,
    20263,
    3,
    7120,
    1543,
    63,
    38532951,
    2953546,
    403346,
    10,
    2208,
    11938,
    155,
    4,
    976,
    14,
    39979771,
    25641295,
    39664984,
    585935,
    12972,
    108,
    36,
)
TOTAL_ROWS = {"avazu": 8.9e6, "terabyte": 242.5e6}
NUM_SAMPLES = {"avazu": 40_400_000, "kaggle": 45_800_000, "terabyte": 195_000_000}
TERABYTE_ALL_SAMPLES = 4.37e9 / 4  # what floors its curves; the profile is of the samples above


def kaggle_columns(folder: Path) -> list[tuple[str, ...]]:
    """The 26 categorical columns of the samples."""
    rows = []
    for name in ("train", "dev", "test"):
        with gzip.open(folder / "criteo_kaggle" / f"{name}.tsv.gz", "rt") as file:
            rows += [line.rstrip("\n").split("\t")[14:40] for line in file]
    return list(zip(*rows, strict=True))


def avazu_columns(folder: Path) -> dict[str, tuple[str, ...]]:
    """The columns of the sample that have a table."""
    with gzip.open(folder / "avazu" / "train.csv.gz", "rt") as file:
        reader = csv.reader(file)
        header = next(reader)
        columns = dict(zip(header, zip(*reader, strict=True), strict=True))
    return {name: columns[name] for name in AVAZU_ROWS}


def fit(values: Sequence[str], num_rows: int, num_samples: float) -> dict[str, Any]:
    """The curve of one table."""
    counts = np.array(sorted(Counter(values).values(), reverse=True)[:num_rows], float)
    head = counts[counts >= MIN_HEAD_COUNT] / len(values)
    if len(head) == num_rows:
        return _entry(num_rows, head / head.sum(), 0.0, 0.0)
    mass = max(1 - head.sum(), 0.5 / len(values))
    distinct = max(len(counts) - len(head), 0.5)
    floor = 1 / num_samples
    low, exponent, high = 0.0, 2.0, 4.0
    for _ in range(50):
        rows, frequency = power_law(len(head), num_rows, exponent, floor, mass)
        expected = (rows * -np.expm1(-len(values) * frequency)).sum()
        low, high = (exponent, high) if expected > distinct else (low, exponent)
        exponent = (low + high) / 2
    return _entry(num_rows, head * (1 - mass) / max(head.sum(), 1e-30), exponent, floor)


def _entry(num_rows: int, head: np.ndarray, exponent: float, floor: float) -> dict[str, Any]:
    return {
        "num_rows": num_rows,
        "head": [float(f"{f:.6g}") for f in head],
        "exponent": round(exponent, 6),
        "floor": float(f"{floor:.6g}"),
    }


def scaled(rows: dict[str, int], above: float, total: float) -> dict[str, int]:
    """The larger tables scaled so that all have `total` rows together."""
    large = sum(n for n in rows.values() if n > above)
    factor = (total - (sum(rows.values()) - large)) / large
    return {name: int(n * factor) if n > above else n for name, n in rows.items()}


def main() -> None:
    """Fits all curves and writes them."""
    folder = Path(sys.argv[1])
    avazu, kaggle = avazu_columns(folder), kaggle_columns(folder)
    rows = scaled(AVAZU_ROWS, 1e6, TOTAL_ROWS["avazu"])
    terabyte = scaled({f"C{i + 1}": n for i, n in enumerate(TERABYTE_ROWS)}, 1e6, TOTAL_ROWS["terabyte"])
    by_size = sorted(range(26), key=lambda i: CRITEO_KAGGLE[i])
    columns = dict(zip(sorted(terabyte, key=terabyte.__getitem__), by_size, strict=True))
    tables = {
        "avazu": {name: fit(avazu[name], n, NUM_SAMPLES["avazu"]) for name, n in rows.items()},
        "kaggle": {f"C{i + 1}": fit(kaggle[i], n, NUM_SAMPLES["kaggle"]) for i, n in enumerate(CRITEO_KAGGLE)},
        "terabyte": {name: fit(kaggle[columns[name]], n, TERABYTE_ALL_SAMPLES) for name, n in terabyte.items()},
    }
    shapes = {
        name: {"num_samples": NUM_SAMPLES[name], "dim": 64 if name == "terabyte" else 16, "tables": tables[name]}
        for name in tables
    }
    FILE.write_text(json.dumps(shapes, indent=0).replace(",\n", ", ").replace('}, "', '},\n"') + "\n")


if __name__ == "__main__":
    main()

"""A small data set with several labels, some of them values, and sample weights; and plain torch that trains on it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from rowmesh.data import Prepared, prepare
from rowmesh.data.schema import Schema

CLICK, BUY, RATING = "click", "buy", {"name": "rating", "kind": "value"}


def write_rows(path: Path, count: int, *, seed: int = 0) -> Path:
    """A CSV file: the first half of its rows weighs much more than the other, and some weigh nothing."""
    draw = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["click", "buy", "rating", "weight", "price", "age", "user", "item", "tags"])
        for number in range(count):
            user, item = int(draw.integers(12)), int(draw.integers(7))
            click = int(draw.random() < 0.2 + 0.05 * item)
            buy = int(click and draw.random() < 0.5)
            rating = 1 + (user + item) % 5
            heavy = 9.0 if number % 64 < 32 else 0.25
            weight = 0 if draw.random() < 0.1 else round(heavy * draw.random(), 3)
            tags = "|".join(f"i{tag}" for tag in draw.integers(5, size=draw.integers(3)))
            dense = [round(draw.normal(), 3), round(draw.normal(), 3)]
            lines.writerow([click, buy, rating, weight, *dense, f"u{user}", f"i{item}", tags])
    return path


def labelled_schema(label: object, weight: str | None = None, *, shared: bool = False) -> Schema:
    """Of the rows that `write_rows` writes; `shared`: items and tags have one vocabulary."""
    return Schema.parse(
        {
            "label": label,
            "weight": weight,
            "dense": ["price", "age"],
            "categorical": ["user", "item", {"name": "tags", "separator": "|", "vocabulary": "item" if shared else ""}],
        }
    )


def prepare_labelled(
    folder: Path,
    label: object,
    weight: str | None = None,
    *,
    train: int = 200,
    test: int = 90,
    seed: int = 0,
    shared: bool = False,
) -> Prepared:
    """`folder / "prepared"`, of rows drawn into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"train": train, "validation": 50, "test": test}
    files = {
        name: [write_rows(folder / f"{name}.csv", size, seed=10 * seed + i)]
        for i, (name, size) in enumerate(sizes.items())
    }
    return prepare(files, folder / "prepared", labelled_schema(label, weight, shared=shared), block_samples=64)

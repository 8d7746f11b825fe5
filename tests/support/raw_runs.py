"""A run on raw rows: files of clicks, and its configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SCHEMA = """label = "click"
dense = ["price"]
dense_transform = "none"
categorical = ["user", "item"]
"""
TABLES = (
    "tables.dim=4",
    "tables.storage=dynamic",
    "tables.dtype=float64",
    "tables.dynamic.capacity=300",
    "tables.dynamic.shards=8",
    "tables.initializer.bound=0.1",
    "model.bottom=[8]",
    "model.top=[8]",
)


def write_rows(path: Path, first: int, count: int) -> None:
    """Rows whose clicks depend on their user alone; it appears whole."""
    drawn = np.random.default_rng(first)
    lines = ["click,price,user,item"]
    for _ in range(count):
        user, item = drawn.zipf(1.3) % 500, drawn.zipf(1.3) % 90
        lines.append(f"{int(drawn.random() < (0.9 if user % 3 == 0 else 0.2))},{drawn.random():.2f},u{user},i{item}")
    path.with_suffix(".tmp").write_text("\n".join(lines) + "\n")
    path.with_suffix(".tmp").rename(path)


def write_raw_run(folder: Path) -> Path:
    """Three files of 200 rows, and 100 in `test`; returns the path of a configuration, to which `TABLES` belong."""
    rows = folder / "rows"
    rows.mkdir()
    for number in range(3):
        write_rows(rows / f"{number}.csv", number, 200)
    (folder / "test").mkdir()
    write_rows(folder / "test" / "0.csv", 99, 100)
    (folder / "schema.toml").write_text(SCHEMA)
    path = folder / "raw.toml"
    path.write_text(
        f"""[data]
folder = "{rows}"
source = "raw"
raw_schema = "{folder / "schema.toml"}"
batch_size = 64
[run]
folder = "{folder / "run"}"
[train]
log_every = 4
progressive_every = 3
"""
    )
    return path

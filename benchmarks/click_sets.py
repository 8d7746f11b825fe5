"""Small click data that ends in numbers: drawn from a planted model, or real rows, prepared as for training.

Every seed has data of its own: another planted model and samples of it, or another random cut of the real rows.
Learning rates are tuned on other seeds than are reported: planted models that no reported run sees, but, as there are
so few, other cuts of the same real rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from rowmesh.data import Batch, Loader, PlantedConfig, Prepared, Schema, Splitter, prepare, synthesize
from rowmesh.tables import TableSpec
from rowmesh.tables.update_rules import RowWiseAdaGrad

HELD_OUT = 0.2
CRITEO_FILES = ("train.tsv.gz", "dev.tsv.gz", "test.tsv.gz")
EXPONENTS = (1.05, 1.25)


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Samples of planted models.

    Attributes:
        samples: to train on.
        held_out: to be judged on.
        rows: ids of each table.
        head: how many ids of each table have an effect.
        min_count: how often an id must be seen to have a row of its own.
    """

    samples: int
    held_out: int
    rows: tuple[int, ...]
    head: int
    min_count: int = 2

    def prepared(self, folder: Path, seed: int, tuning: bool) -> Prepared:
        """The planted model of this seed; seeds for tuning are others."""
        config = PlantedConfig(seed=2 * seed + tuning, num_rows=self.rows, head=self.head, exponents=EXPONENTS)
        optimum = synthesize(folder / "drawn", {"train": self.samples, "test": self.held_out}, config)
        drawn = folder / "drawn"
        files = {split: sorted(drawn.glob(f"{split}-*.parquet")) for split in ("train", "test")}
        schema = Schema.load(drawn / "schema.toml")
        return prepare(files, folder / "prepared", schema, min_count=self.min_count, optimum=optimum)


@dataclass(frozen=True, kw_only=True)
class RealRows:
    """Rows of a public data set, in its raw format.

    Attributes:
        source: the folder of its files.
        min_count: how often an id must be seen to have a row of its own.
        folder: what that is called where all data sets lie side by side.
        files: their names.
        schema: the name of their format.
    """

    source: Path
    min_count: int = 2
    folder: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    schema: ClassVar[str]

    @property
    def missing(self) -> list[str]:
        """Files that are not there."""
        return [name for name in self.files if not (self.source / name).is_file()]

    def prepared(self, folder: Path, seed: int, tuning: bool) -> Prepared:
        """The cut of this seed; seeds for tuning are others."""
        splitter = Splitter(validation=0.0, test=HELD_OUT, how="random", seed=2 * seed + tuning)
        files = {"train": [self.source / name for name in self.files]}
        schema = Schema.load(self.schema)
        return prepare(files, folder / "prepared", schema, splitter=splitter, min_count=self.min_count)


class Criteo(RealRows):
    """Rows of Criteo's Kaggle data: train, dev and test."""

    folder, files, schema = "criteo_kaggle", CRITEO_FILES, "criteo"


class Avazu(RealRows):
    """Rows of Avazu's data."""

    folder, files, schema = "avazu", ("train.csv.gz",), "avazu"


def table_specs(prepared: Prepared, dim: int, rule: RowWiseAdaGrad, dtype: torch.dtype) -> list[TableSpec]:
    """A table of each categorical feature."""
    return [TableSpec(name=t.name, num_rows=t.num_rows, dim=dim, optimizer=rule, dtype=dtype) for t in prepared.tables]


def read(
    prepared: Prepared,
    split: str,
    batch_size: int,
    *,
    epochs: int = 1,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> list[Batch]:
    """A rank's part of all batches, in their order: for training shuffled by the seed, else as in the file."""
    trains = split == "train"
    loader = Loader(
        prepared,
        split,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        shuffle=trains,
        seed=seed,
        drop_last=trains,
        prefetch=0,
    )
    return [batch for _ in range(epochs) for batch in loader]

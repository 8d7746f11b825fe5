"""SequenceData: prepared events as the data of a run: one table, of the items."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from rowmesh.data.events import Sequences
from rowmesh.data.events.sequences import SEQUENCES, SplitName
from rowmesh.data.prepared import SPLITS, Split, Table
from rowmesh.errors import DataError
from rowmesh.files.manifest import Manifest

ITEM, SCORED = "item", "scored"
"""Features of the one table: the events of users, and the items that they are compared with."""


@dataclass(frozen=True, eq=False)
class SequenceData:
    """What a run reads of prepared events.

    Attributes:
        sequences: the events.
    """

    sequences: Sequences

    @staticmethod
    def open(folder: str | Path, *, verify: bool = True) -> SequenceData:
        """Maps what `rowmesh data prepare` wrote of an event table.

        Raises:
            DataError: it is not there, damaged, or of samples with labels.
        """
        manifest = Manifest.read(Path(folder))
        if manifest is not None and manifest.kind != SEQUENCES:
            raise DataError(
                f"{folder} holds {manifest.kind}, and a sequence model needs {SEQUENCES}; prepare an event table, as "
                "rowmesh data prepare ratings.csv --schema movielens-csv does"
            )
        return SequenceData(Sequences.open(folder, verify=verify))

    @property
    def folder(self) -> Path:
        """Where they lie."""
        return self.sequences.folder

    @property
    def place(self) -> str:
        """Where they lie, wherever a command is run."""
        return str(self.folder.absolute())

    @property
    def features(self) -> tuple[str, ...]:
        """Of the items' table."""
        return (ITEM, SCORED)

    @property
    def tables(self) -> tuple[Table, ...]:
        """One, of the items."""
        return (self.table(ITEM),)

    @property
    def splits(self) -> dict[str, Split]:
        """Those that predict something, with their users."""
        return self._splits

    @cached_property
    def _splits(self) -> dict[str, Split]:
        counts = {name: len(self.sequences.users(_split(name))) for name in SPLITS}
        return {name: Split(samples=count, positive_rate=None) for name, count in counts.items() if count}

    @property
    def verification(self) -> str:
        """Why what is read is not verified; "" where it is."""
        return "" if self.sequences.files.is_verified else "not verified"

    @property
    def identity(self) -> str:
        """A digest of what the data are, the same for copies of a folder."""
        return self._identity

    @cached_property
    def _identity(self) -> str:
        facts = [self.sequences.schema.model_dump(mode="json"), asdict(self.sequences.counts)]
        sums = {
            name: each.to_json()
            for name, each in self.sequences.files.checksums.items()
            if name.endswith((".arrow", ".npy"))
        }
        return xxhash.xxh3_128_hexdigest(json.dumps([facts, sums], sort_keys=True).encode())

    def table(self, name: str) -> Table:
        """That of the items."""
        count = self.sequences.num_items
        return Table(name=ITEM, num_rows=count, multi_hot=True, num_distinct=count, rare_share={})

    def table_of(self, feature: str) -> str:
        """That of the items."""
        return ITEM

    def counts(self, name: str) -> NDArray[np.int64]:
        """Events of each item, of all splits: they do not rise, as items are numbered by them."""
        return np.bincount(self.sequences.items, minlength=self.sequences.num_items)

    def unordered_rows(self, name: str) -> range:
        """None are."""
        return range(0)

    def split(self, key: str, name: str) -> SplitName:
        """A split by its name.

        Raises:
            DataError: there is none of this name, or it predicts nothing.
        """
        if name not in self.splits:
            raise DataError(
                f"{key}: {self.folder} has no split {name!r} that predicts something, only: {', '.join(self.splits)}"
            )
        return _split(name)


def _split(name: str) -> SplitName:
    names: dict[str, SplitName] = {"train": "train", "validation": "validation", "test": "test"}
    return names[name]

"""SequenceData: prepared events as the data of a run: a table of the items, and one of each side column."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import xxhash

from rowmesh._support.files.manifest import Manifest
from rowmesh.data.events import Sequences
from rowmesh.data.events.sequences import SEQUENCES, SplitName
from rowmesh.data.prepared import SPLITS, Split, Table
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.run.sequence.options import SequenceOptions

ITEM, SCORED = "item", "scored"
"""Features of the table of items: the events of users, and the items that they are compared with."""


@dataclass(frozen=True, eq=False)
class SequenceData:
    """Prepared events, as a run reads them.

    Attributes:
        sequences: the events.
        side: columns that are read beside the items, each a feature with a table of its own.
    """

    sequences: Sequences
    side: tuple[str, ...] = ()

    @staticmethod
    def open(folder: str | Path, options: SequenceOptions, *, verify: bool = True) -> SequenceData:
        """Maps what `rowmesh data prepare` wrote of an event table, with the side columns that the model reads.

        Raises:
            DataError: it is not there, damaged, or of samples with labels; or items have the same raw id.
            ConfigurationError: there is no such column, or its name is taken.
        """
        manifest = Manifest.read(Path(folder))
        if manifest is not None and manifest.kind != SEQUENCES:
            raise DataError(
                f"{folder} holds {manifest.kind}, and a sequence model needs {SEQUENCES}; prepare an event table, as "
                "rowmesh data prepare ratings.csv --schema movielens-csv does"
            )
        sequences = Sequences.open(folder, verify=verify)
        side = tuple(sequences.side) if options.side is None else tuple(options.side)
        for name in side:
            if name not in sequences.side:
                known = f"only: {', '.join(sequences.side)}" if sequences.side else "and no other"
                raise ConfigurationError(
                    f"model.options.side: {folder} has no side column {name!r}, {known}; name it as `side` in the "
                    "schema, and prepare the data again"
                )
            if name in (ITEM, SCORED):
                raise ConfigurationError(
                    f"model.options.side: a side column cannot be called {name!r}, as the items are; leave it out, or "
                    "rename the column"
                )
        return SequenceData(sequences.with_raw_ids() if options.item_ids == "raw" else sequences, side)

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
        """The features of the items' table, and the side columns."""
        return (ITEM, SCORED, *self.side)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables of the items and of each side column."""
        return tuple(self.table(name) for name in (ITEM, *self.side))

    @property
    def splits(self) -> dict[str, Split]:
        """The splits in which something is predicted, with their number of users."""
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
        """That of the items, or of a side column."""
        name = self.table_of(name)
        count = self.sequences.num_items if name == ITEM else self.sequences.num_side[name]
        return Table(name=name, num_rows=count, multi_hot=True, num_distinct=count, rare_share={})

    def table_of(self, feature: str) -> str:
        """That of the items, or the column's own."""
        return ITEM if feature in (ITEM, SCORED) else feature

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

"""TableData: what tables, placement, checkpoints and reports need to know of the data of a run, whatever its task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rowmesh.data.prepared import Split, Table


class TableData(Protocol):
    """Data that say which tables they need: `Prepared` of clicks, `SequenceData` of events, or `RawData`."""

    @property
    def folder(self) -> Path:
        """Where they lie."""
        ...

    @property
    def place(self) -> str:
        """Where they are, for people and for what a run leaves."""
        ...

    @property
    def identity(self) -> str:
        """A digest of what they are, the same for copies."""
        ...

    @property
    def verification(self) -> str:
        """Why what is read is not verified, in words; "" where it is."""
        ...

    @property
    def features(self) -> tuple[str, ...]:
        """Names of what is looked up."""
        ...

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that the data need, each with facts about its ids."""
        ...

    @property
    def splits(self) -> Mapping[str, Split]:
        """The splits of the data, by name."""
        ...

    def table(self, name: str) -> Table:
        """The table of a feature."""
        ...

    def table_of(self, feature: str) -> str:
        """The feature after which the table of a feature is named."""
        ...

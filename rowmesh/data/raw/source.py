"""Source: where raw rows come from, in one order that every rank sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rowmesh.data.quarantine import BadRows
from rowmesh.data.source import RawTable

Position = Mapping[str, Any]
"""A place between two rows of a source, in plain values."""


class Chunk(Protocol):
    """Some rows of a source, one after the other, not parsed yet.

    Attributes:
        name: the file or queue, for messages.
    """

    name: str

    def __len__(self) -> int:
        """How many rows there are, those that cannot be used included."""
        ...

    def tables(self, first: int, end: int, quarantine: BadRows) -> Iterator[RawTable]:
        """The rows from `first` to before `end`; those that do not parse go to the quarantine."""
        ...

    def position(self, rows: int) -> Position:
        """The place after so many rows of the chunk."""
        ...


class Source(Protocol):
    """Rows in one order, which is the same on every rank and whenever it is read: a folder of files, or a queue.

    Rows that were read once must stay at the same place: every rank reads them again, and so does a resumed run.
    """

    @property
    def multi_hot(self) -> tuple[bool, ...]:
        """By categorical feature, whether rows have lists of ids; known with the first chunk, on every rank alike."""
        ...

    def chunks(self, position: Position | None) -> Iterator[Chunk | None]:
        """Chunks from a place on, or from the start; None while there are no more rows yet.

        The iterator ends where no more rows will come.

        Raises:
            DataError: what was there at the position has gone, or rows cannot be read.
        """
        ...

"""Target: a place where generations are published, and what readers get from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rowmesh.errors import StoreError
from rowmesh.publish.generation import Generation, Part


def closed(name: str) -> StoreError:
    """The error of a look-up in closed rows: "not found" would read as an unknown id."""
    return StoreError(
        f"{name} was closed; look up before its reader is closed, and a pinned generation within its "
        "`with reader.pin()`"
    )


class PartWriter(Protocol):
    """A writer of one rank's part of a generation."""

    def rows(self, table: str, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Writes ids, int64 `[N]`, with vectors, float32 `[N, D]`; may be called again with other ids."""
        ...

    def deleted(self, table: str, ids: np.ndarray) -> None:
        """Says that ids, int64 `[N]`, are gone."""
        ...

    def close(self) -> Part:
        """Returns, when all is safe in the target, what was written: readers compare with it what they read."""
        ...


class Rows(Protocol):
    """The rows of a generation and of those that it changes."""

    def look_up(self, table: str, ids: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """Reads vectors.

        Args:
            table: its name.
            ids: int64 `[N]`, distinct.
            vectors: float32 `[N, D]` out; those not found stay as they were.

        Returns:
            bool `[N]`, whether each was found.

        Raises:
            StoreError: the generation was removed meanwhile, or lost rows, or these rows were closed.
            DataError: what is read is not what was written.
        """
        ...

    def close(self) -> None:
        """Frees what this holds, when no thread looks up; may be called again."""
        ...


class Target(Protocol):
    """Generations by number. Readers see a generation only once the pointer names it.

    Attributes:
        name: for errors; without a password.
    """

    name: str

    def newest(self) -> bytes | None:
        """The contents of the pointer to the newest generation; None before the first."""
        ...

    def manifest(self, number: int) -> bytes | None:
        """The manifest of a generation; None where it is gone."""
        ...

    def begin(self, number: int) -> None:
        """Removes what a crash left of a generation, and makes room for it. On rank 0, before any part.

        Raises:
            StoreError: the place, or that of the generation, has something that rowmesh did not publish.
        """
        ...

    def part(self, number: int, part: int, tables: dict[str, int]) -> PartWriter:
        """Begins a rank's part; `tables` have their dimensions."""
        ...

    def write_network(self, number: int, state: bytes) -> None:
        """Writes the network."""
        ...

    def publish(self, generation: Generation) -> None:
        """Makes a generation the newest, at once, when all that it has is safe.

        Raises:
            StoreError: the target has not all rows that the parts say.
        """
        ...

    def numbers(self) -> list[int]:
        """All generations that rowmesh made and that are there, also unfinished ones; ascending."""
        ...

    def remove(self, number: int) -> None:
        """Removes a generation, and nothing that rowmesh did not write."""
        ...

    def network(self, number: int) -> bytes:
        """The network of a generation."""
        ...

    def network_place(self, number: int) -> str:
        """The file or key that has the network of a generation, for messages."""
        ...

    def open_rows(self, chain: Sequence[Generation]) -> Rows:
        """The rows of a generation.

        Args:
            chain: it, and those that it changes, the newest first.

        Raises:
            StoreError: one was removed meanwhile, or has lost rows.
            DataError: one is damaged.
        """
        ...

    def close(self) -> None:
        """Frees what this holds."""
        ...

"""Target: a place where generations are published, and what readers get from there."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rowmesh.errors import StoreError
from rowmesh.publish.generation import Generation


def closed(name: str) -> StoreError:
    """What a look-up in rows that were closed raises: not found would read as unknown."""
    return StoreError(
        f"{name} was closed; look up before its reader is closed, and a pinned generation within its "
        "`with reader.pin()`"
    )


class PartWriter(Protocol):
    """What one rank writes of a generation."""

    def rows(self, table: str, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Writes ids, int64 `[N]`, with vectors, float32 `[N, D]`; may be called again with other ids."""
        ...

    def deleted(self, table: str, ids: np.ndarray) -> None:
        """Says that ids, int64 `[N]`, are gone."""
        ...

    def close(self) -> None:
        """Returns when all is safe in the target."""
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
            StoreError: the generation was removed meanwhile, or these rows were closed.
        """
        ...

    def close(self) -> None:
        """Frees what this holds, when no thread looks up; may be called again."""
        ...


class Target(Protocol):
    """Generations by number. What is not yet in the pointer is invisible to readers.

    Attributes:
        name: for errors; without a password.
    """

    name: str

    def newest(self) -> bytes | None:
        """What the pointer to the newest generation has; None before the first."""
        ...

    def manifest(self, number: int) -> bytes | None:
        """What was published as a generation; None where it is gone."""
        ...

    def begin(self, number: int) -> None:
        """Removes what a crash left of a generation, and makes room for it. On rank 0, before any part."""
        ...

    def part(self, number: int, part: int, tables: dict[str, int]) -> PartWriter:
        """Begins a rank's part; `tables` have their dimensions."""
        ...

    def write_network(self, number: int, state: bytes) -> None:
        """Writes the network."""
        ...

    def publish(self, number: int, manifest: bytes) -> None:
        """Makes a generation the newest, at once, when all that it has is safe."""
        ...

    def numbers(self) -> list[int]:
        """All generations that are there, also unfinished ones; ascending."""
        ...

    def remove(self, number: int) -> None:
        """Removes a generation."""
        ...

    def network(self, number: int) -> bytes:
        """The network of a generation."""
        ...

    def open_rows(self, generation: Generation) -> Rows:
        """The rows of a generation.

        Raises:
            StoreError: it was removed meanwhile.
        """
        ...

    def close(self) -> None:
        """Frees what this holds."""
        ...

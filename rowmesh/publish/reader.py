"""PublishedReader: looks ids up in the newest generation, tables and network of one step."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import torch

from rowmesh.errors import ConfigurationError, DataError, StoreError
from rowmesh.ops.initialize.cpu import STREAM, initialize_slots
from rowmesh.publish.generation import Generation, PublishedTable
from rowmesh.publish.target import Rows, Target
from rowmesh.tables.dynamic import Missing
from rowmesh.tables.initializer import table_key

_TRIES = 5  # a generation may be removed between finding it and opening it


class PublishedReader:
    """A generation, until `refresh` takes a newer one. Any number of readers, beside the publisher.

    Args:
        target: where generations are published; see `open_target`.
        missing: what unknown ids read, in place of what the tables say.

    Attributes:
        generation: which one this is: number, step and tables.

    Raises:
        StoreError: nothing is published yet, or the store does not answer.
    """

    def __init__(self, target: Target, *, missing: Missing | None = None) -> None:
        if missing is not None and missing not in get_args(Missing):
            raise ConfigurationError(f"missing must be one of {', '.join(get_args(Missing))}, got {missing!r}")
        self._target, self._missing = target, missing
        self.generation, self._rows, self._network = self._open()

    def _open(self) -> tuple[Generation, Rows, bytes]:
        for left in reversed(range(_TRIES)):
            newest = self._target.newest()
            if newest is None:
                raise StoreError(f"nothing is published in {self._target.name} yet")
            generation = Generation.read(newest, self._target.name)
            try:
                network = self._target.network(generation.number)
                return generation, self._target.open_rows(generation), network
            except StoreError:
                again = self._target.newest()
                if not left or again is None or Generation.read(again, self._target.name) == generation:
                    raise
        raise AssertionError

    def refresh(self) -> bool:
        """Takes the newest generation; returns whether it is another one. On an error this stays as it was."""
        newest = self._target.newest()
        if newest is not None and Generation.read(newest, self._target.name) == self.generation:
            return False
        generation, rows, network = self._open()
        self._rows.close()
        self.generation, self._rows, self._network = generation, rows, network
        return True

    def network(self) -> Mapping[str, Any]:
        """The network's `state_dict()`, on the CPU."""
        return torch.load(io.BytesIO(self._network), map_location="cpu", weights_only=True)

    def look_up(self, table: str, ids: np.ndarray) -> np.ndarray:
        """The vectors of ids.

        Args:
            table: its name.
            ids: int64 `[N]`; may repeat.

        Returns:
            float32 `[N, D]`.

        Raises:
            ConfigurationError: there is no such table.
            DataError: an id is unknown, where that is an error; or ids are not int64 `[N]`.
            StoreError: the generation was removed meanwhile, and `refresh` finds a newer one; or the store is away.
        """
        if table not in self.generation.tables:
            raise ConfigurationError(
                f"there is no published table {table!r}; there are {sorted(self.generation.tables)}"
            )
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise DataError(f"ids of table {table!r} must be int64 [N], got {ids.dtype} {list(ids.shape)}")
        about = self.generation.tables[table]
        distinct, inverse = np.unique(ids, return_inverse=True)
        vectors = np.zeros((len(distinct), about.dim), np.float32)
        found = self._rows.look_up(table, distinct, vectors)
        if not found.all():
            vectors[~found] = self._unknown(table, about, distinct[~found])
        return vectors[inverse]

    def _unknown(self, table: str, about: PublishedTable, ids: np.ndarray) -> np.ndarray:
        missing = self._missing or about.missing
        if missing == "error":
            raise DataError(
                f"table {table!r} of generation {self.generation.number} does not know {len(ids)} of the ids, the "
                f'first is {ids[0]}; correct the data, or let unknown ids read missing="initial" or "zero"'
            )
        vectors = torch.zeros(len(ids), about.dim)
        if missing == "initial":
            parameters = about.initializer.parameters(1)
            streams = np.array([(table_key(about.seed, table), *parameters)], STREAM)
            places, pieces = np.arange(len(ids), dtype=np.uint32), np.array([(0, 0, 1, 0)], np.int64)
            initialize_slots(vectors, places, np.ascontiguousarray(ids), pieces, streams, about.initializer.name)
        return vectors.numpy()

    def close(self) -> None:
        """Frees what this holds."""
        self._rows.close()

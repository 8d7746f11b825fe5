"""PinnedGeneration: tables and network of one step, to read from."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from rowmesh.errors import ConfigurationError, DataError, StoreError
from rowmesh.ops.initialize.cpu import STREAM, initialize_slots
from rowmesh.publish.generation import Generation, PublishedTable
from rowmesh.publish.target import Rows
from rowmesh.tables.dynamic.spec import Missing
from rowmesh.tables.initializer import table_key

_IDS = "int64 [N]: a list or a NumPy array of whole numbers"


@dataclass(frozen=True, kw_only=True, eq=False)
class PinnedGeneration:
    """One generation, whatever a reader refreshes to meanwhile; see `PublishedReader.pin`. Any number of threads.

    Attributes:
        generation: which one this is: number, step and tables.
        rows: of its tables.
        state: its network, as it was published.
        missing: what unknown ids read, in place of what the tables say.
    """

    generation: Generation
    rows: Rows = field(repr=False)
    state: bytes = field(repr=False)
    missing: Missing | None

    def network(self) -> Mapping[str, Any]:
        """The network's `state_dict()`, on the CPU.

        Raises:
            StoreError: it is damaged.
        """
        try:
            state = torch.load(io.BytesIO(self.state), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds on damaged files
            raise StoreError(_damaged_network(str(error) or type(error).__name__)) from None
        if not isinstance(state, Mapping):
            raise StoreError(_damaged_network(f"it holds {type(state).__name__}, no state dictionary"))
        return state

    def look_up(self, table: str, ids: ArrayLike) -> np.ndarray:
        """The vectors of ids; see `PublishedReader.look_up`."""
        if table not in self.generation.tables:
            raise ConfigurationError(
                f"there is no published table {table!r}; there are {sorted(self.generation.tables)}"
            )
        wanted = _int64(table, ids)
        about = self.generation.tables[table]
        distinct, inverse = np.unique(wanted, return_inverse=True)
        vectors = np.zeros((len(distinct), about.dim), np.float32)
        found = self.rows.look_up(table, distinct, vectors)
        if not found.all():
            vectors[~found] = self._unknown(table, about, distinct[~found])
        return vectors[inverse]

    def _unknown(self, table: str, about: PublishedTable, ids: np.ndarray) -> np.ndarray:
        missing = self.missing or about.missing
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


def _int64(table: str, ids: ArrayLike) -> NDArray[np.int64]:
    """Ids as they are looked up; raises DataError where they are no whole numbers `[N]`, or too large."""
    try:
        given = np.asarray(ids)
    except (TypeError, ValueError, RuntimeError):  # of lists of unlike lengths, or a tensor on a GPU
        raise DataError(f"ids of table {table!r} must be {_IDS}, got {type(ids).__name__}") from None
    if given.shape == (0,) and not hasattr(ids, "dtype"):  # [] says nothing of what it would hold
        return np.empty(0, np.int64)
    if given.dtype.kind not in "iu" or given.ndim != 1:
        raise DataError(f"ids of table {table!r} must be {_IDS}, got {given.dtype} {list(given.shape)}")
    if given.dtype == np.uint64 and len(given) and given.max() > np.iinfo(np.int64).max:
        raise DataError(f"ids of table {table!r} must be {_IDS}, got {given.max()}, which int64 does not hold")
    return given.astype(np.int64, copy=False)


def _damaged_network(why: str) -> str:
    return f"the published network cannot be read: {why.splitlines()[0]}; the next generation replaces it"

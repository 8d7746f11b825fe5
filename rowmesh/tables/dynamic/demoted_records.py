"""The demoted records of a dynamic table, as arrays to be saved by logical shard, and from such arrays again.

They are read from the store some at a time, in the order in which they were demoted where the store has a limit, as
that decides who is forgotten next. A checkpoint has them apart from the ids in fast memory, so that any store reads
what another one had. An increment has the records that were put into the store since its parent, and the ids of those
that left it. Where there is a limit, those that were put are the last of the order: the others keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rowmesh.tables.dynamic.demoted import Demoted
from rowmesh.tables.dynamic.saved_shards import SavedShards
from rowmesh.tables.dynamic.stored_changes import Touched
from rowmesh.tables.dynamic.stored_records import StoredRecords
from rowmesh.tables.dynamic.stores import FrozenStore

PREFIX = "demoted_"
SIZES, IDS, FACTS, REMOVED = "demoted_shards", "demoted_ids", "demoted_facts", "demoted_removed"
"""int64 `[S]`: how many records each shard has; `[M]`: their ids, shard by shard; `[M, 3]`: last steps + 1, counts and
frequencies. Rows and states have the same names as those in fast memory, after `PREFIX`. In an increment `SIZES` is
`[S, 3]`: records that were put, those that left, and how many there are in all; and `REMOVED` has the ids of those that
left."""
CHUNK_RECORDS = 1 << 14
"""Records that are in memory at a time."""


class DemotedRows:
    """The records of some ids, read from the store when one of their parts is first asked for.

    Args:
        stored: has them.
        ids: int64 `[n]`.

    Attributes:
        rows: the ids.
    """

    def __init__(self, stored: StoredRecords, ids: np.ndarray) -> None:
        self.rows, self._stored = ids, stored
        self._read: dict[str, Tensor] | None = None

    @property
    def values(self) -> Tensor:
        """`[n, D]`."""
        return self._parts["values"]

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Optimizer state by name, and "facts"."""
        return {name: tensor for name, tensor in self._parts.items() if name != "values"}

    @property
    def _parts(self) -> dict[str, Tensor]:
        if self._read is None:
            values, state, facts = self._stored.read(self.rows)
            self._read = {"values": values, "facts": torch.from_numpy(facts), **state}
        return self._read

    def forget(self) -> None:
        """Forgets the records that were read."""
        self._read = None


class DemotedRecords:
    """All that one rank has demoted at one moment, when nothing waited to be flushed, or what of it changed.

    Args:
        stored: where it is.
        frozen: what of a store is closed with this, where steps go on meanwhile.
        touched: what is wanted; None: all.
    """

    def __init__(
        self, stored: StoredRecords, frozen: FrozenStore | None = None, touched: Touched | None = None
    ) -> None:
        self._stored, self._frozen, self._touched = stored, frozen, touched

    @cached_property
    def _by_shard(self) -> list[np.ndarray]:
        return self._stored.ids_by_shard() if self._touched is None else self._touched.put

    @cached_property
    def ids(self) -> np.ndarray:
        """Whose records are wanted, shard by shard."""
        return np.concatenate([np.empty(0, np.int64), *self._by_shard])

    @property
    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Which there are."""
        sizes = np.array([len(ids) for ids in self._by_shard], np.int64)
        if self._touched is not None:
            gone = self._touched.gone
            sizes = np.stack([sizes, [len(ids) for ids in gone], self._touched.num_stored], axis=1)
            yield REMOVED, np.concatenate([np.empty(0, np.int64), *gone])
        yield SIZES, sizes
        yield IDS, self.ids

    @property
    def gone(self) -> np.ndarray:
        """The ids whose records left the store, where what changed is wanted."""
        return np.concatenate([np.empty(0, np.int64), *(self._touched.gone if self._touched else ())])

    @property
    def rows(self) -> Sequence[DemotedRows]:
        """The records in the order of the ids; one piece at least."""
        cuts = range(0, max(len(self.ids), 1), CHUNK_RECORDS)
        return [DemotedRows(self._stored, self.ids[first : first + CHUNK_RECORDS]) for first in cuts]

    def close(self) -> None:
        """Steps cost nothing more; may be called again."""
        if self._frozen is not None:
            self._frozen.close()


def load(demoted: Demoted, parts: Sequence[SavedShards], states: Sequence[str]) -> None:
    """Fills an empty store with what was saved.

    Args:
        demoted: of some shards.
        parts: of the table; each shard is in one of them.
        states: of the optimizer, to be read too; others begin as those of new rows.

    Raises:
        StoreError: the store does not answer; names it.
    """
    for part in parts:
        here = [number for number, shard in enumerate(part.shards) if shard in demoted.shards]
        if not here or not part.num_demoted:
            continue
        ends = np.concatenate([[0], part.read(SIZES, slice(None)).numpy().cumsum()])
        for number in here:
            last = int(ends[number + 1])
            for first in range(int(ends[number]), last, CHUNK_RECORDS):
                at = slice(first, min(first + CHUNK_RECORDS, last))
                rows = {name: part.read(PREFIX + name, at) for name in ("values", *states)}
                ids, facts = (part.read(kind, at).numpy() for kind in (IDS, FACTS))
                demoted.write(ids, rows.pop("values"), rows, facts)

"""Records: what a dynamic table knows on this rank, as arrays to be saved, and from such arrays again.

A logical shard is the same whatever the number of ranks; so is what is saved of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rowmesh.dynamic.layout import rules_of
from rowmesh.dynamic.owned import OwnedTable
from rowmesh.dynamic.state import ShardState
from rowmesh.tables import TableSpec
from rowmesh.tables.dense import DenseArena

OF_IDS = ("ids", "counts", "last_steps", "scores")
OF_CANDIDATES = ("candidate_ids", "candidate_counts")
SIZES, SKETCH = "shards", "sketch"
"""int64 `[S, 4]`: how many ids and candidates each shard has, its step and its window; and the sketches of shards,
where there are such."""
CHUNK_SHARDS = 16
"""Shards whose rows are copied at a time."""

Read = Callable[[str, slice], Tensor]
"""Some elements of what was saved of a kind."""


class ShardRows:
    """The rows and states of some shards: copies, made when they are asked for.

    Attributes:
        rows: int64 `[n]`, the ids.
        slots: int64 `[n]`, where their rows are in the arena.
    """

    def __init__(self, arena: DenseArena, ids: np.ndarray, slots: np.ndarray) -> None:
        self.rows, self.slots, self._arena, self._slots = ids, slots, arena, torch.from_numpy(slots)

    @property
    def values(self) -> Tensor:
        """`[n, D]`."""
        return self._arena.rows[self._slots]

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Optimizer state by name."""
        return {name: tensor[self._slots] for name, tensor in self._arena.state.items()}

    def forget(self) -> None:
        """No-op: nothing is kept."""


class Records:
    """Of one table on one rank that has some of its shards.

    Args:
        table: as `framed` gives it.
        owned: what this rank has of it.
        arena: where the rows are.
        step: how many batches were opened for training.
        is_first: whether this is the replica that is saved.

    Attributes:
        shards: which ones.
        arena: where the rows are.
    """

    def __init__(
        self, table: TableSpec, owned: OwnedTable, arena: DenseArena, *, step: int = 0, is_first: bool = True
    ) -> None:
        self._table, self._owned, self.arena, self.shards = table, owned, arena, owned.shards.shards
        self.step, self.is_first = step, is_first

    @cached_property
    def _states(self) -> list[ShardState]:
        return [self._owned.shards.state_of(shard) for shard in self.shards]

    @property
    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """All but rows and their states, kind by kind, shard by shard."""
        states = self._states
        sizes = [[len(state.ids), len(state.candidate_ids), state.step, state.window] for state in states]
        yield SIZES, np.array(sizes, np.int64).reshape(-1, 4)
        for kind in (*OF_IDS, *OF_CANDIDATES):
            yield kind, np.concatenate([getattr(state, kind) for state in states])
        if rules_of(self._table).sketch_width:
            yield SKETCH, np.stack([state.sketch for state in states])

    @property
    def rows(self) -> list[ShardRows]:
        """The rows in the order of the ids."""
        pieces = []
        for first in range(0, len(self._states), CHUNK_SHARDS):
            states = self._states[first : first + CHUNK_SHARDS]
            ids, frames = (np.concatenate([getattr(state, kind) for state in states]) for kind in ("ids", "frames"))
            pieces.append(ShardRows(self.arena, ids, self._owned.slots(frames)))
        return pieces

    def load(self, parts: Sequence[tuple[range, Read]], states: Sequence[str]) -> None:
        """Replaces everything by what was saved.

        Args:
            parts: the shards that each part has, and what reads it.
            states: of the optimizer, to be read too; others begin as those of new rows.
        """
        found = {shard: part for part in parts for shard in part[0] if shard in self.shards}
        places = {}
        saved = [self._state(shard, *found[shard], places) for shard in self.shards]
        for shard, state, slots in zip(self.shards, saved, self._owned.load(saved), strict=True):
            if not len(slots):
                continue
            self._owned.start(slots, state.ids)
            read, at = found[shard][1], places[shard]
            rows = {name: read(name, at) for name in ("values", *states)}
            self.arena.write_rows(slots, rows.pop("values"), rows)

    def _state(self, shard: int, shards: range, read: Read, places: dict[int, slice]) -> ShardState:
        sizes = read(SIZES, slice(None)).numpy()
        number = shard - shards.start
        before = sizes[:number, :2].sum(axis=0).tolist()
        num_ids, num_candidates, step, window = sizes[number].tolist()
        of_ids = slice(before[0], before[0] + num_ids)
        of_candidates = slice(before[1], before[1] + num_candidates)
        places[shard] = of_ids
        columns = {kind: read(kind, of_ids).numpy() for kind in OF_IDS}
        columns |= {kind: read(kind, of_candidates).numpy() for kind in OF_CANDIDATES}
        sketch = np.zeros((0, 0), np.int64)
        if rules_of(self._table).sketch_width:
            sketch = read(SKETCH, slice(number, number + 1)).numpy()[0]
        return ShardState(**columns, frames=np.empty(0, np.int64), sketch=sketch, step=step, window=window)


def facts_of(table: TableSpec) -> dict[str, int | str]:
    """The rules on which what a table knows depends, in plain values; two tables with other ones know other ids."""
    rules = rules_of(table)
    names = ("capacity", "admit_after", "sketch_width", "sketch_depth", "window_steps", "eviction", "decay_steps")
    return {"shards": rules.num_shards, **{name: getattr(rules, name) for name in (*names, "ttl_steps")}}

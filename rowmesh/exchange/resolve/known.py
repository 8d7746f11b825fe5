"""Known ids of a dynamic table: their rows on this rank, and statistics of any ids."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from rowmesh._support.counters import CommonCounters
from rowmesh.exchange.resolve.asked import DynamicTable, message_of
from rowmesh.mesh.channel import Channel
from rowmesh.tables import RowStore, TableSpec
from rowmesh.tables.dense import compute_dtype
from rowmesh.tables.dynamic.owned import OwnedTable
from rowmesh.tables.dynamic.state import Statistics

_DOING = "asking for statistics of ids"


@dataclass(frozen=True)
class KnownRows:
    """The rows of the ids that a dynamic table knows on this rank: copies, by shard, then by id.

    Attributes:
        ids: int64 `[n]`.
        values: `[n, D]`.
        state: optimizer state by name, `[n, D]` or `[n]`.
        counts: int64 `[n]`: occurrences since the first of those that led to admission.
        last_steps: int64 `[n]`, of the last sighting.
        scores: int64 `[n]`: as in `Statistics`, of the last sighting.
    """

    ids: Tensor
    values: Tensor
    state: dict[str, Tensor]
    counts: Tensor
    last_steps: Tensor
    scores: Tensor


def known_rows(table: TableSpec, owned: OwnedTable | None, arena: RowStore) -> KnownRows:
    """The known rows of one table; `owned` is None where this rank has no shard."""
    states = [] if owned is None else [owned.shards.state_of(shard) for shard in owned.shards.shards]
    none = np.empty(0, np.int64)
    columns = {
        name: np.concatenate([none, *(getattr(state, name) for state in states)])
        for name in ("ids", "frames", "counts", "last_steps", "scores")
    }
    frames = columns.pop("frames")
    if owned is None:
        values, state = torch.empty(0, table.dim, dtype=table.dtype), no_state(table)
    else:
        values, state = arena.read_rows(owned.slots(frames))
    numbers = {name: torch.from_numpy(column) for name, column in columns.items()}
    return KnownRows(values=values, state=state, **numbers)


def no_state(table: TableSpec) -> dict[str, Tensor]:
    """Optimizer state of no rows, by name."""
    shapes = {"row": (0,), "element": (0, table.dim)}
    dtype = compute_dtype(table.dtype)
    return {name: torch.empty(shapes[extent], dtype=dtype) for name, extent in table.optimizer.state.items()}


def ask_statistics(table: DynamicTable, ids: np.ndarray, channel: Channel, rank: int) -> Statistics:
    """Statistics of ids, which are in any order, from their owners. Collective.

    Args:
        table: which.
        ids: int64 `[N]` of this rank.
        channel: between all ranks.
        rank: this one.
    """
    asked, counters, names = table.ask(ids), CommonCounters(), [field.name for field in fields(Statistics)]
    replica = table.grid.place(rank)[0]
    sizes = [0] * channel.size
    for member, owner in enumerate(table.grid.groups[replica]):
        sizes[owner] = int(asked.bounds[member + 1] - asked.bounds[member])
    own = torch.tensor(sizes).unsqueeze(1)
    sizes_in = channel.exchange_equal(own, counters, _DOING).flatten().tolist()
    # Owners of a replica group stand in the order of its ranks, and so do their parts of what is asked.
    received = channel.post(message_of(asked.ids), sizes, sizes_in, counters, _DOING).wait().numpy()
    answer = np.zeros((len(received), len(names)), np.int64)
    if table.owned is not None:
        found = table.owned.statistics(received)
        answer = np.stack([getattr(found, name).astype(np.int64) for name in names], axis=1)
    came = channel.post(message_of(answer), sizes_in, sizes, counters, _DOING).wait().numpy()
    columns = came[asked.inverse].T
    return Statistics(columns[0].astype(bool), *(np.ascontiguousarray(column) for column in columns[1:]))

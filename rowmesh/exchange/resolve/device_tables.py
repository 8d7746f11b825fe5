"""DeviceTables: the dynamic tables of a rank whose indexes are on its device.

A table that knows all ids of a batch opens the step there; the host learns how many they were. For the others
the host gets the ids that are unknown, decides, writes the rows of new ids, and tells the device. For a table with
hooks, which are told of all ids, it gets all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowmesh.errors import RowmeshError
from rowmesh.mesh.plain import PlainError, error_to_plain
from rowmesh.ops.dynamic_index.device import DeviceIndex, DeviceIndexes, LookedUp
from rowmesh.tables import TableSpec
from rowmesh.tables.dynamic.layout import num_used, rules_of
from rowmesh.tables.dynamic.owned import OwnedTable
from rowmesh.tables.dynamic.shards import shape_of
from rowmesh.tables.dynamic.spec import Dynamic

logger = logging.getLogger(__name__)


@dataclass
class DeviceAsked:
    """All ids of a batch of these tables.

    Attributes:
        ids: int64 `[N]`, on the host or the device, of one table after the other.
        bounds: where those of each begin, and where the last one's end.
        frames: int64 `[N]` on the device, once they are found.
    """

    ids: Tensor
    bounds: Sequence[int]
    frames: Tensor | None = None

    def answer(self, frames: Tensor) -> None:
        """Takes the frames that were found."""
        self.frames = frames


def make_indexes(
    tables: Sequence[tuple[TableSpec, range]], device: torch.device, world_size: int
) -> dict[str, DeviceIndex]:
    """Indexes on a device, by table, of those that may have one; says where all are.

    Args:
        tables: all dynamic ones of this rank, as `framed` gives them, and their shards here.
        device: where their rows are.
        world_size: W.

    Raises:
        MemoryError: the device has no room.
    """
    reasons = {table.name: _reason_for_host(rules_of(table), world_size) for table, _ in tables}
    here = [(table, shards) for table, shards in tables if not reasons[table.name]]
    for reason in dict.fromkeys(reasons.values()):
        names = ", ".join(name for name, other in reasons.items() if other == reason)
        where = f"in the host's memory, {reason}" if reason else f"on {device}"
        logger.info("index of dynamic tables %s: %s", names, where)
    if not here:
        return {}
    shapes = [
        shape_of(table.name, rules_of(table), shards, num_used(rules_of(table), shards)) for table, shards in here
    ]
    try:
        indexes = DeviceIndexes(shapes, device)
    except torch.OutOfMemoryError as error:
        names = [table.name for table, _ in here]
        raise MemoryError(f"index of dynamic tables {names} on {device}: {error}") from error
    return dict(zip((table.name for table, _ in here), indexes.tables, strict=True))


def _reason_for_host(rules: Dynamic, world_size: int) -> str:
    """Why the index of a table is in the host's memory though its rows are on a device; empty: it is not."""
    if world_size > 1:
        return "since ranks send each other ids by way of their hosts"
    if rules.mode == "demote":
        return "since its store of demoted ids is"
    if rules.has_ttl:
        return "which notes when ids were seen for their time to live"
    return "which reads the caller's scores" if rules.eviction == "score" else ""


class DeviceTables:
    """These tables of one rank, which is alone.

    Args:
        tables: with their places among all dynamic tables, ascending.
    """

    def __init__(self, tables: Sequence[tuple[int, OwnedTable]]) -> None:
        self._tables = tables
        self._indexes: DeviceIndexes = tables[0][1].device_index.indexes

    def decide(
        self,
        asked: DeviceAsked,
        number: int,
        opens: Sequence[bool],
        step: int,
        ahead: Container[int],
        again: Sequence[bool],
    ) -> PlainError | None:
        """Finds the frames of a batch, and opens the step of those tables that train.

        Args:
            asked: the ids; gets the frames.
            number: of the batch.
            opens, step, ahead, again: see `rowmesh.exchange.resolve.owners.Owners.decide`.

        Returns:
            The error of the first table that failed; none has changed then.
        """
        found = self._indexes.look_up(asked.ids, asked.bounds)
        self._indexes.read(found)
        places = [(table, place, owned) for table, (place, owned) in enumerate(self._tables)]
        try:
            for table, place, owned in places:
                if not opens[place]:
                    self._find(table, owned, number, found, ahead, again=again[place])
            seen = {
                table: owned.check_found(found, step)
                for table, place, owned in places
                if opens[place] and found.num_unknown[table]
            }
        except RowmeshError as error:  # before any table has changed: undo is not kept here
            return error_to_plain(error)
        is_plain = [opens[place] and owned.is_plain(step) for place, owned in self._tables]
        if any(is_plain):
            self._indexes.touch(found, is_plain, step)
        for table, place, owned in places:
            if table in seen or (opens[place] and not is_plain[table]):
                owned.open_found(number, found, step, seen.get(table))
            elif opens[place]:
                owned.count_known(found.bounds[table + 1] - found.bounds[table], step)
        asked.answer(self._indexes.slots_of(found))
        return None

    def _find(
        self, table: int, owned: OwnedTable, number: int, found: LookedUp, ahead: Container[int], *, again: bool
    ) -> None:
        """Finds the frames of a table that opens no step."""
        if found.num_unknown[table] or owned.has_changed(ahead):
            owned.find_found(number, found, ahead, again=again)
        else:
            owned.counters.add_found(found.bounds[table + 1] - found.bounds[table])

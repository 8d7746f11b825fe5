"""Tiered groups: rows are brought into fast memory before they are read or updated, and held there meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from rowmesh.exchange.route import GroupExchange, Held, RouteGroup, never
from rowmesh.exchange.transport import Sources
from rowmesh.exchange.update import Update
from rowmesh.ops.merge_update import Merger, Singles
from rowmesh.ops.window import place_own
from rowmesh.tables import Lease, TieredArena


class HeldLease(Held):
    """A lease of a tiered arena."""

    def __init__(self, arena: TieredArena, lease: Lease) -> None:
        super().__init__(lease.address)
        self._arena, self._lease, self._is_changed = arena, lease, False

    def apply(self, merged: Merger, update: Update) -> None:
        """Updates the rows that are held. Takes no turn: a lease that waits for their frames may have it."""
        self._is_changed = True
        self._arena.apply(merged, self.places, update.lr, update.scaling, update.step)

    def check(self) -> None:
        """Where versions are kept: checks that rows are what their last updates left."""
        self._arena.check(self._lease)

    def release(self) -> None:
        """The rows may leave fast memory. May be called again."""
        if self._lease.is_live:
            self._arena.release(self._lease, changed=self._is_changed)


class TieredExchange(GroupExchange):
    """A group whose arena is tiered: a merged slot is in whichever frame its lease says."""

    is_tiered = True

    @property
    def tiered(self) -> TieredArena:
        """The arena."""
        return cast("TieredArena", self.arena)

    @property
    def num_places(self) -> int:
        """Frames."""
        return self.tiered.num_frames

    def hold(self, merged: Merger | Singles, may_wait: Callable[[], bool] = never) -> Held:
        """Brings rows into fast memory; blocks until they are there."""
        return HeldLease(self.tiered, self.tiered.lease(merged.merged_slots, merged.num_merged, may_wait))

    def bring_own(self, group: RouteGroup) -> None:
        """Brings the rows that a rank without others asked for."""
        sources = Sources(self)
        sources.add_own(group)
        sources.merge()
        held = self.hold(self.merger)
        group.keep(held)
        self.place_own(group, self.merger, held, 0)

    def place_own(self, group: RouteGroup, merger: Merger, held: Held, begin: int) -> None:
        """Says where the rows are that this rank asked itself for, the entries from `begin` on."""
        first, end = group.stop_bounds[self.rank], group.stop_bounds[self.rank + 1]
        workspace = group.workspace
        place_own(
            held.places, merger.heads, merger.nexts, merger.num_merged, begin, begin + end - first,
            workspace.uniques.buffer.address + 4 * first, self.arena.address, self.row_bytes,
            workspace.addresses.buffer.address,
        )  # fmt: skip

    def apply(self, merged: Merger | Singles, update: Update, part: tuple[int, int] | None = None) -> None:
        """Updates merged rows, which are brought where they are not there; in turn with those who bring others."""
        lease = self.tiered.lease(merged.merged_slots, merged.num_merged, never)
        try:
            self.tiered.apply(merged, lease.address, update.lr, update.scaling, update.step, part)
        finally:
            self.tiered.release(lease, changed=True)

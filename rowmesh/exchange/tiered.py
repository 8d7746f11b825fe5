"""Tiered groups: rows are brought into fast memory before they are read or updated, and held there meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from rowmesh.exchange.route import GroupExchange, Held, RouteGroup, never
from rowmesh.exchange.transport import Sources
from rowmesh.exchange.update import Update
from rowmesh.exchange.workspace import Outbox
from rowmesh.ops.merge_update import Merger, Singles
from rowmesh.ops.window import place_own
from rowmesh.placement import AddressMap
from rowmesh.tables import CachedArena, PinnedRows, TableGroup


class HeldPins(Held):
    """Rows that are pinned in a cache."""

    def __init__(self, pinned: PinnedRows) -> None:
        super().__init__(pinned.cache_slots.ctypes.data)
        self._pinned, self._is_changed = pinned, False

    def apply(self, merged: Merger, update: Update) -> None:
        """Updates the rows. Takes no turn: a batch that waits for their cache slots may have it."""
        self._is_changed = True
        self._pinned.apply(merged, update.lr, update.scaling, update.step)

    def check(self) -> None:
        """Where versions are kept: checks that rows are what their last updates left."""
        self._pinned.check()

    def release(self) -> None:
        """The rows may leave fast memory. May be called again."""
        self._pinned.unpin(changed=self._is_changed)


class TieredExchange(GroupExchange):
    """A group whose rows are cached: a merged slot is in whichever cache slot its pin has."""

    is_tiered = True

    def __init__(
        self, group: TableGroup, address_map: AddressMap, arena: CachedArena, make_outbox: Callable[[], Outbox]
    ) -> None:  # fmt: skip
        super().__init__(group, address_map, arena, make_outbox)
        self.tiered = arena

    @property
    def num_places(self) -> int:
        """Cache slots."""
        return self.tiered.num_cached

    def hold(self, merged: Merger | Singles, may_wait: Callable[[], bool] = never) -> Held:
        """Brings rows into fast memory; blocks until they are there."""
        return HeldPins(self.tiered.pin(merged.slots.copy(), may_wait))

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
        """Updates merged rows, which are brought where they are not there; in turn with other batches' pins."""
        pinned = self.tiered.pin(merged.slots.copy(), never)
        try:
            pinned.apply(merged, update.lr, update.scaling, update.step, part)
        finally:
            pinned.unpin(changed=True)

"""The cache table in plain Python: a dictionary, three queues, and the rules."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = 0xFFFFFFFF


class CacheTable:
    """What `rowmesh.ops.cache_table.CacheTable` does, one cache slot at a time."""

    def __init__(self, num_cache_slots: int) -> None:
        self.cache_slot_of: dict[int, int] = {}
        self.slot_of = [0] * num_cache_slots
        self.pins = [0] * num_cache_slots
        self.dirty: set[int] = set()
        self.writing: set[int] = set()
        self.free, self.clean, self.changed = list(range(num_cache_slots)), list[int](), list[int]()

    @property
    def num_pinned(self) -> int:
        """Cache slots with a pin."""
        return sum(pins > 0 for pins in self.pins)

    def pin(self, slots: Sequence[int]) -> list[int]:
        """The cache slot of each slot, pinned, or MISSING."""
        cache_slots = [self.cache_slot_of.get(slot, MISSING) for slot in slots]
        for cache_slot in cache_slots:
            if cache_slot != MISSING:
                self._pin(cache_slot)
        return cache_slots

    def assign(self, slots: Sequence[int], cache_slots: list[int]) -> list[int]:
        """Assigns cache slots to the missing; returns their positions."""
        taken = []
        for position, slot in enumerate(slots):
            if cache_slots[position] != MISSING:
                continue
            if slot in self.cache_slot_of:
                cache_slots[position] = self.cache_slot_of[slot]
                self._pin(cache_slots[position])
                continue
            if self.free:
                cache_slot = self.free.pop(0)
            else:
                cache_slot = self.clean.pop(0)
                del self.cache_slot_of[self.slot_of[cache_slot]]
            self.cache_slot_of[slot], self.slot_of[cache_slot], self.pins[cache_slot] = cache_slot, slot, 1
            cache_slots[position] = cache_slot
            taken.append(position)
        return taken

    def unpin(self, cache_slots: Sequence[int], changed: bool, retain: bool) -> list[int]:
        """Unpins; returns the cache slots that became free."""
        freed = []
        for cache_slot in cache_slots:
            if changed:
                self.dirty.add(cache_slot)
            self.pins[cache_slot] -= 1
            if self.pins[cache_slot] == 0 and cache_slot not in self.writing:
                freed += self._queue(cache_slot, retain)
        return freed

    def oldest_dirty(self, limit: int, pinned: bool) -> list[int]:
        """Cache slots to write, oldest first; with `pinned` also pinned ones."""
        cache_slots, self.changed = self.changed[:limit], self.changed[limit:]
        if pinned:
            held = [f for f, pins in enumerate(self.pins) if pins and f in self.dirty and f not in self.writing]
            cache_slots += held[: limit - len(cache_slots)]
        self.dirty -= set(cache_slots)
        self.writing |= set(cache_slots)
        return cache_slots

    def written(self, cache_slots: Sequence[int], ok: bool, retain: bool) -> list[int]:
        """Ends writing; returns the cache slots that became free."""
        freed = []
        for cache_slot in cache_slots:
            self.writing.remove(cache_slot)
            if not ok:
                self.dirty.add(cache_slot)
            if self.pins[cache_slot] == 0:
                freed += self._queue(cache_slot, retain)
        return freed

    def discard(self, cache_slots: Sequence[int]) -> None:
        """Frees what was assigned and never filled."""
        for cache_slot in cache_slots:
            self.pins[cache_slot] = 0
            del self.cache_slot_of[self.slot_of[cache_slot]]
            self.free.append(cache_slot)

    def _pin(self, cache_slot: int) -> None:
        for queue in (self.clean, self.changed):
            if cache_slot in queue:
                queue.remove(cache_slot)
        self.pins[cache_slot] += 1

    def _queue(self, cache_slot: int, retain: bool) -> list[int]:
        if cache_slot in self.dirty:
            self.changed.append(cache_slot)
        elif retain:
            self.clean.append(cache_slot)
        else:
            del self.cache_slot_of[self.slot_of[cache_slot]]
            self.free.append(cache_slot)
            return [cache_slot]
        return []

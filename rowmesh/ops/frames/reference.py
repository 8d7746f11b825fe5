"""Frames in plain Python: a dictionary, three queues, and the rules."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = 0xFFFFFFFF


class FrameTable:
    """What `rowmesh.ops.frames.FrameTable` does, one frame at a time."""

    def __init__(self, num_frames: int) -> None:
        self.frame_of: dict[int, int] = {}
        self.slot_of = [0] * num_frames
        self.pins = [0] * num_frames
        self.dirty: set[int] = set()
        self.writing: set[int] = set()
        self.free, self.clean, self.changed = list(range(num_frames)), list[int](), list[int]()

    @property
    def num_pinned(self) -> int:
        """Frames that a lease holds."""
        return sum(pins > 0 for pins in self.pins)

    def find(self, slots: Sequence[int]) -> list[int]:
        """The frame of each slot, pinned, or MISSING."""
        frames = [self.frame_of.get(slot, MISSING) for slot in slots]
        for frame in frames:
            if frame != MISSING:
                self._pin(frame)
        return frames

    def take(self, slots: Sequence[int], frames: list[int]) -> list[int]:
        """Gives frames to the missing; returns their positions."""
        taken = []
        for position, slot in enumerate(slots):
            if frames[position] != MISSING:
                continue
            if slot in self.frame_of:
                frames[position] = self.frame_of[slot]
                self._pin(frames[position])
                continue
            if self.free:
                frame = self.free.pop(0)
            else:
                frame = self.clean.pop(0)
                del self.frame_of[self.slot_of[frame]]
            self.frame_of[slot], self.slot_of[frame], self.pins[frame] = frame, slot, 1
            frames[position] = frame
            taken.append(position)
        return taken

    def release(self, frames: Sequence[int], changed: bool, retain: bool) -> list[int]:
        """Unpins; returns the frames that became free."""
        freed = []
        for frame in frames:
            if changed:
                self.dirty.add(frame)
            self.pins[frame] -= 1
            if self.pins[frame] == 0 and frame not in self.writing:
                freed += self._settle(frame, retain)
        return freed

    def oldest_dirty(self, limit: int, pinned: bool) -> list[int]:
        """Frames to write, oldest first; with `pinned` also such that leases hold."""
        frames, self.changed = self.changed[:limit], self.changed[limit:]
        if pinned:
            held = [f for f, pins in enumerate(self.pins) if pins and f in self.dirty and f not in self.writing]
            frames += held[: limit - len(frames)]
        self.dirty -= set(frames)
        self.writing |= set(frames)
        return frames

    def written(self, frames: Sequence[int], ok: bool, retain: bool) -> list[int]:
        """Ends writing; returns the frames that became free."""
        freed = []
        for frame in frames:
            self.writing.remove(frame)
            if not ok:
                self.dirty.add(frame)
            if self.pins[frame] == 0:
                freed += self._settle(frame, retain)
        return freed

    def forget(self, frames: Sequence[int]) -> None:
        """Frees frames that one lease took and did not fill."""
        for frame in frames:
            self.pins[frame] = 0
            del self.frame_of[self.slot_of[frame]]
            self.free.append(frame)

    def _pin(self, frame: int) -> None:
        for queue in (self.clean, self.changed):
            if frame in queue:
                queue.remove(frame)
        self.pins[frame] += 1

    def _settle(self, frame: int, retain: bool) -> list[int]:
        if frame in self.dirty:
            self.changed.append(frame)
        elif retain:
            self.clean.append(frame)
        else:
            del self.frame_of[self.slot_of[frame]]
            self.free.append(frame)
            return [frame]
        return []

"""Workspace: the memory of one routed batch for one group, reused from batch to batch.

A workspace is lent to a route and returns when the route is gone; as many exist as there are routes under way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from rowmesh.ops.memory import Buffer, Memory, Scratch, round_up

_numbers = itertools.count()  # outboxes are told apart for as long as the process lives


def slots_offset(world_size: int, num_segments: int) -> int:
    """Where the slots begin in the lists of an outbox, in bytes."""
    return round_up(8 * world_size * (2 * num_segments + 1), 64)


class Outbox:
    """What a rank lays out for the owners of rows: lists of slots, and the gradients of those slots.

    Lists: segment offsets int64 `[W, S + 1]`, accesses int64 `[W, S]`, slots uint32 `[U]` sorted by (owner, segment).
    Gradients: `[U, D]` in the same order. Each part grows by being made anew, which changes its generation.
    """

    def __init__(self, allocate: Callable[[int], Memory], world_size: int, num_segments: int) -> None:
        self.number = next(_numbers)
        self._allocate = allocate
        self._shape = (world_size, num_segments)
        self.slots_offset = slots_offset(world_size, num_segments)
        self.generation = 0
        self.lists: Memory = allocate(self.slots_offset + 4096)
        self.gradients: Memory = allocate(4096)
        self._map_lists()

    def _map_lists(self) -> None:
        world_size, num_segments = self._shape
        self.accesses_address = self.lists.address + 8 * world_size * (num_segments + 1)
        self.segment_offsets = self.lists.array(np.int64, world_size, num_segments + 1)
        self.accesses = self.lists.array(np.int64, world_size, num_segments, offset=8 * world_size * (num_segments + 1))

    def reserve_lists(self, num_slots: int) -> int:
        """Room for so many slots; returns their address. Contents are lost where it has to grow."""
        needed = self.slots_offset + 4 * num_slots
        if needed > self.lists.num_bytes:
            self.lists = self._allocate(needed + needed // 4)
            self.generation += 1
            self._map_lists()
        return self.lists.address + self.slots_offset

    def reserve_gradients(self, num_bytes: int) -> int:
        """Room for gradients; returns their address."""
        if num_bytes > self.gradients.num_bytes:
            self.gradients = self._allocate(num_bytes + num_bytes // 4)
            self.generation += 1
        return self.gradients.address


class Workspace:
    """Private memory of a group's part of a route, and the outbox its requests go into."""

    def __init__(self, outbox: Outbox, world_size: int) -> None:
        self.outbox = outbox
        self.reply_offsets = np.zeros(world_size + 1, np.int64)  # where the replies of each stop begin
        self.reply_address: int = self.reply_offsets.ctypes.data
        self.counts = Scratch()  # uint32 [U]: how often each unique id occurs
        self.uniques = Scratch()  # uint32 [U]: which unique id each slot of the outbox is
        self.addresses = Scratch()  # int64 [U]: where its row is
        self.pointers = Scratch()  # uint32 [U + 1]: where its cells begin
        self.cells = Scratch()  # uint32 [ids of the group]: the output positions a row goes into
        self.factors = Scratch()  # [N]: the factor of each id, where sums are weighted
        self.cursors = Scratch()  # uint32 [U]
        self.weights = Scratch()  # [ids of the group]: the factors in the order of the cells
        self.received = Scratch()  # [U, D]: rows that had to be copied here
        self.relayed = Scratch()  # rows of other nodes that any rank of this node asked this one for, as an agent
        self.requests = Scratch()  # uint32: slots that other ranks asked of this one
        self.replies = Scratch()  # rows sent to other ranks, then gradients received from them

    @property
    def num_bytes(self) -> int:
        """All memory held."""
        return held_bytes(self) + self.outbox.lists.num_bytes + self.outbox.gradients.num_bytes


def held_bytes(owner: object) -> int:
    """Bytes of the private buffers among an object's attributes, and in lists among them."""
    values = [item for value in vars(owner).values() for item in (value if isinstance(value, list) else [value])]
    return sum(value.num_bytes for value in values if isinstance(value, (Buffer, Scratch)))


def private_outbox(world_size: int, num_segments: int) -> Outbox:
    """An outbox that no other rank reads directly."""
    return Outbox(Buffer, world_size, num_segments)

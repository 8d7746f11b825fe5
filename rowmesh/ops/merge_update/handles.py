"""Handles of merged requests: distinct slots and the gradients for each, as a backend's kernels read them.

Its backend fills a handle. Everything else hands it on, and reads how many slots it has at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.memory import array_at

END = 0xFFFFFFFF
"""Stands for the entry after the last one of a chain, and for no slot."""


@dataclass(eq=False)
class HostMerged:
    """Merged requests in the host's memory; valid until what filled it is filled again.

    Attributes:
        num_merged: M, distinct slots.
        merged_slots, heads: addresses of uint32 `[M]`: the slots, and the first entry of each one's chain.
        nexts: address of uint32 `[entries]`: the entry after each, or END.
        addresses: address of int64 `[entries]`: where the gradient of an entry is.
        node_ends: address of int64 `[num_nodes]`: one past the last entry from each node.
        num_nodes: nodes that requests came from.
    """

    num_merged: int = 0
    merged_slots: int = 0
    heads: int = 0
    nexts: int = 0
    addresses: int = 0
    node_ends: int = 0
    num_nodes: int = 1

    @property
    def most_slots(self) -> int:
        """How many distinct slots there are at most, as far as is known without asking a device."""
        return self.num_merged

    @property
    def slots(self) -> np.ndarray:
        """uint32 `[M]`: the distinct slots, as a view."""
        return array_at(self.merged_slots, np.uint32, self.num_merged)

    def part(self, part: slice) -> HostMerged:
        """Some of the distinct slots that follow each other, and the gradients for each."""
        first, behind = 4 * part.start, (self.nexts, self.addresses, self.node_ends, self.num_nodes)
        return HostMerged(part.stop - part.start, self.merged_slots + first, self.heads + first, *behind)

    def at(self, slots: np.ndarray) -> HostMerged:
        """The same gradients for rows in other slots, uint32 `[M]`, which must outlive the handle."""
        assert slots.dtype == np.uint32
        assert len(slots) == self.num_merged
        return HostMerged(
            self.num_merged, slots.ctypes.data, self.heads, self.nexts, self.addresses, self.node_ends, self.num_nodes
        )


@dataclass(eq=False)
class Unsummed(HostMerged):
    """Distinct slots whose gradients nothing has summed: only `update` takes them, and sums as it changes the rows.

    Attributes:
        gradient: of the output of a look-up.
        pointers, cells, weights: addresses of the cells of each row of the look-up, as `rowmesh.ops.pool.cpu` files
            them, and of their factors, or 0.
        uniques: address of uint32 `[M]`: which of these rows each slot is.
    """

    gradient: Tensor = field(kw_only=True)
    pointers: int = field(kw_only=True)
    cells: int = field(kw_only=True)
    weights: int = field(kw_only=True)
    uniques: int = field(kw_only=True)


@dataclass(eq=False)
class UnsummedBySource(Unsummed):
    """The same, whose cells are of several sources: each is summed first, then those of a node, then the nodes' sums.

    Attributes:
        ends: int64 `[sources]`: one past the last cell of each source.
        per_node: sources of one node, which follow each other.
    """

    ends: np.ndarray = field(kw_only=True)
    per_node: int = field(kw_only=True)


@dataclass(frozen=True, eq=False)
class DeviceMerged:
    """Entries by distinct slot; everything on the device.

    Attributes:
        order: int64 `[M]`: the entries, sorted by slot, those of equal slots in order; None where they stand so.
        slots: int64 `[M]`: the distinct slots, ascending; the first `num` are valid.
        starts: int32 `[M + 1]`: where the entries of each begin in `order`; the first `num + 1` are valid. None where
            every slot has one entry.
        ranks: int32 `[M]`: one more than which distinct slot each of the sorted entries belongs to; None likewise.
        num: int32 or int64 `[1]`: distinct slots.
        most: the most entries that a slot can have, as far as is known without asking the device.
        node_ends: int64 `[nodes]`: one past the last entry from each node, or None where there is one node.
        gradients: `[M, D]` of the entries, in the order in which they were merged; None until they are known.
        cells_alignment: not 0 where `order` has, for each entry, the element of `gradients`, of any length and width,
            where its gradient begins; all are multiples of this power of two. Entries are then from one node.
        factors: `[M]`, of the type of the arithmetic, of the sorted entries: what gradients are multiplied by; or None.
    """

    order: Tensor | None
    slots: Tensor
    starts: Tensor | None
    ranks: Tensor | None
    num: Tensor
    most: int
    node_ends: Tensor | None = None
    gradients: Tensor | None = None
    cells_alignment: int = 0
    factors: Tensor | None = None

    @property
    def most_slots(self) -> int:
        """How many distinct slots there are at most, as far as is known without asking the device."""
        return self.slots.numel()

    @property
    def valid_slots(self) -> Tensor:
        """int64 `[M]`: the distinct slots, and END in the place of those that are not valid."""
        is_valid = torch.arange(self.most_slots, device=self.slots.device) < self.num
        return torch.where(is_valid, self.slots, END)

    @property
    def num_nodes(self) -> int:
        """Nodes that entries came from."""
        return 1 if self.node_ends is None else self.node_ends.numel()

    def with_gradients(self, gradients: Tensor) -> DeviceMerged:
        """The same, with the gradients of its entries."""
        return replace(self, gradients=gradients)


Merged = HostMerged | DeviceMerged

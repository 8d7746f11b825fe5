"""Tiered arena: a bounded number of a group's rows in fast memory, all of them in a backing store, on a CPU.

See [Note: leases] and [Note: what may overlap] in `rowmesh.tables.leased_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from rowmesh.errors import RowmeshError
from rowmesh.ops.frames import MISSING
from rowmesh.ops.memory import Buffer, Memory, array_at
from rowmesh.tables.arena import DenseArena, Merged
from rowmesh.tables.backing import MakeStore, MemoryStore
from rowmesh.tables.fast_rows import HostRows
from rowmesh.tables.group import TableGroup
from rowmesh.tables.leased_rows import Lease, LeasedRows


@dataclass(frozen=True)
class _InFrames:
    """Merged requests whose slots became frames."""

    merged_slots: int
    num_merged: int
    heads: int
    nexts: int
    addresses: int
    node_ends: int
    num_nodes: int

    @classmethod
    def of(cls, merged: Merged, frames: int) -> _InFrames:
        m = merged
        return cls(frames, m.num_merged, m.heads, m.nexts, m.addresses, m.node_ends, m.num_nodes)


class TieredArena(LeasedRows):
    """Rows in slots 0 … num_slots − 1 of a backing store, of which at most `num_frames` are in fast memory.

    In the fast arena rows and their state are laid out as in a `DenseArena` of `num_frames` slots, so that kernels work
    on them with frames in the place of slots.

    Args:
        group, num_slots, num_frames, make_store, options: as for `LeasedRows`.
        allocate: where the fast rows are put.

    Raises:
        ConfigurationError: `num_frames` is out of range, or the store cannot be made.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from rowmesh.tables import TableSpec, fuse
        >>> (group,) = fuse([TableSpec(name="item", num_rows=1000, dim=4)])
        >>> arena = TieredArena(group, 1000, num_frames=10)
        >>> piece = SimpleNamespace(rows=range(1000), slots=range(1000))
        >>> arena.initialize(0, [[piece]])
        >>> slots = np.array([7, 999], np.uint32)
        >>> lease = arena.lease(slots.ctypes.data, 2)
        >>> rows = arena.rows[torch.from_numpy(lease.frames.astype(np.int64))]
        >>> arena.release(lease, changed=False)
        >>> bool((rows == arena.read_rows(slots)[0]).all())
        True
        >>> arena.close()
    """

    def __init__(
        self,
        group: TableGroup,
        num_slots: int,
        num_frames: int,
        make_store: MakeStore = MemoryStore,
        allocate: Callable[[int], Memory] = Buffer,
        **options: Any,
    ) -> None:
        super().__init__(group, num_slots, num_frames, make_store, partial(HostRows, allocate=allocate), **options)

    @property
    def _arena(self) -> DenseArena:
        return cast("DenseArena", self._tier.fast.arena)

    @property
    def address(self) -> int:
        """Where frame 0 is."""
        return self._arena.address

    def lease(self, slots: int, count: int, may_wait: Callable[[], bool] = lambda: True) -> Lease:
        """Brings rows into fast memory and keeps them there: `bring`, of uint32 `[count]` at an address, copied."""
        wanted = array_at(slots, np.uint32, count).copy() if count else np.empty(0, np.uint32)
        return self.bring(wanted, may_wait)

    def frames_of(self, slots: int, count: int, frames: int) -> None:
        """Translates slots that are in live leases, in any order.

        Args:
            slots: address of uint32 `[count]`.
            count: how many.
            frames: address of uint32 `[count]`, out.

        Raises:
            RowmeshError: no lease holds one of them; names its table and row.
        """
        if count == 0:
            return
        asked, out = array_at(slots, np.uint32, count), array_at(frames, np.uint32, count)
        with self._tier.changed:
            missing = self._tier.table.look(asked, out)
            is_held = self._tier.table.is_pinned(out[out != MISSING])
        if missing or not is_held.all():
            slot = int(asked[out == MISSING][0] if missing else asked[~is_held][0])
            raise RowmeshError(f"{self._name(slot)} is used, but no live lease holds it")

    def apply(
        self, merged: Merged, frames: int, lr: float, scaling: float, step: int, part: tuple[int, int] | None = None
    ) -> None:  # fmt: skip
        """Updates the rows of merged requests in place; they are in live leases. See `DenseArena.apply`.

        Args:
            merged: distinct slots and the gradients that were sent for each.
            frames: address of uint32 `[num_merged]`, where the rows are: `Lease.address`, or from `frames_of`.
            lr, scaling, step, part: as there.

        Raises:
            RowmeshError: under `verify`, a row is not what its last update left.
        """
        if self._versions is not None:
            first, end = part or (0, merged.num_merged)
            if end > first:
                held = array_at(frames + 4 * first, np.uint32, end - first)
                slots = array_at(merged.merged_slots + 4 * first, np.uint32, end - first)
                self._check(held, slots)
                self._versions.advance(held, slots)
        self._arena.apply(_InFrames.of(merged, frames), lr, scaling, step, part)

"""Device tiered arena: a bounded number of a group's rows in a GPU's memory, all of them in a backing store.

See [Note: leases] in `rowmesh.tables.leased_rows` and [Note: copies beside the computation] in
`rowmesh.ops.streams`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.streams import Mark, Stream
from rowmesh.tables.backing import MakeStore, MemoryStore
from rowmesh.tables.device_rows import DeviceRows
from rowmesh.tables.group import TableGroup
from rowmesh.tables.leased_rows import Lease, LeasedRows

if TYPE_CHECKING:
    from rowmesh.ops.merge_update.cuda import Merged


class HeldRows:
    """A lease of rows in a device's memory, where they are or are on their way to.

    Attributes:
        frames: uint32 `[n]`, where their rows are, in the order in which they were asked for.
    """

    def __init__(self, arena: DeviceTieredArena, lease: Lease, here: Sequence[Mark]) -> None:
        self.frames, self.lease = lease.frames, lease
        self._arena, self._here = arena, here
        self._stream: Stream | None = None  # whose kernels use them

    @property
    def is_live(self) -> bool:
        """Whether they are still to be released."""
        return self.lease.is_live

    def ready(self) -> None:
        """What is launched on the current stream from now on finds the rows in their frames; the host goes on.

        Raises:
            RowmeshError: where versions are kept, a row is not what its last update left.
        """
        self.note_use()
        self._arena.fast.current().wait_for(self._here)
        self._arena.check(self.lease)

    def note_use(self) -> None:
        """The current stream uses the rows."""
        self._stream = self._arena.fast.current()

    def release(self, changed: bool = False) -> None:
        """The rows may leave fast memory, when what was launched so far has run. May be called again."""
        if not self.is_live:
            return
        if self._stream is not None:
            self._arena.fast.uses.note(self.frames, self._stream.mark())
        self._arena.release(self.lease, changed)


class DeviceTieredArena(LeasedRows):
    """Rows in slots 0 … num_slots − 1 of a backing store, of which at most `num_frames` are in a device's memory.

    Rows of the fast memory are laid out as in a `DeviceArena` of `num_frames` slots, so that kernels work on them with
    frames in the place of slots.

    Args:
        group, num_slots, num_frames, make_store, options: as for `LeasedRows`.
        device: where the fast memory is.
        streams: makes streams.

    Raises:
        ConfigurationError: `num_frames` is out of range, or the store cannot be made.
        MemoryError: the device has no room.
    """

    def __init__(
        self,
        group: TableGroup,
        num_slots: int,
        num_frames: int,
        make_store: MakeStore = MemoryStore,
        *,
        device: torch.device,
        streams: Any = Stream,
        **options: Any,
    ) -> None:
        self.device = device
        make_fast = partial(DeviceRows, device=device, streams=streams)
        super().__init__(group, num_slots, num_frames, make_store, make_fast, **options)

    @property
    def fast(self) -> DeviceRows:
        """The fast memory."""
        return cast("DeviceRows", self._tier.fast)

    @property
    def bookkeeping_bytes(self) -> int:
        """Other memory, on the host: see `LeasedRows`; and the numbers of uses."""
        return super().bookkeeping_bytes + self.fast.uses.num_bytes

    def hold(self, slots: np.ndarray, may_wait: Callable[[], bool]) -> HeldRows:
        """Begins to bring rows into fast memory, and keeps them there.

        The host waits until they are read from the store, and for frames that only have to be written back.

        Args:
            slots: uint32 `[n]`, distinct; kept as they are.
            may_wait: whether other leases may be released meanwhile.

        Raises:
            NoRoomError: the frames do not suffice.
            RowmeshError: see `LeasedRows.bring`.
        """
        return HeldRows(self, self.bring(slots, may_wait), self.fast.marks())

    def apply(self, merged: Merged, gradients: Tensor, lr: float, scaling: float, step: int) -> None:
        """Updates rows of live leases in place, on the current stream; see `DeviceArena.apply`, frames for slots."""
        self.fast.arena.apply(merged, gradients, lr, scaling, step)

    def give_up(self, held: Sequence[HeldRows]) -> None:
        """Releases leases whose rows were updated: by one update, all of them.

        Raises:
            RowmeshError: where versions are kept, a row was not what its last update left.
        """
        if self._versions is not None and held:
            for each in held:
                self.check(each.lease)
            slots, first = np.unique(np.concatenate([each.lease.slots for each in held]), return_index=True)
            self._versions.advance(np.concatenate([each.frames for each in held])[first], slots)
        for each in held:
            each.note_use()
            each.release(changed=True)

"""Snapshot of one row store: its shards, each read once, and the pre-images of rows that change before that."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh._support.faults import reach
from rowmesh._support.memory import available_bytes
from rowmesh.checkpoint.room import BLOCK_BYTES, Room
from rowmesh.errors import RowmeshError
from rowmesh.ops.memory import laid_out, laid_out_bytes, take
from rowmesh.ops.pre_images import Block, DevicePreImages, PreImages, claim, copy_all, settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rowmesh.tables import RowStore

VALUES = "values"
HOOK = "snapshot"
DEVICE_SHARE = 2
"""Pre-images take at most this part of a device's memory that is free when they begin."""

Slots = npt.NDArray[np.uint32]
ShardSlots = range | Slots


class StoreSnapshot:
    """The shards of one row store, and the pre-images of their rows.

    A row is in one of three states: not read and as it was; changed, with a pre-image; read. One lock orders them:
    `preserve` saves what is in a shard that was not read, before the update that calls it; `read` copies a shard,
    perhaps amid updates, and then marks it read and takes the pre-images of all rows that were about to change by then.

    Args:
        store: of the rows.
        room: for pre-images in the host's memory.

    Attributes:
        states: names of the optimizer states.
        may_be_ahead: whether no step waits while rows are read: not those of tiers.
        num_saved: rows whose pre-images were saved so far.
        num_bytes: of all rows and states that are read.
    """

    def __init__(self, store: RowStore, room: Room) -> None:
        self._room, self._store, self.states = room, store, tuple(store.state)
        kinds = [(rows.dtype, tuple(rows.shape[1:])) for rows in _tensors(store).values()]
        self.may_be_ahead, self._kinds = store.is_whole, kinds
        self._rows: _StoreRows = _TierRows(store, room) if not store.is_whole else _HostRows(store, room)
        if store.is_whole and not store.has_views:
            self._rows = _DeviceRows(store)
        self._lock = threading.Lock()
        self._shards: list[ShardSlots] = []
        self._expected: list[Slots] = []
        self._is_read: list[bool] = []
        self._buffer: Tensor | None = None
        self._num_due = self.num_saved = self.num_bytes = 0
        self._is_closed = False

    def bytes_of(self, num_rows: int) -> int:
        """Memory of a copy of so many rows and their states."""
        return laid_out_bytes(self._kinds, num_rows)

    def add(self, slots: ShardSlots) -> int:
        """Adds a shard, before `open` or of slots that are expected; returns its number. No other has any of them."""
        with self._lock:
            self._shards.append(slots)
            self._is_read.append(False)
            return len(self._shards) - 1

    def expect(self, slots: Slots) -> None:
        """Slots, ascending, that are added to shards when they are in order, by a thread that reads them."""
        self._expected.append(slots)

    def open(self) -> None:
        """From now on rows keep what they are."""
        due = [slots for slots in (*self._shards, *self._expected) if len(slots)]
        self._rows.open(due, max((int(slots[-1]) + 1 for slots in due), default=0))
        self._expected, self._num_due = [], sum(map(len, due))
        self.num_bytes = self.bytes_of(self._num_due)
        if due:
            self._store.watch(HOOK, self.preserve)

    def preserve(self, slots: Any, at: Any) -> None:
        """Saves the rows that are about to be updated; a `Watcher`."""
        with self._lock:
            if not self._is_closed:
                self.num_saved += self._rows.keep(slots, at)

    def read(self, shard: int, buffer: Tensor | None = None) -> Mapping[str, Tensor]:
        """The values and states of a shard, in the host's memory.

        Args:
            shard: its number.
            buffer: uint8, for them; default: one that the next such call uses too.

        Raises:
            RowmeshError: the snapshot was closed meanwhile.
        """
        slots = self._shards[shard]
        self._rows.prepare(self.bytes_of(self._num_due))
        reach("snapshot.read")
        out = {}
        if self.may_be_ahead:
            buffer = self._own_buffer() if buffer is None else buffer
            out = dict(zip((VALUES, *self.states), laid_out(buffer, self._kinds, len(slots)), strict=True))
        copied = self._rows.copy(slots, out)
        reach("snapshot.copied")
        with self._lock:
            self._raise_if_closed()
            assert not self._is_read[shard], "read once"
            self._is_read[shard] = True
            claimed = self._rows.settle(slots)
            self._num_due -= len(slots)
            if not self._num_due:
                self._store.watch(HOOK, None)  # updates cost nothing more
        return self._rows.restored(copied, claimed, out)  # steps need not wait: nothing of it changes any more

    def check_open(self) -> None:
        """Raises RowmeshError where the snapshot was closed: what was read of it is not to be written either."""
        with self._lock:
            self._raise_if_closed()

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise RowmeshError("the snapshot was closed while it was read")

    def close(self) -> None:
        """Ends watching, and frees pre-images."""
        with self._lock:
            if not self._is_closed:
                self._is_closed, self._buffer = True, None
                self._rows.close()
                self._store.watch(HOOK, None)

    def _own_buffer(self) -> Tensor:
        """A buffer for all shards: fresh pages cost steps time too. Shards of dynamic tables may be added meanwhile."""
        num_bytes = self.bytes_of(max(map(len, self._shards)))
        if self._buffer is None or len(self._buffer) < num_bytes:
            self._buffer = self._room.tensor(torch.uint8, num_bytes)
        return self._buffer


class _StoreRows(Protocol):
    """Rows and states where they are, and their pre-images. `keep` and `settle` are called under one lock."""

    def open(self, due: Sequence[ShardSlots], stop: int) -> None:
        """Notes which slots, all below `stop`, are to be kept."""
        ...

    def prepare(self, num_bytes: int) -> None:
        """May have memory ready for so many bytes of pre-images."""
        ...

    def keep(self, slots: Any, at: Any) -> int:
        """Saves the rows that are to be kept; returns how many."""
        ...

    def copy(self, slots: ShardSlots, out: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rows as they are now, to `out` or elsewhere, some of them perhaps half updated: those have pre-images."""
        ...

    def settle(self, slots: ShardSlots) -> Any:
        """They need not be kept any more; returns what `restored` wants to know."""
        ...

    def restored(self, copied: dict[str, Tensor], claimed: Any, out: dict[str, Tensor]) -> dict[str, Tensor]:
        """Puts pre-images over copies; returns them in the host's memory."""
        ...

    def close(self) -> None:
        """Frees pre-images."""
        ...


class _HostRows:
    """A store whose rows are all in the host's memory."""

    def __init__(self, store: RowStore, room: Room) -> None:
        self._store, self._room = store, room
        self._saved = {kind: PreImages() for kind in _tensors(store)}
        self._num_saved = 0

    def open(self, due: Sequence[ShardSlots], stop: int) -> None:
        # By slot, the place of its pre-image plus one, where it has a pre-image.
        self._places = self._room.tensor(torch.int32, stop).numpy().view(np.uint32)
        # By slot: 1 where its pre-image is to be saved before an update, else 0, or what `claim` makes of it.
        self._is_due = self._room.tensor(torch.uint8, stop).numpy()
        self._is_due[:] = 0
        for slots in due:
            self._is_due[slice(slots.start, slots.stop) if isinstance(slots, range) else slots] = 1

    def prepare(self, num_bytes: int) -> None:
        self._room.prepare(num_bytes)

    def keep(self, slots: Slots, at: Slots) -> int:
        at = claim(self._is_due, self._places, slots, at, self._num_saved)
        for kind, rows in _tensors(self._store).items() if len(at) else ():
            at_once = max(BLOCK_BYTES * len(rows) // max(rows.nbytes, 1), 1)
            for begin in range(0, len(at), at_once):
                some = at[begin : begin + at_once]
                self._saved[kind].keep(rows, some, self._room.tensor(rows.dtype, len(some), *rows.shape[1:]))
        self._num_saved += len(at)
        return len(at)

    def copy(self, slots: ShardSlots, out: dict[str, Tensor]) -> dict[str, Tensor]:
        sources = _tensors(self._store).values()
        if isinstance(slots, range):
            copy_all([source[slots.start : slots.stop] for source in sources], list(out.values()))
        else:
            for source, of_kind in zip(sources, out.values(), strict=True):
                take(source, slots, of_kind)
        return out

    def settle(self, slots: ShardSlots) -> tuple[Slots, dict[str, list[Block]]]:
        places = settle(self._is_due, self._places, slots)
        return places, {kind: list(saved.blocks) for kind, saved in self._saved.items()}

    def restored(
        self, copied: dict[str, Tensor], claimed: tuple[Slots, dict[str, list[Block]]], out: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        places, blocks = claimed
        if len(places):
            for kind, rows in copied.items():
                PreImages.restore(places, rows, blocks[kind])
        return copied

    def close(self) -> None:
        self._saved = {}


class _TierRows(_HostRows):
    """A store that has some of its rows in fast memory, and reads the others from where they are."""

    def copy(self, slots: ShardSlots, out: dict[str, Tensor]) -> dict[str, Tensor]:
        rows, state = self._store.read_rows(np.array(slots, np.uint32))
        return {VALUES: rows, **state}


class _DeviceRows:
    """A store whose rows are all in a device's memory; see `DevicePreImages`."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._kept: DevicePreImages | None = None

    def open(self, due: Sequence[ShardSlots], stop: int) -> None:
        room_bytes = _free_bytes(self._store.device) // DEVICE_SHARE
        self._kept = DevicePreImages(list(_tensors(self._store).values()), due, stop, room_bytes)

    def prepare(self, num_bytes: int) -> None:
        """No-op: a device's allocator needs no pages."""

    def keep(self, slots: Tensor, at: Tensor) -> int:
        return self._opened.keep(slots, at)

    def copy(self, slots: ShardSlots, out: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(out, self._opened.copy(slots), strict=True))

    def settle(self, slots: ShardSlots) -> Tensor:
        return self._opened.settle(slots)

    def restored(self, copied: dict[str, Tensor], claimed: Tensor, out: dict[str, Tensor]) -> dict[str, Tensor]:
        self._opened.restore(claimed, list(copied.values()), list(out.values()))
        return out

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()

    @property
    def _opened(self) -> DevicePreImages:
        assert self._kept is not None
        return self._kept


def _tensors(store: RowStore) -> dict[str, Tensor]:
    return {VALUES: store.rows, **store.state}


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()

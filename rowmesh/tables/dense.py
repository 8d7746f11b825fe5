"""Dense arena: the rows of a group that this rank owns, and their optimizer state, in one memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.ops.initialize import STREAM, initialize, initialize_slots
from rowmesh.ops.memory import Buffer
from rowmesh.ops.merge_update import HostMerged, Merged, update
from rowmesh.ops.simd import COMPUTE_DTYPE, STORAGE
from rowmesh.tables.group import TableGroup
from rowmesh.tables.initializer import table_key
from rowmesh.tables.row_store import Piece, Watcher
from rowmesh.tables.spec import TableSpec

MOST_DEVICE_SLOTS = 2**31 - 1  # kernels of devices read slots as signed 32-bit numbers


class DenseArena:
    """Rows in slots 0 … num_slots − 1; a `RowStore`.

    Args:
        group: the tables.
        num_slots: rows this rank holds, of all tables together.
        device: whose memory, and whose kernels (a CPU may interpret those of a GPU); None: the host's.
        rows: memory for the rows, `[num_slots, D]`, that other ranks can read; default: private memory.

    Attributes:
        rows: `[num_slots, D]` of the group's dtype.
        state: optimizer state by name, `[num_slots, D]` or `[num_slots]`, float32 (float64 for float64 rows).
        device, is_whole, has_views: see `RowStore`.

    Raises:
        ConfigurationError: there are more slots than a device's kernels can tell apart.
        MemoryError: the device has no room.

    Example:
        >>> from rowmesh.tables import TableSpec, fuse
        >>> (group,) = fuse([TableSpec(name="item", num_rows=9, dim=4)])
        >>> DenseArena(group, 9).num_bytes  # row-wise AdaGrad has one number a row
        (144, 36)
    """

    is_whole = True

    def __init__(
        self, group: TableGroup, num_slots: int, device: torch.device | None = None, rows: Tensor | None = None
    ) -> None:
        if device is not None and num_slots > MOST_DEVICE_SLOTS:
            raise ConfigurationError(
                f"group {group.name}: a rank would hold {num_slots:,} rows on {device}, and at most "
                f"{MOST_DEVICE_SLOTS:,} can be told apart; use more ranks, or give some tables another optimizer, "
                "which makes a group of their own"
            )
        self.group, self.num_slots = group, num_slots
        self.has_views, self.device = device is None, device or torch.device("cpu")
        dims, optimizer = {"row": (), "element": (group.dim,)}, group.optimizer
        try:
            self.rows = self._room(group.dtype, num_slots, group.dim) if rows is None else rows
            self.state = {
                name: self._room(compute_dtype(group.dtype), num_slots, *dims[extent])
                for name, extent in optimizer.state.items()
            }
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"group {group.name} on {device}: {error}") from error
        for name, state in self.state.items():
            if group.storage != "dynamic" and (initial := optimizer.initial_state[name]):
                state.fill_(initial)
        self.address: int = self.rows.data_ptr()  # of slot 0, for kernels of the host
        self._watchers: dict[str, Watcher | None] = {}

    def _room(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Zeros; of the host's memory no page is touched."""
        if self.has_views:
            return Buffer(math.prod(shape) * dtype.itemsize).tensor(dtype, *shape)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Memory of the rows, and of the optimizer state."""
        return self.rows.nbytes, sum(tensor.nbytes for tensor in self.state.values())

    def initialize(self, seed: int, held: Iterable[Iterable[Piece]]) -> None:
        """Sets every row to its initial value; see `RowStore`. Rows of dynamic tables begin by `start`."""
        if self.group.storage == "dynamic":
            return
        for table, pieces in zip(self.group.tables, held, strict=True):
            key, (a, b) = table_key(seed, table.name), table.initializer.parameters(table.num_rows)
            for piece in pieces:
                rows = self.rows[piece.slots.start : piece.slots.stop]
                first, stride = piece.rows.start, piece.rows.step
                initialize(rows, key, first=first, stride=stride, distribution=table.initializer.name, a=a, b=b)

    def start(self, slots: np.ndarray, ids: np.ndarray, seed: int, table: TableSpec) -> None:
        """Gives ids of a dynamic table rows: their initial values, and the state of a row that was never updated.

        Args:
            slots: `[n]` distinct integers.
            ids: int64 `[n]`.
            seed: of the initial values.
            table: whose ids they are.
        """
        if not len(slots):
            return
        places, pieces = slots.astype(np.uint32), np.array([(0, 0, 1, 0)], np.int64)  # id i is "row" i
        self.announce(places)
        streams = np.array([(table_key(seed, table.name), *table.initializer.parameters(table.num_rows))], STREAM)
        rows = self.rows
        if not self.has_views:  # the host computes them
            rows, places = (
                torch.empty(len(slots), self.group.dim, dtype=rows.dtype, device="cpu"),
                np.arange(len(slots), dtype=np.uint32),
            )
        initialize_slots(rows, places, np.ascontiguousarray(ids), pieces, streams, table.initializer.name)
        index = self._index(slots)
        if rows is not self.rows:
            self._wait()
            self.rows[index] = rows.to(self.device)
        for name, tensor in self.state.items():
            tensor[index] = self.group.optimizer.initial_state[name]

    def restore(self, slots: np.ndarray, rows: Tensor, state: Mapping[str, Tensor]) -> None:
        """Gives ids of a dynamic table the rows and states that they had; see `start` and `write_rows`."""
        self.announce(slots)
        self._wait()
        self.write_rows(slots, rows, state)

    def announce(self, slots: np.ndarray | Merged, part: tuple[int, int] | None = None) -> None:
        """Tells watchers of rows that are to change otherwise than by `apply`.

        Args:
            slots: distinct integers, or what has merged slots.
            part: which of the merged rows, as for `apply`.
        """
        watchers = list(filter(None, tuple(self._watchers.values())))
        if not watchers:
            return
        if isinstance(slots, HostMerged):
            announced = slots.slots[slice(*(part or (None,)))]
        elif isinstance(slots, np.ndarray):
            announced = slots.astype(np.uint32) if self.has_views else self._index(slots)
        else:
            announced = slots.valid_slots
        for watcher in watchers:
            watcher(announced, announced)

    def _wait(self) -> None:
        """Waits for all that the device was asked for: it may read and update rows of ids on any stream.

        Later work waits for the current stream, as for the batch that is routed there.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def apply(self, merged: Merged, lr: float, scaling: float, step: int, part: tuple[int, int] | None = None) -> None:
        """Updates the rows of merged slots in place; see `RowStore`."""
        if self._watchers:
            self.announce(merged, part)
        optimizer, state = self.group.optimizer, tuple(self.state.values())
        update(self.rows, state, merged, optimizer.name, optimizer.numbers(lr, scaling, step), part)

    def read_rows(self, slots: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """Copies of rows and of their state; waits for all that the device was asked for."""
        self._wait()
        index = self._index(slots)
        return self.rows[index].cpu(), {name: tensor[index].cpu() for name, tensor in self.state.items()}

    def write_rows(self, slots: np.ndarray, rows: Tensor, state: Mapping[str, Tensor]) -> None:
        """Sets rows and their state; see `RowStore`."""
        index = self._index(slots)
        self.rows[index] = rows.to(self.device)
        for name, tensor in state.items():
            self.state[name][index] = tensor.to(self.device)

    def _index(self, slots: np.ndarray) -> Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self.device)

    def watch(self, name: str, watcher: Watcher | None) -> None:
        """Has a function called before every update; see `RowStore`."""
        self._watchers[name] = watcher

    def close(self) -> None:
        """No-op: memory is freed with the last tensor that refers to it."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype rows of `dtype` are pooled in: float32, or float64 for float64."""
    return COMPUTE_DTYPE[STORAGE[dtype]]

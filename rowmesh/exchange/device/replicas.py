"""Replicas on devices: what the groups of ranks that hold the same tables tell each other, and what they make of it.

`DeviceSums` is what `rowmesh.exchange.summed` does, `exact` synchronization, and `DeviceMeans` what
`rowmesh.exchange.averaged` does, `average`, over tensors on a device. The host has to know how many rows are told.

Source: two-dimensional sparse parallelism, Algorithm 1, lines 5-10; for sums OPER §5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rowmesh.ops.transfer import Late, upload
from rowmesh.optim.rules import Update
from rowmesh.tables.dense import compute_dtype

if TYPE_CHECKING:
    from rowmesh.exchange.group import GroupExchange


@dataclass(frozen=True, eq=False)
class DeviceTold:
    """Some rows.

    Attributes:
        slots: int32 `[n]`, distinct.
        blocks: for each kind of value, `[n, …]`.
        before: what the blocks were, where this rank needs it itself; never sent.
    """

    slots: Tensor
    blocks: list[Tensor]
    before: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Of merged gradients.

    Attributes:
        slots: int32 `[M]`, distinct as far as they are valid.
        sums: `[M, D]` of them.
        num: how many are valid, where that is known, or on its way to the host.
    """

    slots: Tensor
    sums: Tensor
    num: Late | int

    @property
    def count(self) -> int:
        """How many are valid; waits until that is here."""
        return self.num if isinstance(self.num, int) else self.num.read()[0]


class DeviceSums:
    """One group's gradients, waiting for those of other replicas.

    Args:
        exchange: the group's.
        replica: the number of this rank's group.
    """

    def __init__(self, exchange: GroupExchange, replica: int) -> None:
        from rowmesh.ops.merge_update import cuda

        self._arena, self._merge, self._sum = exchange.arena, cuda.merge, cuda.sum_merged
        rows, dtype = exchange.arena.rows, compute_dtype(exchange.group.dtype)
        self._nothing = rows.new_empty(0, dtype=torch.int32), rows.new_empty(0, rows.shape[1], dtype=dtype)
        self._kept: list[_Sums] = []

    @property
    def num_bytes(self) -> int:
        """Nothing is kept between steps."""
        return 0

    def apply(
        self, merged: Any, update: Update, part: tuple[int, int] | None = None, *, num: int | None = None
    ) -> None:
        """Keeps the sums of this group's gradients of merged rows, instead of updating."""
        gradients = merged.gradients
        most = merged.slots.numel() if num is None else num
        sums = self._sum(merged, gradients, gradients.new_empty(most, gradients.shape[1]))
        self._kept.append(_Sums(merged.slots[:most].to(torch.int32), sums, Late(merged.num) if num is None else num))

    @property
    def count(self) -> int:
        """Rows that `outgoing` will tell; waits until that is here, where it was not known."""
        return sum(part.count for part in self._kept)

    def outgoing(self) -> DeviceTold:
        """The sums of this group, which are forgotten."""
        kept = [(part.slots[: part.count], part.sums[: part.count]) for part in self._kept]
        self._kept = []
        slots, sums = kept[0] if kept else self._nothing
        if len(kept) > 1:
            slots, sums = (torch.cat(parts) for parts in zip(*kept, strict=True))
        return DeviceTold(slots, [sums])

    def forget(self) -> None:
        """Nothing is kept between steps."""

    def combine(self, told: Sequence[DeviceTold], update: Update) -> None:
        """Adds what all groups told, in their order, and updates."""
        merged = self._merge(torch.cat([part.slots for part in told]), most=len(told))
        gradients = torch.cat([part.blocks[0] for part in told])
        self._arena.apply(merged.with_gradients(gradients), update.lr, update.scaling, update.step)


class DeviceMeans:
    """One group's rows and optimizer state, averaged over replicas.

    Between two synchronizations a rank lists the rows it updates, marks them, and keeps what they were before.

    Args:
        exchange: the group's.
        replica: the number of this rank's group.
    """

    def __init__(self, exchange: GroupExchange, replica: int) -> None:
        from rowmesh.ops.average import cuda
        from rowmesh.ops.gather.cuda import gather
        from rowmesh.ops.merge_update.cuda import merge

        self._kernels, self._gather, self._merge = cuda, gather, merge
        self._arena, self._replica = exchange.arena, replica
        tensors = [exchange.arena.rows, *exchange.arena.state.values()]
        self._tables = [tensor if tensor.dim() == 2 else tensor.unsqueeze(1) for tensor in tensors]
        rows = self._tables[0]
        self._marks = torch.zeros(len(rows), dtype=torch.uint8, device=rows.device)
        self._slots = torch.empty(0, dtype=torch.int64, device=rows.device)
        self._before = [table.new_empty(0, table.shape[1]) for table in self._tables]
        self._start()

    def _start(self) -> None:
        """An empty list."""
        self._bounds = torch.zeros(2, dtype=torch.int64, device=self._marks.device)
        self._used = Late(self._bounds[1:])
        self._most = 0  # that the list may have by now, as far as the host knows

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(tensor.nbytes for tensor in (self._marks, self._slots, *self._before))

    def apply(
        self, merged: Any, update: Update, part: tuple[int, int] | None = None, *, num: int | None = None
    ) -> None:
        """Updates merged rows; keeps what those that are touched for the first time were."""
        gradients = merged.gradients
        count = merged.slots.numel() if num is None else num
        self._reserve(count)
        self._bounds = self._kernels.mark(
            merged.slots[:count], merged.num, self._marks, self._bounds[1:], self._slots
        )  # fmt: skip
        self._used = Late(self._bounds[1:])
        self._most += count
        for table, before in zip(self._tables, self._before, strict=True):
            self._kernels.pack(table, self._slots, self._bounds, before, count)
        self._arena.apply(merged.with_gradients(gradients), update.lr, update.scaling, update.step)

    def _reserve(self, count: int) -> None:
        """Makes room for so many more rows; looks at how many there really are only where it may not do."""
        room, num_rows = len(self._slots), len(self._marks)
        if min(self._most + count, num_rows) > room:
            self._most = self.count
        if (needed := min(self._most + count, num_rows)) > room:
            capacity = min(max(needed, 2 * room), num_rows)
            self._slots, *self._before = (_grown(part, capacity) for part in (self._slots, *self._before))

    @property
    def count(self) -> int:
        """Rows that `outgoing` will tell; waits until that is here."""
        return self._used.read()[0]

    def outgoing(self) -> DeviceTold:
        """The rows that this group touched, whose marks go; views that hold until more are touched."""
        count = self.count
        slots, before = self._slots[:count], [part[:count] for part in self._before]
        blocks = [self._gather(table, slots) for table in self._tables]
        told = DeviceTold(slots.to(torch.int32), blocks, before)
        self.forget()
        return told

    def forget(self) -> None:
        """Unmarks all rows."""
        self._bounds[0] = 0
        self._kernels.clear(self._slots, self._bounds, self._marks, min(self._most, len(self._slots)))
        self._start()

    def combine(self, told: Sequence[DeviceTold], update: Update) -> None:
        """Puts the means of the rows that any group told into place."""
        merged = self._merge(torch.cat([part.slots for part in told]), most=len(told))
        ends = torch.tensor(list(accumulate(map(len, told), initial=0)), dtype=torch.int64, device="cpu")
        ends = upload(ends, self._marks.device)
        for kind, table in enumerate(self._tables):
            rows, before = torch.cat([part.blocks[kind] for part in told]), told[self._replica].before[kind]
            self._kernels.average(table, merged, rows, ends, self._replica, before)


def _grown(tensor: Tensor, size: int) -> Tensor:
    """The same in more memory."""
    grown = tensor.new_empty(size, *tensor.shape[1:])
    grown[: len(tensor)] = tensor
    return grown

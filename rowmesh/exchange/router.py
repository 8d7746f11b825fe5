"""Router: routes a batch through all groups of a collection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rowmesh.errors import IdRangeError
from rowmesh.exchange.layout import Layouts
from rowmesh.exchange.route import GroupExchange, Route
from rowmesh.exchange.workspace import held_bytes
from rowmesh.ops.memory import Scratch
from rowmesh.sparse import SparseBatch


class Router(Protocol):
    """From a batch to what it needs."""

    def __call__(
        self, batch: SparseBatch, exchanges: Sequence[GroupExchange], moment: tuple[int, int] | None = None
    ) -> Route:  # fmt: skip
        """Routes a batch; no communication.

        Args:
            batch: of this rank.
            exchanges: of all groups.
            moment: which look-up this is, and after how many steps, for messages; None where others name it.

        Raises:
            DataError: the batch's features are not the tables', or its buffers do not fit together any more.
            IdRangeError: an id is out of range.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers, lent or idle."""
        ...


class RouteMemory:
    """What a route needs beside the workspaces of its groups; lent to it, and given back when it is gone."""

    def __init__(self) -> None:
        self.inverse = Scratch()  # uint32 [N]: which unique id each id is
        self._offsets = Scratch()  # int64 [F·B + 1]: the batch's, copied
        self._view = torch.empty(0, dtype=torch.int64, device="cpu")

    def offsets(self, count: int) -> Tensor:
        """Room for so many."""
        if self._view.numel() != count:  # batches of one size follow each other
            self._offsets.reserve(8 * count)
            self._view = self._offsets.buffer.tensor(torch.int64, count)
        return self._view

    @property
    def num_bytes(self) -> int:
        """All memory held."""
        return held_bytes(self)


class HostRouter:
    """Routes on the CPU.

    Args:
        layouts: where each feature's ids and vectors are.
        rank: this one, for messages.
    """

    def __init__(self, layouts: Layouts, rank: int) -> None:
        self._layouts, self._rank = layouts, rank
        self.idle: list[RouteMemory] = []
        self._made: list[RouteMemory] = []  # those that routes hold, too

    def __call__(
        self, batch: SparseBatch, exchanges: Sequence[GroupExchange], moment: tuple[int, int] | None = None
    ) -> Route:  # fmt: skip
        """Routes a batch; refuses ids only when all groups are looked through."""
        memory = self._borrow()
        route = Route(batch, [], memory, self.idle.append)  # first: it gives everything back if anything fails
        route.batch = batch = batch.routed(memory.offsets)
        layouts = self._layouts(batch)
        inverse = memory.inverse.reserve(4 * batch.ids.numel())
        refused: list[str] = []
        for exchange, layout in zip(exchanges, layouts, strict=True):
            try:
                route.groups.append(exchange.route(batch, layout, inverse))
            except IdRangeError as error:
                refused.append(str(error))  # not the error, whose frames hold buffers
        if refused:
            raise refusal(self._rank, refused, moment)
        return route

    def _borrow(self) -> RouteMemory:
        try:
            return self.idle.pop()
        except IndexError:  # asking before would not do: another thread may take the last one
            made = RouteMemory()
            self._made.append(made)
            return made

    @property
    def num_bytes(self) -> int:
        """Of all routes."""
        return sum(memory.num_bytes for memory in self._made)


def refusal(rank: int, refused: Sequence[str], moment: tuple[int, int] | None) -> IdRangeError:
    """The error for ids that are no rows of their tables; `moment` as in `Router`.

    >>> str(refusal(1, ["feature 'item': …"], (7, 3)))[:56]
    "rank 1, look-up 7 (after 3 steps): feature 'item': …; co"
    """
    when = "" if moment is None else f", look-up {moment[0]} (after {moment[1]} steps)"
    return IdRangeError(
        f"rank {rank}{when}: {'; '.join(refused)}; correct the data, raise num_rows, or set out_of_range to the row "
        "such ids should read"
    )

"""Router: routes a batch through all groups of a collection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rowmesh.errors import IdRangeError
from rowmesh.exchange.layout import Layouts
from rowmesh.exchange.route import GroupExchange, Route
from rowmesh.ops.memory import Scratch
from rowmesh.sparse import SparseBatch


class Router(Protocol):
    """From a batch to what it needs."""

    def __call__(self, batch: SparseBatch, exchanges: Sequence[GroupExchange]) -> Route:
        """Routes a batch; no communication.

        Raises:
            DataError: the batch's features are not the tables'.
            IdRangeError: an id is out of range.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers, lent or idle."""
        ...


class HostRouter:
    """Routes on the CPU.

    Args:
        layouts: where each feature's ids and vectors are.
        rank: this one, for messages.
    """

    def __init__(self, layouts: Layouts, rank: int) -> None:
        self._layouts, self._rank = layouts, rank
        self.inverses: list[Scratch] = []  # idle
        self._all_inverses: list[Scratch] = []  # and those that routes hold

    def __call__(self, batch: SparseBatch, exchanges: Sequence[GroupExchange]) -> Route:
        """Routes a batch; refuses ids only when all groups are looked through."""
        layouts = self._layouts(batch)
        if not self.inverses:
            self.inverses.append(Scratch())
            self._all_inverses.append(self.inverses[-1])
        scratch = self.inverses.pop()
        inverse = scratch.reserve(4 * batch.ids.numel())
        route = Route(batch, [], scratch, self.inverses.append)  # first: it gives everything back if a group fails
        refused: list[str] = []
        for exchange, layout in zip(exchanges, layouts, strict=True):
            try:
                route.groups.append(exchange.route(batch, layout, inverse))
            except IdRangeError as error:
                refused.append(str(error))  # not the error, whose frames hold buffers
        if refused:
            raise refusal(self._rank, refused)
        return route

    @property
    def num_bytes(self) -> int:
        """Of the inverses."""
        return sum(scratch.num_bytes for scratch in self._all_inverses)


def refusal(rank: int, refused: Sequence[str]) -> IdRangeError:
    """The error for ids that are no rows of their tables."""
    return IdRangeError(
        f"rank {rank}: {'; '.join(refused)}; correct the data, raise num_rows, or set out_of_range to the row such ids "
        "should read"
    )

"""Device windows over tiered tables, on one rank: rows are brought ahead into the device's memory.

The thread of the tier brings them (`retrieve`) in the order of the batches; it asks nothing of its own stream, copies
have theirs. The stream of communication waits for them when a batch's turn comes (`fetch`), hence so does the one that
computes; its update comes after all that was read of the batch, so that rows given up by then are given up by all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from rowmesh.exchange.device.window import DeviceWindow
from rowmesh.exchange.device.windows import WholeDeviceWindows
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.shard_group import ShardGroup


class TieredDeviceWindows(WholeDeviceWindows):
    """One rank, whose rows are updated in place once they are there."""

    def __init__(self, part: ShardGroup) -> None:
        super().__init__(part, "there is one rank")
        self.is_tiered = True
        self.reason = f"rows are brought into the memory of {part.device} ahead: {part.reason}"
        self._exchanges = cast("list[GroupExchange]", part.exchanges)

    def begin(self, number: int) -> None:
        """From now on rows come in the order of the batches."""
        super().begin(number)
        for exchange in self._exchanges:
            exchange.comes_early = False

    def retrieve(self, window: DeviceWindow, may_wait: Callable[[], bool]) -> None:
        """Brings rows into the device's memory."""
        for exchange, group in zip(self._exchanges, self._mine(window), strict=True):
            exchange.retrieve(group.group, may_wait)

    def end(self) -> None:
        """What was opened and never updated is forgotten; rows may come as soon as a batch is routed."""
        super().end()
        for exchange in self._exchanges:
            exchange.comes_early = True

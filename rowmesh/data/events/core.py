"""k-core: users and items that have enough events, once those that have not are gone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.data.events.read import CodedEvents


@dataclass(frozen=True)
class Core:
    """What is kept of coded events.

    Attributes:
        user_counts, item_counts: int64, kept events by code; 0 for those that are left out.
    """

    user_counts: NDArray[np.int64]
    item_counts: NDArray[np.int64]

    def keeps(self, events: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which events have a user and an item that are kept."""
        return (self.user_counts[events["user"]] > 0) & (self.item_counts[events["item"]] > 0)


def find_core(events: CodedEvents, k: int) -> Core:
    """Leaves out users and items of fewer than k events until all have k or more; reads the events once a round.

    The result does not depend on the order of rounds. Memory: 8 bytes a user and an item.
    """
    core = _count(events, None)
    while True:
        users = np.where(core.user_counts < k, 0, core.user_counts)
        items = np.where(core.item_counts < k, 0, core.item_counts)
        if (users == core.user_counts).all() and (items == core.item_counts).all():
            return core
        core = _count(events, Core(users, items))


def _count(events: CodedEvents, kept: Core | None) -> Core:
    """Counts the events of kept users and items."""
    users, items = np.zeros(len(events.users), np.int64), np.zeros(len(events.items), np.int64)
    for block in events.blocks():
        if kept is not None:
            block = block[kept.keeps(block)]
        users += np.bincount(block["user"], minlength=len(users))
        items += np.bincount(block["item"], minlength=len(items))
    return Core(users, items)

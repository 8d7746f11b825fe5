"""Averages: what replica groups know of all dynamic tables is made one; see `rowmesh.exchange.resolve.merging`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rowmesh._support.counters import CommonCounters
from rowmesh.errors import PeerError, RefusedError, RowmeshError
from rowmesh.exchange.resolve.merging import DOING, MergedIds, Merging
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.plain import PlainError, error_to_plain
from rowmesh.mesh.together import first_failure
from rowmesh.tables.dynamic.owned import OwnedTable

_NONE = -1  # in the place of a step: there is no such batch


class Averages:
    """All dynamic tables whose replica groups decide for themselves. Making one is collective.

    Args:
        owned: what this rank has of each, by name; all of them on all ranks that have the same shards.
        mesh: the ranks that have the same shards, one of each replica group, in their order.
    """

    def __init__(self, owned: dict[str, OwnedTable], mesh: Mesh) -> None:
        self._mesh, self._channel = mesh, Channel.between_hosts(mesh)
        self.tables = {name: Merging(table) for name, table in owned.items()}
        for name, table in owned.items():
            table.merge_with(self.tables[name])

    def __call__(
        self, number: int, step: int, counters: CommonCounters, agree: Callable[[PlainError | None], None]
    ) -> dict[str, MergedIds]:
        """Makes what groups know of each table one, or of none. Collective among all ranks of all groups.

        Args:
            number: of the last batch that was opened.
            step: how many were opened for training.
            counters: of messages.
            agree: is called with why the ranks of these shards cannot; raises that on all ranks of the group.

        Raises:
            NoRoomError, StoreError: some group cannot; nothing has changed then, in none.
            RefusedError: a group has no such batch; nothing has changed.
            PeerError: groups have opened differently many batches.
        """
        self._check_steps(step, counters)
        drafts = {name: table.find(self._channel, counters) for name, table in self.tables.items()}
        failure: PlainError | None = None
        for name, each in drafts.items():
            try:
                self.tables[name].check(each)
            except RowmeshError as error:
                failure = failure or error_to_plain(error)
        agree(self._first(failure, counters))
        return {name: self.tables[name].unite(each, self._channel, counters, number) for name, each in drafts.items()}

    def pass_over(self, counters: CommonCounters) -> None:
        """Takes part in place of a call where this group has not opened the last batch. Collective with it."""
        self._post_step(_NONE, counters)

    def _post_step(self, step: int, counters: CommonCounters) -> list[int]:
        return self._channel.post_gather(torch.tensor([step]), counters, DOING).wait().tolist()

    def _check_steps(self, step: int, counters: CommonCounters) -> None:
        steps = self._post_step(step, counters)
        if without := [rank for rank, each in enumerate(steps) if each == _NONE]:
            raise RefusedError(
                f"rank {self._mesh.name(self._mesh.rank)}: no rank looks up this batch, which replicas of dynamic "
                f"tables do not have, on ranks {[self._mesh.name(rank) for rank in without]}: their data ended, they "
                "could not look it up, as their own errors say, or their loop was left",
                without,
            )
        if len(set(steps)) > 1:
            opened = ", ".join(f"rank {self._mesh.name(rank)} {each}" for rank, each in enumerate(steps))
            raise PeerError(
                f"rank {self._mesh.name(self._mesh.rank)}: replicas of dynamic tables have opened differently many "
                f"batches: {opened}; every rank must call forward and step equally often"
            )

    def _first(self, failure: PlainError | None, counters: CommonCounters) -> PlainError | None:
        """The failure of the first of the ranks with the same shards, or None, which costs a flag of each rank."""
        flags = self._channel.post_gather(torch.tensor([int(failure is not None)]), counters, DOING)
        return first_failure(self._mesh, failure, DOING) if flags.wait().any() else None

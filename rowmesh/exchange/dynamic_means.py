"""Averages of dynamic tables: replica groups that decide for themselves make one of what they know, then of their rows.

Rows of ids have no numbers that all groups share. So the groups first agree on the ids whose rows may differ
(`rowmesh.exchange.resolve.merging`). Then each sends its rows of all these ids, in their order, to the ranks of its
replicate group. The mean is that of other tables, w₀ + Σ (wₘ − w₀) / M, in the order of the groups.

Source: two-dimensional sparse parallelism, Algorithm 1, lines 5-10. Differs: tables are dynamic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.handshake import Step, joined
from rowmesh.exchange.resolve.merging import MergedIds
from rowmesh.exchange.resolve.resolver import Resolver
from rowmesh.exchange.sync_schedule import SyncSchedule
from rowmesh.exchange.synchronizer import Synchronizer
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel, Message
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.tables.dense import DenseArena, compute_dtype
from rowmesh.tables.update_rules import Update

_DOING = "averaging replicas of dynamic tables"


class _Coming(NamedTuple):
    """Rows of other replicas, and their states, that are under way to slots here."""

    arena: DenseArena
    slots: np.ndarray
    messages: list[Message]


class DynamicMeans(Synchronizer):
    """Keeps the replicas of some groups of dynamic tables together.

    Args:
        setting: how often.
        exchanges: the groups'.
        mesh: the ranks that have the same shards, in the order of their replicas.

    Attributes:
        resolver: of the tables; known before the first step.
    """

    def __init__(self, setting: Synchronization, exchanges: Sequence[GroupExchange], mesh: Mesh) -> None:
        self.resolver: Resolver | None = None
        self._schedule, self._exchanges, self._mesh = SyncSchedule(mesh, setting.every), exchanges, mesh
        self._channel = Channel.between_hosts(mesh)
        self._under_way: list[_Coming] = []
        self._ahead: dict[int, dict[str, MergedIds]] = {}  # by step

    def decide_with(self, resolver: Resolver) -> None:
        """Takes what decides of the tables."""
        self.resolver = resolver

    def begin(self, updates: Sequence[Update], step: Step) -> bool:
        """See `Synchronizer.begin`."""
        due = self._schedule.after(step)
        if due is not None:
            self._send(due.number, due, self._ahead.pop(due.number, None))
        return due is not None

    def start(self) -> None:
        """See `Synchronizer.start`."""
        assert self.resolver is not None
        self.resolver.check_idle("average replicas")
        self._send(self._schedule.call(), None, None)

    def is_due(self, step: int) -> bool:
        """Whether an average follows a step."""
        return self._schedule.is_due(step)

    def merge_ahead(self, step: int) -> None:
        """After the batch of a step was opened, before the next one is: what groups know becomes one, if that is due.

        The rows follow with the step. So it decides on the same batches whether or not a pipeline opens them ahead.
        Collective among the replicas of this rank, which call this or `pass_over`.

        Raises:
            RefusedError: a replica has no such batch.
        """
        if self._schedule.is_due(step):
            assert self.resolver is not None
            self._ahead[step] = self.resolver.merge()

    def pass_over(self, step: int) -> None:
        """Takes the place of `merge_ahead` where this rank has opened no batch for this step."""
        if self._schedule.is_due(step):
            assert self.resolver is not None
            self.resolver.pass_over_merge()

    def forget_ahead(self) -> None:
        """Steps for which this was done do not come: the next average has their rows too."""
        for merged in self._ahead.values():
            assert self.resolver is not None
            self.resolver.put_back(merged)
        self._ahead = {}

    def finish(self) -> None:
        """Waits for the rows of other replicas, and puts means into place."""
        came = [(each, [message.wait() for message in each.messages]) for each in self._under_way]
        self._under_way = []
        for each, values in came:
            rows, *states = [_mean(value.unflatten(0, (self._mesh.world_size, -1))) for value in values]
            each.arena.restore(each.slots, rows, dict(zip(each.arena.state, states, strict=True)))

    def _send(self, operation: int, step: Step | None, merged: dict[str, MergedIds] | None) -> None:
        self._agree(operation, step)
        assert self.resolver is not None
        merged = self.resolver.merge() if merged is None else merged
        for exchange in self._exchanges:
            found = [merged[table.name].slots for table in exchange.group.tables if table.name in merged]
            slots = np.concatenate([np.empty(0, np.int64), *found])
            if not len(slots):
                continue
            arena, counters = exchange.arena, exchange.counters.synchronization
            assert isinstance(arena, DenseArena)
            rows, state = arena.read_rows(slots)
            messages = [self._channel.post_gather(each, counters, _DOING) for each in (rows, *state.values())]
            counters.add_rows(len(slots))
            self._under_way.append(_Coming(arena, slots, messages))

    def _agree(self, operation: int, step: Step | None) -> None:
        mine = torch.tensor([joined(operation, step)])
        came = self._channel.post_gather(mine, self._exchanges[0].counters.synchronization, _DOING).wait()
        self._schedule.check(came.tolist(), operation, step)


def _mean(values: Tensor) -> Tensor:
    """Of `[M, n, …]` over the first; where all are equal it is that, to the bit."""
    first, *others = values.to(compute_dtype(values.dtype))
    total = torch.zeros_like(first)
    for other in others:
        total += other - first
    return (first + total * (1.0 / len(values))).to(values.dtype)

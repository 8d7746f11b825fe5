"""How the ranks of a column whose rows are on devices tell each other what changed: everything to everybody.

The hosts compare what they do and how many rows they tell, over gloo; rows travel from device to device, in messages as
long as the longest of the column's.

Differs from `rowmesh.exchange.telling`: there are no homes that add up, also of more than two replicas; a rank receives
(M − 1) · n rows of n that a group touches. Each adds them in the order of the groups, as a home would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rowmesh.exchange.column import Column
from rowmesh.exchange.counters import SyncCounters
from rowmesh.exchange.device.replicas import DeviceMeans, DeviceSums, DeviceTold
from rowmesh.exchange.device.whole_tables import AverageTables, WholeTables
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.synchronizer import Synchronizer
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel, Message
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.optim.rules import Update


class DeviceColumnGroup:
    """One group's messages.

    Attributes:
        own: what this rank knows itself of the rows that are told.
        counts: rows that each replica tells this one.
        messages: what is under way: slots, then each kind of value.
    """

    def __init__(self, replicated: DeviceSums | DeviceMeans, name: str, counters: SyncCounters) -> None:
        self.replicated, self.counters = replicated, counters
        self.doing = f"synchronizing the replicas of group {name}"
        self.own: DeviceTold
        self.counts: list[int] = []
        self.messages: list[Message] = []

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.replicated.num_bytes


class TellEverybody:
    """The verbs of `rowmesh.exchange.telling`; both are collective among the column.

    Args:
        column: its hosts.
        channel: between its devices.
        groups: what is told.
    """

    def __init__(self, column: Column, channel: Channel, groups: Sequence[DeviceColumnGroup]) -> None:
        self._column, self._channel, self._groups = column, channel, groups

    def tell(self) -> None:
        """Sends the rows that this rank's group touched to the others; travels until `finish`."""
        self._column.count(self._groups, [group.replicated.count for group in self._groups])
        for group in self._groups:
            group.own = group.replicated.outgoing()
            most = max(group.counts)
            parts = [_padded(part, most) for part in (group.own.slots, *group.own.blocks)] if most else []
            group.messages = [self._channel.post_gather(part, group.counters, group.doing) for part in parts]
            group.counters.rows += len(group.own)

    def finish(self, updates: Sequence[Update]) -> None:
        """Puts together what all know."""
        for group, update in zip(self._groups, updates, strict=True):
            if group.messages:
                group.replicated.combine(self._received(group), update)
                group.messages = []

    def _received(self, group: DeviceColumnGroup) -> list[DeviceTold]:
        """What each replica told; of this rank's own what it has."""
        size, most = self._column.size, max(group.counts)
        slots, *blocks = [message.wait().unflatten(0, (size, most)) for message in group.messages]
        return [
            group.own
            if replica == self._column.replica
            else DeviceTold(slots[replica, :count], [block[replica, :count] for block in blocks])
            for replica, count in enumerate(group.counts)
        ]


def _padded(rows: Tensor, count: int) -> Tensor:
    """So many rows, of which the first are these; nobody reads the others."""
    if len(rows) == count:
        return rows
    padded = rows.new_empty(count, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded


def make_device_synchronizer(
    setting: Synchronization, exchanges: Sequence[GroupExchange], mesh: Mesh, device: torch.device
) -> Synchronizer:
    """Keeps the replicas of some groups of tables together. Collective among a column.

    Args:
        setting: how.
        exchanges: the groups'.
        mesh: the ranks that hold what this one holds, in the order of their replicas.
        device: of this rank.
    """
    column, channel = Column(mesh), Channel.between_devices(mesh, device)
    if setting.dense:
        tables = [WholeTables(exchange, column.replica) for exchange in exchanges]
        return Synchronizer(setting.every, column, tables, AverageTables(column, channel, tables))
    make, groups = DeviceSums if setting.mode == "exact" else DeviceMeans, []
    for exchange in exchanges:
        exchange.replicated = replicated = make(exchange, column.replica)
        groups.append(DeviceColumnGroup(replicated, exchange.group.name, exchange.counters.synchronization))
    return Synchronizer(setting.every, column, groups, TellEverybody(column, channel, groups))

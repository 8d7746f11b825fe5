"""Synchronization of replicas: when and how the ranks of a replicate group send each other what changed.

    exact     gradients are summed over replicas before the update: the same model as with one replica
    average   replicas update for themselves; rows and moments are averaged every so many steps

A *replicate group* is the ranks that hold the same shard, one of each replica (`rowmesh.mesh.grid`). They send only rows
that were touched (see `rowmesh.exchange.replica_rows`), in one of these ways:

    swap      two replicas in the hosts' memory send each other everything, in both directions at once
    owners    of more, each row has an owner, the replica of its slot modulo M, which reduces it and sends the result
              to all: reduce-scatter, then all-gather. A rank receives (M − 1) / M · (n + U) rows, where a replica
              touches n and all of them U, instead of (M − 1) · n
    gather    every replica on devices sends everything to all others: with owners the host would have to wait for the
              device twice more, for how many rows go to each owner and how many it reduces
    whole     whole tables are averaged, whether they differ or not, while all wait

All add in the order of the replicas, so that the way changes no bit. What was sent arrives while the program goes on to
the next look-up. Hosts compare what they do and how many rows they send; rows on devices go from device to device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import PeerError
from rowmesh.exchange.counters import SyncCounters
from rowmesh.exchange.handshake import Step, check_rates, joined, parted
from rowmesh.exchange.replica_rows import Delta, ReplicatedMeans, ReplicatedSums, message_bytes, read_message
from rowmesh.exchange.update import Update
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel, Message
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.ops.memory import Room

if TYPE_CHECKING:
    from rowmesh.exchange.device.route import DeviceExchange
    from rowmesh.exchange.route import GroupExchange

Strategy = Literal["swap", "owners", "gather", "whole"]

_DOING = "synchronizing replicas"
_NO_UPDATE = Update(0.0, 0.0, 0)  # averages need none


class GroupMessages:
    """One group's messages.

    Args:
        rows: what is sent of the group.
        name: of the group.
        counters: count rows and messages.
        device: where the group's rows are; None: the host's memory.

    Attributes:
        own: what this rank knows itself of the rows that are sent.
        counts: rows that each replica sends this one.
        messages: under way to this rank.
        received, begins: of hosts, where messages go, and where that of each replica begins.
    """

    def __init__(
        self,
        rows: ReplicatedSums | ReplicatedMeans,
        name: str,
        counters: SyncCounters,
        device: torch.device | None,
    ) -> None:
        self.rows, self.kinds, self.counters = rows, rows.kinds, counters
        self.doing = f"synchronizing the replicas of group {name}"
        self.own: Delta
        self.counts: list[int] = []
        self.messages: list[Message] = []
        self.received = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.begins: list[int] = []
        self.send_buffer, self.receive_buffer = Room(device), Room(device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.rows.num_bytes + self.send_buffer.num_bytes + self.receive_buffer.num_bytes

    def sizes(self, counts: Sequence[int], without: int) -> list[int]:
        """Bytes of the messages of so many rows each; of one replica 0."""
        return [message_bytes(self.kinds, n) if k != without else 0 for k, n in enumerate(counts)]

    def message(self, num_bytes: int) -> Tensor:
        """Room for what this host sends."""
        return self.send_buffer.tensor(torch.uint8, num_bytes)

    def reserve(self, sizes: Sequence[int]) -> Tensor:
        """Room for what each host sends this one, in bytes."""
        *self.begins, end = accumulate(sizes, initial=0)
        self.received = self.receive_buffer.tensor(torch.uint8, end)
        return self.received


class ReplicaSync:
    """Keeps the replicas of some groups of tables together. Collective among a replicate group.

    Args:
        setting: how.
        mesh: the ranks that hold what this one holds, in the order of their replicas.
        groups: what is sent.
        device: where rows are; None: the hosts' memory.
        second: another process group of these ranks, where they are two and have one.
    """

    def __init__(
        self,
        setting: Synchronization,
        mesh: Mesh,
        groups: Sequence[GroupMessages],
        device: torch.device | None,
        second: Any,
    ) -> None:
        self._every, self._mesh, self._groups, self._device = setting.every, mesh, groups, device
        self._replica, self._size = mesh.rank, mesh.world_size
        self._strategy = _strategy_of(setting, mesh.world_size, device)
        self._hosts = Channel.between_hosts(mesh)
        other = self._hosts if second is None else Channel(mesh, second, mesh.rank, mesh.world_size)
        self._by_sender = (self._hosts, other)  # of two
        self._channel = self._hosts if device is None else Channel.between_devices(mesh, device)
        self._operation = 0  # above 0 a step, below a call of `start`; the same on all ranks
        self._step: Step | None = None
        self._updates: Sequence[Update] = ()
        self._num_calls = 0  # of `start`
        self._is_under_way = False
        self._digest = 0  # of the steps since the last synchronization, which other replicas have not seen

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(group.num_bytes for group in self._groups)

    def begin(self, updates: Sequence[Update], step: Step) -> bool:
        """After gradients were pushed within this rank's replica; what is sent travels until `finish`.

        Returns:
            Whether a synchronization was due.

        Raises:
            PeerError: a rank does something else, or none answers.
        """
        step = step.after(self._digest)
        self._digest = step.digest
        if step.number % self._every:
            return False
        self._digest = 0
        self._send(step.number, updates, step)
        return True

    def start(self) -> None:
        """As `begin` where a synchronization is due, between two steps; for rows that are averaged."""
        self._num_calls += 1
        self._send(-self._num_calls, [_NO_UPDATE] * len(self._groups))

    def finish(self) -> None:
        """Waits for what other replicas sent, and updates."""
        if self._is_under_way:
            self._is_under_way = False
            self._receive()

    def forget(self) -> None:
        """Takes the rows of this rank as equal to those of the other replicas, whoever changed them."""
        for group in self._groups:
            group.rows.forget()

    def _send(self, operation: int, updates: Sequence[Update], step: Step | None = None) -> None:
        self._operation, self._step, self._updates = operation, step, updates
        if self._strategy == "whole":
            self._average_whole()
        elif self._strategy == "owners":
            self._scatter()
        else:
            self._count([group.rows.count for group in self._groups])
            for group in self._groups:
                group.own = group.rows.take()
                (self._swap if self._strategy == "swap" else self._gather)(group)
        self._is_under_way = True

    def _receive(self) -> None:
        if self._strategy == "owners":
            self._reduce()
        elif self._strategy != "whole":
            for group, update in zip(self._groups, self._updates, strict=True):
                if any(group.counts):
                    group.rows.combine(self._received(group), update)

    def _count(self, own: Sequence[int]) -> None:
        """Learns how many rows each replica sends of each group; this one sends all others the same.

        Raises:
            PeerError: a rank does something else, or none answers.
        """
        counts = torch.empty(self._size, 1 + len(own), dtype=torch.int64, device="cpu")
        mine = torch.tensor([joined(self._operation, self._step), *own], dtype=torch.int64, device="cpu")
        self._hosts.gather(mine, counts, self._groups[0].counters, _DOING)
        self._expect(counts)

    def _count_each(self, own: Sequence[Sequence[int]]) -> None:
        """As `_count`, where this rank sends each replica another number of rows of each group."""
        operation = joined(self._operation, self._step)
        mine = torch.tensor([[operation, *counts] for counts in own], dtype=torch.int64, device="cpu")
        self._expect(self._hosts.exchange_equal(mine, self._groups[0].counters, _DOING))

    def _expect(self, counts: Tensor) -> None:
        steps, *of_groups = counts.T.tolist()
        operations, digests = parted(steps)
        if operations.count(self._operation) != len(operations):
            name = self._mesh.name
            calls = [f"step {number}" if number > 0 else f"synchronize {-number}" for number in operations]
            done = ", ".join(f"rank {name(replica)} is in {call}" for replica, call in enumerate(calls))
            raise PeerError(
                f"rank {name(self._replica)}: ranks are out of step: {done}; every rank must call forward, step and "
                "synchronize equally often and in the same order"
            )
        check_rates(self._mesh, digests, self._step)
        for group, of_group in zip(self._groups, of_groups, strict=True):
            group.counts = of_group

    def _swap(self, group: GroupMessages) -> None:
        """Sends rows to the one other replica, and its rows here, over different connections.

        For gloo asks for bytes over the connection that it sends over: behind bytes of its own the request would be
        late, and the two directions would take turns.
        """
        other = 1 - self._replica
        into = group.reserve(group.sizes(group.counts, self._replica))
        out = group.message(message_bytes(group.kinds, len(group.own)))
        group.own.write(out, group.kinds)
        for sender, channel in enumerate(self._by_sender):
            sends = sender == self._replica
            if size := len(out) if sends else len(into):
                ends = (out, into[:0]) if sends else (out[:0], into)
                sizes, nothing = [size if member == other else 0 for member in range(2)], [0, 0]
                counts = (sizes, nothing) if sends else (nothing, sizes)
                group.messages.append(channel.post(ends[0], *counts, group.counters, group.doing, ends[1]))
        group.counters.rows += len(group.own)

    def _gather(self, group: GroupMessages) -> None:
        """Sends all replicas what this one has, in messages as long as the longest."""
        if most := max(group.counts):
            if self._device is None:
                size = message_bytes(group.kinds, most)
                out, into = group.message(size), group.reserve([size] * self._size)
                group.own.write(out, group.kinds)
                group.messages = [self._channel.post_gather(out, group.counters, group.doing, into)]
            else:
                parts = group.own.padded(most)
                group.messages = [self._channel.post_gather(part, group.counters, group.doing) for part in parts]
        group.counters.rows += len(group.own)

    def _scatter(self) -> None:
        """Sends each owner the rows that are its."""
        deltas = [group.rows.take() for group in self._groups]
        places = [delta.places(self._size) for delta in deltas]
        self._count_each([[len(of_group[owner]) for of_group in places] for owner in range(self._size)])
        for group, delta, of_group in zip(self._groups, deltas, places, strict=True):
            self._scatter_group(group, delta, of_group)

    def _scatter_group(self, group: GroupMessages, delta: Delta, places: Sequence[np.ndarray]) -> None:
        mine, counts = self._replica, [len(of_owner) for of_owner in places]
        sizes_out, sizes_in = group.sizes(counts, mine), group.sizes(group.counts, mine)
        out, into = group.message(sum(sizes_out)), group.reserve(sizes_in)
        for owner, part in enumerate(out.split(sizes_out)):
            if owner != mine:
                delta.write(part, group.kinds, places[owner])
        group.own = delta.at(places[mine])
        group.messages = [self._channel.post(out, sizes_out, sizes_in, group.counters, group.doing, into)]
        group.counters.rows += len(delta) - len(group.own)

    def _reduce(self) -> None:
        """Adds up the rows whose owner is here, sends all others the result, and takes over what they have added up."""
        for group in self._groups:
            group.own = group.rows.reduce(self._received(group))
        self._count([len(group.own) for group in self._groups])
        for group in self._groups:
            self._gather(group)
        for group, update in zip(self._groups, self._updates, strict=True):
            if any(group.counts):
                for delta in self._received(group):
                    group.rows.accept(delta, update)

    def _received(self, group: GroupMessages) -> list[Delta]:
        """What each replica sent, once it is here; of this rank's own what it has."""
        came, group.messages = [message.wait() for message in group.messages], []
        if self._device is None:
            read = [
                read_message(group.received[begin:], group.kinds, count) if replica != self._replica else group.own
                for replica, (begin, count) in enumerate(zip(group.begins, group.counts, strict=True))
            ]
            return read
        slots, *values = [part.unflatten(0, (self._size, -1)) for part in came]
        return [
            Delta(slots[replica, :count], [part[replica, :count] for part in values])
            if replica != self._replica
            else group.own
            for replica, count in enumerate(group.counts)
        ]

    def _average_whole(self) -> None:
        """Averages all rows, some at a time; a device's host waits for nothing but that the others do the same."""
        self._count([0] * len(self._groups))
        for group in self._groups:
            rows = group.rows
            assert isinstance(rows, ReplicatedMeans)
            for chunk in rows.chunks():
                messages = [
                    self._channel.post_gather(table[chunk], group.counters, group.doing) for table in rows.tables
                ]
                rows.average_chunk(chunk, [message.wait() for message in messages])
                group.counters.rows += chunk.stop - chunk.start


def make_synchronizer(
    setting: Synchronization,
    exchanges: Sequence[GroupExchange] | Sequence[DeviceExchange],
    mesh: Mesh,
    device: torch.device | None = None,
    second: Any = None,
) -> ReplicaSync:
    """Keeps the replicas of some groups of tables together. Collective among a replicate group.

    Args:
        setting: how.
        exchanges: the groups'.
        mesh: the ranks that hold what this one holds, in the order of their replicas.
        device: where rows are; None: the hosts' memory.
        second: another process group of these ranks, where they are two and have one.
    """
    groups = list[GroupMessages]()
    for exchange in exchanges:
        if setting.mode == "exact":
            rows = ReplicatedSums(exchange, device)
        else:
            rows = ReplicatedMeans(exchange, mesh.rank, device, is_whole=setting.dense)
        if not setting.dense:  # whole tables need no account of what is touched
            exchange.replicated = rows
        groups.append(GroupMessages(rows, exchange.group.name, exchange.counters.synchronization, device))
    return ReplicaSync(setting, mesh, groups, device, second)


def _strategy_of(setting: Synchronization, num_replicas: int, device: torch.device | None) -> Strategy:
    if setting.dense:
        return "whole"
    if device is not None:
        return "gather"
    return "swap" if num_replicas == 2 else "owners"

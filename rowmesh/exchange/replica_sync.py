"""Synchronization of replicas: when and how the ranks of a replicate group send each other what changed.

    exact     gradients are summed over replicas before the update: the same model as with one replica
    average   replicas update for themselves; rows and moments are averaged every so many steps

A *replicate group* is the ranks that hold the same shard, one of each replica (`rowmesh.mesh.grid`). They send only
rows that were touched (`rowmesh.exchange.replica_rows`), with one of these strategies. Each adds in the order of the
replicas, so that none changes a bit:

    swap     two replicas of hosts send each other everything, in both directions at once
    owners   of more, each row has an owner, the replica of its slot modulo M, which reduces it and sends all the
             result. A rank receives (M − 1) / M · (n + U) rows, where a replica touches n and all of them U
    gather   replicas on devices, also more than two, send everything to all others, (M − 1) · n rows: to learn how
             much each owner gets, and reduces, the host would wait for the device twice more
    whole    whole tables are averaged, whether they differ or not, while all wait

Messages arrive while the program goes on to the next look-up. Hosts compare what they do and how many rows they
send, also of rows that go from device to device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh._support.faults import reach
from rowmesh.errors import ConfigurationError
from rowmesh.exchange.dynamic_means import DynamicMeans
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.handshake import Step, after_hearing, joined
from rowmesh.exchange.replica_rows import Delta, ReplicatedMeans, ReplicatedSums
from rowmesh.exchange.sync_schedule import SyncSchedule
from rowmesh.exchange.synchronizer import Synchronizer
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel, Message
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.ops.memory import Room, laid_out, laid_out_bytes
from rowmesh.tables.update_rules import Update

Strategy = Literal["swap", "owners", "gather", "whole"]

_DOING = "synchronizing replicas"
_NO_UPDATE = Update(0.0, 0.0, 0)  # averages need none


class _Group:
    """The messages of one group.

    Attributes:
        own: what this rank has itself of the rows that are sent.
        counts: rows that each replica sends this one.
        parts: on hosts, where the message of each replica goes.
        most: rows of a replica that there is room for, as far as ranks agreed on it.
    """

    def __init__(
        self,
        rows: ReplicatedSums | ReplicatedMeans,
        exchange: GroupExchange,
        device: torch.device | None,
    ) -> None:
        self.rows, self.kinds, self.counters = rows, rows.kinds, exchange.counters.synchronization
        self.own: Delta
        self.counts: list[int] = []
        self.parts: Sequence[Tensor] = ()
        self.most = 0
        self._doing = f"synchronizing the replicas of group {exchange.group.name}"
        self._messages: list[Message] = []
        self._send_buffer, self._receive_buffer = Room(device), Room(device)

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes + self._send_buffer.num_bytes + self._receive_buffer.num_bytes

    def make_room(self, most: int, num_replicas: int) -> None:
        """For messages of so many rows of every replica, and for merging them, in the host's memory."""
        size = laid_out_bytes(self.kinds, most)
        self._send_buffer.tensor(torch.uint8, size)
        self._receive_buffer.tensor(torch.uint8, size * num_replicas)
        self.rows.make_room_to_merge(most * num_replicas, num_replicas)

    def end_growing(self) -> None:
        """All ranks have made room for as many rows as replicas send now."""
        self.most = max(self.most, max(self.counts))

    def expect(self, counts: list[int]) -> None:
        """Takes how many rows each replica sends this one."""
        self.counts = counts

    def take_own(self, own: Delta) -> None:
        """Takes what this rank has itself of the rows that are sent."""
        self.own = own

    def sizes(self, counts: Sequence[int], without: int) -> list[int]:
        """Bytes of a host's messages of so many rows; 0 for one replica."""
        return [laid_out_bytes(self.kinds, n) if k != without else 0 for k, n in enumerate(counts)]

    def buffers(self, num_bytes: int, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Room on a host, uint8: for its own message, and for the message of each replica."""
        into = self._receive_buffer.tensor(torch.uint8, sum(sizes))
        self.parts = into.split(sizes)
        return self._send_buffer.tensor(torch.uint8, num_bytes), into

    def post(self, channel: Channel, out: Tensor, sizes: Sequence[int], into: Tensor, sizes_in: Sequence[int]) -> None:
        self._messages.append(channel.post(out, sizes, sizes_in, self.counters, self._doing, into))

    def post_gather(self, channel: Channel, out: Sequence[Tensor], into: Tensor | None = None) -> None:
        self._messages = [channel.post_gather(each, self.counters, self._doing, into) for each in out]

    def wait(self) -> list[Tensor]:
        came, self._messages = [message.wait() for message in self._messages], []
        return came


class ReplicaSync(Synchronizer):
    """Keeps the replicas of some groups of tables together; see `make_synchronizer`.

    Attributes:
        is_everyone: whether these are all ranks, each of which has a replica.
        is_half_done: see `Synchronizer`.
    """

    def __init__(
        self,
        setting: Synchronization,
        mesh: Mesh,
        groups: Sequence[_Group],
        device: torch.device | None,
        second: dist.ProcessGroup | None,
    ) -> None:
        self._groups, self._device = groups, device
        self._mesh, self._schedule = mesh, SyncSchedule(mesh, setting.every)
        self._replica, self._size = mesh.rank, mesh.world_size
        self._strategy = _strategy_of(setting, mesh.world_size, device)
        self._hosts = Channel.between_hosts(mesh)
        other = self._hosts if second is None else Channel(mesh, second, mesh.rank, mesh.world_size)
        self._by_sender = (self._hosts, other)  # of two
        self._channel = self._hosts if device is None else Channel.between_devices(mesh, device)
        self._operation = 0  # of the schedule
        self._step: Step | None = None
        self._updates: Sequence[Update] = ()
        self._is_under_way = False
        self._updated: int | None = 0  # after which operation rows are; None: amid an update
        self._refuses, self._refusal = False, None
        self.is_everyone = mesh.run.world_size == mesh.world_size
        self.is_half_done = False
        self._scattered: list[tuple[Delta, list[np.ndarray]]] = []  # what owners get, of each group

    _refusal: Exception | None

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(group.num_bytes for group in self._groups)

    def begin_after(self, steps: int) -> None:
        """See `Synchronizer.begin_after`."""
        self._updated = steps

    def rows_after(self, steps: int) -> bool:
        """See `Synchronizer.rows_after`."""
        return self._updated == steps

    def begin(self, updates: Sequence[Update], step: Step) -> bool:
        """See `Synchronizer.begin`."""
        due = self._schedule.after(step)
        if due is not None:
            self._send(due.number, updates, due)
        return due is not None

    def agree(self, updates: Sequence[Update], step: Step, refusal: Exception | None) -> Exception | None:
        """Learns how much replicas that are exact will send each other, and whether all take the step.

        Sums of gradients are kept, no row has changed. `post` follows, or `withdraw`. Collective.

        Args:
            updates: as for `begin`.
            step: of this rank.
            refusal: why this rank's replica does not take it.

        Returns:
            Why no replica does; None where all do.

        Raises:
            PeerError: a rank does something else, or none answers.
        """
        due = self._schedule.after(step)
        assert due is not None, "exact replicas are synchronized in every step"
        self._refusal, self._refuses = refusal, refusal is not None
        if self._refuses:
            self.withdraw()
        try:
            self._announce(due.number, updates, due)
            if self._refusal is None and self._is_growing():
                self._grow()
        except ConfigurationError as error:
            return refusal or error
        finally:
            self._refuses = False
        return self._refusal

    def _is_growing(self) -> bool:
        """Whether more rows come than in any step before, where all ranks know it alike."""
        if not self.is_everyone or self._device is not None or self._strategy == "owners":
            return False
        return any(max(group.counts) > group.most for group in self._groups)

    def _grow(self) -> None:
        """Makes room for what comes, and has ranks agree on it."""
        num_rows = [group.rows.count for group in self._groups]
        try:
            reach("replicas.grow")
            for group in self._groups:
                group.make_room(max(group.counts), self._size)
        except Exception as error:
            self._refusal, self._refuses = error, True
        self._count([num_rows])
        if self._refusal is None:
            for group in self._groups:
                group.end_growing()

    def withdraw(self) -> None:
        """Forgets the sums of a step that is not taken."""
        self._scattered = []
        for group in self._groups:
            assert isinstance(group.rows, ReplicatedSums)
            group.rows.drop()

    def start(self) -> None:
        """See `Synchronizer.start`."""
        self._send(self._schedule.call(), [_NO_UPDATE] * len(self._groups))

    def finish(self) -> None:
        """See `Synchronizer.finish`."""
        if self._is_under_way:
            self._receive()
            self._is_under_way = self.is_half_done = False
            self._updated = self._operation

    def forget(self) -> None:
        """See `Synchronizer.forget`."""
        for group in self._groups:
            group.rows.forget()

    def _send(self, operation: int, updates: Sequence[Update], step: Step | None = None) -> None:
        self._announce(operation, updates, step)
        self.post()

    def _announce(self, operation: int, updates: Sequence[Update], step: Step | None) -> None:
        """Learns how many rows come."""
        self._operation, self._step, self._updates = operation, step, updates
        if self._strategy == "owners":
            deltas = [group.rows.take() for group in self._groups]
            self._scattered = [(delta, delta.places(self._size)) for delta in deltas]
            self._count([[len(places[owner]) for _, places in self._scattered] for owner in range(self._size)])
        elif self._strategy == "whole":
            self._count([[0] * len(self._groups)])
        else:
            self._count([[group.rows.count for group in self._groups]])

    def post(self) -> None:
        """Sends rows, once replicas know how many come; what is sent travels until `finish`. Collective."""
        reach("replicas.post")
        if self._strategy == "whole":
            self._average_whole()
        elif self._strategy == "owners":
            self._scatter()
        else:
            for group in self._groups:
                group.take_own(group.rows.take())
                (self._swap if self._strategy == "swap" else self._gather)(group)
        self._is_under_way = True

    def _receive(self) -> None:
        if self._strategy == "owners":
            self._reduce()
        elif self._strategy != "whole":
            reach("replicas.receive")
            due = [(group, update, deltas, group.rows.merge(deltas)) for group, update, deltas in self._due()]
            self._updated, self.is_half_done = None, True
            for group, update, deltas, merged in due:
                group.rows.combine(deltas, merged, update)

    def _count(self, own: Sequence[Sequence[int]]) -> None:
        """Learns how many rows each replica sends this one of each group.

        Args:
            own: how many this one sends to each replica; one list where it sends all the same.
        """
        operation, counters = joined(self._operation, self._step, self._refuses), self._groups[0].counters
        mine = torch.tensor([[operation, *counts] for counts in own], dtype=torch.int64, device="cpu")
        if len(own) == 1:
            counts = self._hosts.post_gather(mine, counters, _DOING).wait()
        else:
            counts = self._hosts.exchange_equal(mine, counters, _DOING)
        operations, *of_groups = counts.T.tolist()
        self._schedule.check(operations, self._operation, self._step)
        self._refusal = after_hearing(self._mesh, operations, self._refusal)
        for group, of_group in zip(self._groups, of_groups, strict=True):
            group.expect(of_group)

    def _swap(self, group: _Group) -> None:
        """Sends rows to the one other replica, and its rows here, over different connections.

        For gloo asks for bytes over the connection that it sends over: behind bytes of its own the request would be
        late, and the two directions would take turns.
        """
        sizes_out = group.sizes([len(group.own)] * 2, self._replica)
        sizes_in, nothing = group.sizes(group.counts, self._replica), [0, 0]
        out, into = group.buffers(sum(sizes_out), sizes_in)
        group.own.write(out, group.kinds)
        for sender, channel in enumerate(self._by_sender):
            if sender == self._replica and len(out):
                group.post(channel, out, sizes_out, into[:0], nothing)
            elif sender != self._replica and len(into):
                group.post(channel, out[:0], nothing, into, sizes_in)
        group.counters.add_rows(len(group.own))

    def _gather(self, group: _Group) -> None:
        """Sends all replicas what this one has, in messages as long as the longest."""
        most = max(group.counts)
        if most and self._device is None:
            size = laid_out_bytes(group.kinds, most)
            out, into = group.buffers(size, [size] * self._size)
            group.own.write(out, group.kinds)
            group.post_gather(self._channel, [out], into)
        elif most:
            group.post_gather(self._channel, group.own.padded(most))
        group.counters.add_rows(len(group.own))

    def _scatter(self) -> None:
        """Sends each owner the rows that are its."""
        scattered, self._scattered = self._scattered, []
        for group, (delta, of_group) in zip(self._groups, scattered, strict=True):
            sizes = group.sizes([len(of_owner) for of_owner in of_group], self._replica)
            sizes_in = group.sizes(group.counts, self._replica)
            out, into = group.buffers(sum(sizes), sizes_in)
            for owner, part in enumerate(out.split(sizes)):
                if owner != self._replica:
                    delta.write(part, group.kinds, of_group[owner])
            group.take_own(delta.at(of_group[self._replica]))
            group.post(self._channel, out, sizes, into, sizes_in)
            group.counters.add_rows(len(delta) - len(group.own))

    def _reduce(self) -> None:
        """Reduces the rows whose owner is here, sends all others the result, and takes over what they reduced."""
        for group in self._groups:
            group.take_own(group.rows.reduce(self._received(group)))
        self.is_half_done = True
        self._count([[len(group.own) for group in self._groups]])
        for group in self._groups:
            self._gather(group)
        due = self._due()
        self._updated = None
        for group, update, deltas in due:
            for delta in deltas:
                group.rows.accept(delta, update)

    def _due(self) -> list[tuple[_Group, Update, list[Delta]]]:
        """The messages for all groups, before any row changes: where a replica is lost, all rows stay as they were."""
        groups = [pair for pair in zip(self._groups, self._updates, strict=True) if any(pair[0].counts)]
        return [(group, update, self._received(group)) for group, update in groups]

    def _received(self, group: _Group) -> list[Delta]:
        """The changes that each replica sent, once they are here, and this rank's own."""
        came, deltas = group.wait(), []
        if self._device is not None:
            came = [part.unflatten(0, (self._size, -1)) for part in came]
        for replica, count in enumerate(group.counts):
            if replica == self._replica:
                deltas.append(group.own)
                continue
            if self._device is None:
                slots, *values = laid_out(group.parts[replica], group.kinds, count)
            else:
                slots, *values = [part[replica, :count] for part in came]
            deltas.append(Delta(slots, values))
        return deltas

    def _average_whole(self) -> None:
        """Averages all rows, some at a time; a device's host waits for nothing but that the others do the same."""
        for group in self._groups:
            assert isinstance(group.rows, ReplicatedMeans)
            for chunk in group.rows.chunks():
                group.post_gather(self._channel, [table[chunk] for table in group.rows.tables])
                group.rows.average_chunk(chunk, group.wait())
                group.counters.add_rows(chunk.stop - chunk.start)


def make_synchronizer(
    setting: Synchronization,
    exchanges: Sequence[GroupExchange],
    mesh: Mesh,
    device: torch.device | None = None,
    second: dist.ProcessGroup | None = None,
) -> ReplicaSync | DynamicMeans:
    """Makes the synchronizer of some groups of tables. Collective among a replicate group.

    Args:
        setting: how.
        exchanges: the groups'.
        mesh: the ranks that hold what this one holds, in the order of their replicas.
        device: where rows are; None: the hosts' memory.
        second: another process group of these ranks, where they are two and have one.
    """
    if setting.mode == "average" and exchanges[0].group.takes_any_id:
        return DynamicMeans(setting, exchanges, mesh)
    groups = list[_Group]()
    for exchange in exchanges:
        if setting.mode == "exact":
            rows = ReplicatedSums(exchange.arena, device)
        else:
            rows = ReplicatedMeans(exchange.arena, device, mesh.rank, is_whole=setting.dense)
        if not setting.dense:  # whole tables need no account of what is touched
            exchange.replicate(rows)
        groups.append(_Group(rows, exchange, device))
    return ReplicaSync(setting, mesh, groups, device, second)


def _strategy_of(setting: Synchronization, num_replicas: int, device: torch.device | None) -> Strategy:
    if setting.dense:
        return "whole"
    if device is not None:
        return "gather"
    return "swap" if num_replicas == 2 else "owners"

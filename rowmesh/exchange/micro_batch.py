"""Micro-batch: how the windows of a shard group travel: by micro-batch where its transport can, else whole.

    open → final → fetch, one by one → push, one by one → update

    open    how much comes, which rows (keys), and which micro-batches use them
    final   rows that the window before does not touch: they do not change any more
    fetch   for each micro-batch, the rows that come with it
    push    for each micro-batch, the gradients that go with it
    update  when all gradients are here

Both sides of a message know the uses of every row, and so what is in it. Only the owner knows which rows are final: it
sees every rank's requests, of this window and of the one before. It says so, in one bit (on a device, a byte) a row.

On a CPU, `fetch` and `push` have process groups of their own, so that two threads can run them at once. On a device all
work is done on the current stream, which a pipeline chooses: see [Note: streams] in `rowmesh.pipeline.streams`.

Source: NestPipe §V, §IV-B (keys of two batches intersected). Differs: delta (a row is fetched once a window and pushed
once) and final rows are not in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch

from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.exchange.cores import CoreShardGroup
from rowmesh.exchange.device_collective import DeviceCollective
from rowmesh.exchange.device_group import DeviceGroupExchange
from rowmesh.exchange.group import never
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.host_group import HostGroupExchange
from rowmesh.exchange.micro_batch_group import MicroBatchGroup, OnDevice, OnHost
from rowmesh.exchange.route import ShardGroupRoute
from rowmesh.exchange.shard_group import ShardGroup
from rowmesh.exchange.window import FIRST, Form, Window, WindowGroup
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.ops.window import FINAL
from rowmesh.placement.address_map import RELAYS
from rowmesh.tables.update_rules import Update

USES = ("rows", "gradients")  # of the two process groups of hosts


def make_windows(
    shard_group: ShardGroup | CoreShardGroup, form: Form, *, finds_final: bool, verifies: bool, device: str
) -> WholeExchange | MicroBatchExchange:
    """How the windows of a shard group travel. Collective.

    Args:
        shard_group: the tables.
        form: how rows travel, where they do by micro-batch.
        finds_final: whether rows are fetched as soon as they are final.
        verifies: whether versions of rows are kept and checked.
        device: "cpu", or the name of the device that rows are on.

    Raises:
        ConfigurationError: a device cannot do this.
    """
    if obstacle := whole_obstacle(shard_group, form, verifies=verifies, device=device):
        return WholeExchange(shard_group, obstacle, device)
    assert isinstance(shard_group, ShardGroup)
    return MicroBatchExchange(shard_group, form, finds_final=finds_final, verifies=verifies, device=device)


def whole_obstacle(shard_group: ShardGroup | CoreShardGroup, form: Form, *, verifies: bool, device: str) -> str | None:
    """Why rows cannot travel by micro-batch, or None where they can; arguments as for `make_windows`.

    Raises:
        ConfigurationError: a device cannot do this.
    """
    is_on_device = device != "cpu"
    refused = ["exchange 'naive' (use 'delta' or 'unsplit')"] * (form == "naive")
    refused += ["verify (rows on a device have no versions)"] * verifies
    if is_on_device and refused:
        raise ConfigurationError(
            f"a pipeline on device {device!r} cannot do this yet: {'; '.join(refused)}; change that, or use device "
            "'cpu'"
        )
    if isinstance(shard_group, CoreShardGroup):
        return "tensor-train rows are computed where they are looked up"
    is_tiered = any(exchange.is_tiered for exchange in shard_group.exchanges)
    if is_on_device and is_tiered:
        is_alone = shard_group.mesh.world_size == 1
        return "there is one rank" if is_alone else "owners prefetch tiered rows when they are asked for them"
    name = shard_group.transport.name
    if name != "collective" and not (is_tiered and name == "local"):
        return f"the transport is {name}, which reads rows in place"
    kinds = {kind for exchange in shard_group.exchanges for kind in exchange.address_map.kinds}
    return "the plan relays rows, from host to host" if kinds & RELAYS else None


class WholeExchange:
    """Rows come with the first micro-batch, gradients go after the last one: for any transport, plan and table.

    Those of one rank do not travel: they are read and updated in place. On one device the host copies rows of tiered
    tables into the device's memory ahead, in the order of the batches (`retrieve`), on streams of their own. The stream
    of communication waits for these copies when the batch's turn comes (`fetch`), and so does the one that computes.
    The batch's update comes after all its reads, so rows that are unpinned by then are not read any more.

    Attributes:
        is_split: whether rows travel by micro-batch.
        is_tiered: whether rows are prefetched into fast memory before they are fetched.
        is_on_device: whether work is launched on a device, and may be done later.
        reason: how rows travel, and why.
    """

    is_split = False
    num_bytes = 0

    def __init__(self, shard_group: ShardGroup | CoreShardGroup, obstacle: str, device: str) -> None:
        self.is_on_device, self._shard_group = device != "cpu", shard_group
        on_device = [each for each in shard_group.exchanges if isinstance(each, DeviceGroupExchange)]
        is_alone = shard_group.mesh.world_size == 1
        self._tiered = [each for each in on_device if is_alone and each.is_tiered]
        self.is_tiered = bool(self._tiered)
        self.reason = f"rows and gradients travel whole: {obstacle}"
        if self.is_tiered:
            self.reason = f"rows are prefetched into the memory of {self._tiered[0].device}: {shard_group.reason}"
        self._updated = FIRST - 1
        self._fetched: Window | None = None  # and not updated

    def begin(self, number: int) -> None:
        """Takes the number of the first window of a run; all earlier windows are updated."""
        self._updated = number - 1
        for exchange in self._tiered:
            exchange.let_come_early(comes_early=False)  # from now on rows come in the order of the batches

    def open(self, window: Window | None, standing: int) -> list[int]:
        """No-op: owners learn what is needed when it is fetched."""
        return []

    def retrieve(self, window: Window, may_wait: Callable[[], bool]) -> None:
        """Prefetches rows into fast memory; `may_wait` says whether updates of other windows may still make room."""
        for exchange, group in zip(self._tiered, self._mine(window), strict=False):
            exchange.retrieve(group.group, may_wait)

    def final(self, window: Window) -> None:
        """No-op: no row comes before the window opens."""

    def fetch(self, window: Window, part: int) -> None:
        """Fetches all rows with the first micro-batch. Collective."""
        if part > 0:
            return
        self._fetched = window
        if self._updated != window.number - 1:
            raise RowmeshError(
                f"rows of batch {window.number - FIRST} would be read after the update of batch {self._updated - FIRST}"
            )
        self._shard_group.fetch(window.route, lambda group: None)
        for group in self._mine(window):
            group.read_fetched()

    def pack(self, window: Window, part: int) -> None:
        """No-op: gradients stay where they are."""

    def push(self, window: Window, part: int) -> None:
        """No-op: gradients travel when rows are updated."""

    def update(self, window: Window, step: Step) -> None:
        """Sends all gradients; owners update. Collective.

        Raises:
            IdRangeError: some ids, on a device, are no rows; nothing is updated.
        """
        for group in self._mine(window):
            group.gather_gradients()
        with torch.no_grad():
            self._shard_group.push([window.route], step)
        self._updated, self._fetched = window.number, None

    def forget(self, window: Window, step: Step) -> None:
        """Takes a step without the gradients of a window, which all ranks have forgotten. Collective."""
        self.unpin(window)
        self._shard_group.push([], step)
        self._updated, self._fetched = window.number, None

    def unpin(self, window: Window) -> None:
        """The rows of a window were read and will not be updated: they may leave fast memory."""
        for group in self._mine(window):
            group.group.unpin()

    def end(self) -> None:
        """Unpins the rows of a window that was opened and never updated."""
        if self._fetched is not None:
            self.unpin(self._fetched)
            self._fetched = None
        for exchange in self._tiered:
            exchange.let_come_early(comes_early=True)

    def _mine(self, window: Window) -> list[WindowGroup]:
        return [window.groups[index] for index in self._shard_group.indices]


class MicroBatchExchange:
    """Rows and gradients travel by micro-batch. Making one is collective.

    Where tables have replicas no row is final before its window opens: this replica group does not know which rows the
    others touch.

    Args:
        shard_group: the tables; on a device, of several ranks.
        form: how rows travel.
        finds_final: whether rows are fetched as soon as they are final.
        verifies: whether versions of rows are kept and checked.
        device: as for `make_windows`.

    Attributes: those of `WholeExchange`.
    """

    is_split = True

    def __init__(self, shard_group: ShardGroup, form: Form, *, finds_final: bool, verifies: bool, device: str) -> None:
        self._shard_group, self._mesh, self._form = shard_group, shard_group.mesh, form
        self._common = shard_group.transport.common
        self._finds_final = finds_final and shard_group.replicas == 1
        self.is_on_device = device != "cpu"
        self.is_tiered = any(exchange.is_tiered for exchange in shard_group.exchanges)
        self.reason = f"rows and gradients travel by micro-batch ({form})"
        self._groups: Sequence[MicroBatchGroup]
        if self.is_on_device:
            self.reason += f", over {shard_group.reason}"
            self._hosts: Channel = self._devices.hosts
            self._groups = [OnDevice(each, self._devices.channel, form) for each in self._devices.groups]
        else:
            rows, gradients = (_channel(shard_group.mesh, use) for use in USES)
            self._hosts, common = rows, self._common
            how = (rows, gradients, shard_group.mesh.ranks_per_node, form, common)
            on_host = [each for each in shard_group.exchanges if isinstance(each, HostGroupExchange)]
            self._groups = [OnHost(exchange, *how, verifies=verifies) for exchange in on_host]
        ends = list(accumulate((each.num_sizes for each in self._groups), initial=1))
        self._columns = list(map(slice, ends, ends[1:]))  # of the handshake, of each group
        self._handshake = torch.zeros(shard_group.mesh.world_size, ends[-1], dtype=torch.int64, device="cpu")
        self._open: dict[int, Window] = {}  # by number, what was opened and not updated

    @property
    def _devices(self) -> DeviceCollective:
        """The transport, between devices."""
        assert isinstance(self._shard_group.transport, DeviceCollective)
        return self._shard_group.transport

    @property
    def num_bytes(self) -> int:
        """Memory beside that of windows."""
        return self._handshake.nbytes + sum(group.num_bytes for group in self._groups)

    def begin(self, number: int) -> None:
        """All windows so far are updated, or will never be. Collective."""
        self._shard_group.flush()
        for group in self._groups:
            group.begin()

    def open(self, window: Window | None, standing: int) -> list[int]:
        """Sends owners what is needed, and by which micro-batches. Collective; a device's host waits for sizes.

        Args:
            window: of this rank; None where it has none.
            standing: the number of the window, or why there is none (`RankState`).

        Returns:
            The standings of all ranks. Where they differ, or there is no window, nothing else was sent.

        Raises:
            RefusedError: a rank opens, on a device, a batch with ids that are no rows.
            IdRangeError: this rank does.
        """
        sizes = self._exchange_sizes(window, standing)
        standings = sizes[:, 0].tolist()
        if window is None or any(each != standing for each in standings):
            return standings
        self._expect(window, sizes)
        keys = [each.post_keys(group) for each, group in self._pairs(window)]
        for (each, group), messages in zip(self._pairs(window), keys, strict=True):
            each.take_keys(group, messages)
            if not each.is_tiered:
                each.hold(group, window.number, never, finds_final=self._finds_final)
        self._open[window.number] = window
        if not self._finds_final:
            self._sort(window)
        return standings

    def _exchange_sizes(self, window: Window | None, standing: int) -> np.ndarray:
        """Sends each rank how many requests it gets of every group, behind where this rank stands."""
        sizes = self._handshake.numpy()
        sizes[:, 0] = standing
        if window is not None:
            for (each, group), columns in zip(self._pairs(window), self._columns, strict=True):
                each.write_sizes(group, sizes[:, columns])
        return self._hosts.exchange_equal(self._handshake, self._common, "opening a window").numpy()

    def _expect(self, window: Window, sizes: np.ndarray) -> None:
        """Takes how many requests come from every rank."""
        if self.is_on_device:
            self._devices.exchange_counts(ShardGroupRoute(window.route, self._shard_group.indices))
        for (each, group), columns in zip(self._pairs(window), self._columns, strict=True):
            each.expect(group, sizes[:, columns])

    def retrieve(self, window: Window, may_wait: Callable[[], bool]) -> None:
        """Prefetches requested rows into fast memory; `may_wait` as for `WholeExchange.retrieve`."""
        for each, group in self._pairs(window):
            if each.is_tiered:
                each.hold(group, window.number, may_wait, finds_final=self._finds_final)

    def final(self, window: Window) -> None:
        """Fetches rows that the window before does not touch. Collective; a device's host waits for sizes."""
        if not self._finds_final:
            return
        before = self._open.get(window.number - 1)
        others = [None] * len(self._groups) if before is None else [group for _, group in self._pairs(before)]
        pairs = self._pairs(window)
        posted = [each.post_final(group, other) for (each, group), other in zip(pairs, others, strict=True)]
        for (_, group), message in zip(pairs, posted, strict=True):
            group.memory.take_final(message.wait())
        self._sort(window)
        self._fetch(window, FINAL)

    def _sort(self, window: Window) -> None:
        """Sorts what travels by phase; all sizes that a device knows come to the host in one copy."""
        counts = [count for _, group in self._pairs(window) for count in group.memory.sort()]
        numbers = iter(torch.cat(counts).tolist() if counts else ())
        for _, group in self._pairs(window):
            group.memory.make_room(numbers)

    def fetch(self, window: Window, part: int) -> None:
        """Fetches the rows that come with a micro-batch. Collective."""
        self._fetch(window, part + 1)

    def _fetch(self, window: Window, phase: int) -> None:
        posted = [each.post_rows(group, phase) for each, group in self._pairs(window)]
        for message in posted:
            message.wait()

    def pack(self, window: Window, part: int) -> None:
        """Puts gradients aside that the next micro-batch would change: those of one micro-batch alone."""
        if self._form == "naive":
            self._pack(window, part)

    def _pack(self, window: Window, part: int) -> None:
        for _, group in self._trained(window):
            group.memory.pack_gradients(part + 1)

    def push(self, window: Window, part: int) -> None:
        """Sends the gradients that go with a micro-batch. Collective."""
        if self._form != "naive":
            self._pack(window, part)
        pairs = self._trained(window)
        posted = [each.post_gradients(group, part + 1) for each, group in pairs]
        for (_, group), message in zip(pairs, posted, strict=True):
            message.wait()
            group.memory.take_gradients(part + 1)

    def update(self, window: Window, step: Step) -> None:
        """Updates the rows of this rank, their copies and their replicas. Collective."""
        updates, window = self._shard_group.updates(step), self._open.pop(window.number)
        if any(each.has_copies for each in self._groups):
            requests = [request for each, group in self._pairs(window) for request in each.requests(group)]
            self._devices.count_copies(requests)
        for (each, group), update in zip(self._pairs(window), updates, strict=True):
            each.update(group, update, window.number)
        self._synchronize(updates, step)

    def forget(self, window: Window, step: Step) -> None:
        """Takes a step without the gradients of a window, which came and which all ranks have forgotten. Collective."""
        updates, window = self._shard_group.updates(step), self._open.pop(window.number)
        for each, group in self._pairs(window):
            each.forget(group, window.number)
        self._synchronize(updates, step)

    def _synchronize(self, updates: Sequence[Update], step: Step) -> None:
        self._shard_group.begin_synchronization(updates, step)
        self._shard_group.flush()

    def unpin(self, window: Window) -> None:
        """The rows of a window were read and will not be updated: they may leave fast memory."""
        for _, group in self._pairs(window):
            group.group.unpin()

    def end(self) -> None:
        """Forgets what was opened and never updated."""
        for window in self._open.values():
            self.unpin(window)
        self._open.clear()

    def _pairs(self, window: Window) -> list[tuple[MicroBatchGroup, WindowGroup]]:
        return list(zip(self._groups, [window.groups[index] for index in self._shard_group.indices], strict=True))

    def _trained(self, window: Window) -> list[tuple[MicroBatchGroup, WindowGroup]]:
        return [(each, group) for each, group in self._pairs(window) if group.group.exchange.sums_gradients]


Windows = WholeExchange | MicroBatchExchange


def _channel(mesh: Mesh, use: str) -> Channel:
    if mesh.world_size == 1:
        return Channel.between_hosts(mesh)
    group = mesh.subgroup([range(mesh.world_size)], use)
    return Channel(mesh, group, mesh.rank, mesh.world_size, is_direct=not mesh.is_one_host)

"""Micro-batch: windows whose rows and gradients travel by micro-batch, over the messages of a transport.

Both sides of a message know the uses of every row, and so what is in it. Only the owner knows which rows are final: it
sees every rank's requests, of this window and of the one before. It says so, in one bit (on a device, a byte) a row.

On a CPU, `fetch` and `push` have process groups of their own, so that two threads can run them at once. On a device all
work is done on the current stream, which a pipeline chooses: see [Note: streams] in `rowmesh.pipeline.streams`.

Source: NestPipe §V, §IV-B (keys of two batches intersected). Differs: delta (a row is fetched once a window and pushed
once) and final rows are not in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from rowmesh._support.counters import CommonCounters
from rowmesh.exchange.group import GroupExchange, never
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.host_group import HostGroupExchange
from rowmesh.exchange.micro_batch_group import MicroBatchGroup, OnHost
from rowmesh.exchange.replica_keys import ReplicaKeys
from rowmesh.exchange.window import Window, WindowGroup
from rowmesh.exchange.windows import Collected, StoredTables, WindowOptions, Windows
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.ops.window import FINAL
from rowmesh.placement.address_map import RELAYS

USES = ("rows", "gradients")  # of the two process groups of hosts


class MicroBatchWindows(Windows):
    """Windows whose rows and gradients travel by micro-batch.

    Exact replicas tell each other which rows a window changes, where rows are fetched as soon as they are final, or are
    tiered. Averaged ones do not: after an average no row is what it was, so that none is final before.

    Args:
        tables, options: as for `Windows`.
        groups: the messages of each group.
        hosts: brings the sizes of requests.
        common: counts messages that serve all groups.
        replicas: tells other replicas which rows change; None where they need not know.
    """

    is_split = True

    def __init__(
        self,
        tables: StoredTables,
        options: WindowOptions,
        groups: Sequence[MicroBatchGroup],
        hosts: Channel,
        common: CommonCounters,
        replicas: ReplicaKeys | None = None,
    ) -> None:
        super().__init__(tables, options, "")
        self._stored, self._form, self._groups = tables, options.form, groups
        self._hosts, self._common = hosts, common
        self._replicas, self.tells_replicas = replicas, replicas is not None
        self._finds_final = options.finds_final and (tables.replicas == 1 or self.tells_replicas)
        self.is_tiered = any(each.is_tiered for each in groups)
        self.reason = f"rows and gradients travel by micro-batch ({options.form})"
        ends = list(accumulate((each.num_sizes for each in groups), initial=1))
        self._columns = list(map(slice, ends, ends[1:]))  # of the handshake, of each group
        self._handshake = torch.zeros(tables.mesh.world_size, ends[-1], dtype=torch.int64, device="cpu")
        self._open: dict[int, Window] = {}  # by number, what was opened and not updated

    @property
    def num_bytes(self) -> int:
        """Memory beside that of windows."""
        return self._handshake.nbytes + sum(group.num_bytes for group in self._groups)

    def begin(self, number: int) -> None:
        """See `Windows.begin`."""
        self._stored.flush()
        for group in self._groups:
            group.begin()

    def open(self, window: Window | None, state: int) -> list[int]:
        """Sends owners what is needed, and by which micro-batches. Collective; a device's host waits for sizes.

        Args:
            window: of this rank; None where it has none.
            state: the number of the window, or why there is none (`RankState`).

        Returns:
            The states of all ranks of this replica, or of all replicas where these are told. There is no such window
            where they differ.

        Raises:
            RefusedError: a rank opens, on a device, a batch with ids that are no rows.
            IdRangeError: this rank does.
        """
        sizes = self._exchange_sizes(window, state)
        states = sizes[:, 0].tolist()
        pairs = [] if window is None or any(each != state for each in states) else self._pairs(window)
        if window is not None and pairs:
            self._expect(window, sizes)
        keys = [each.post_keys(group) for each, group in pairs]
        for (each, group), messages in zip(pairs, keys, strict=True):
            each.take_keys(group, messages)
        if self._replicas is not None:
            states, others = self._replicas(states, [each.merged_slots(group) for each, group in pairs])
            for (each, group), slots in zip(pairs, others or (), strict=False):
                each.take_others(group, slots)
        if window is None or any(each != state for each in states):
            return states
        for each, group in pairs:
            if not each.is_tiered:
                each.hold(group, window.number, never, finds_final=self._finds_final)
        self._open[window.number] = window
        if not self._finds_final:
            self._sort(window)
        return states

    def _exchange_sizes(self, window: Window | None, state: int) -> np.ndarray:
        """Sends each rank how many requests it gets of every group, behind the state of this rank."""
        sizes = self._handshake.numpy()
        sizes[:, 0] = state
        if window is not None:
            for (each, group), columns in zip(self._pairs(window), self._columns, strict=True):
                each.write_sizes(group, sizes[:, columns])
        return self._hosts.exchange_equal(self._handshake, self._common, "opening a window").numpy()

    def _expect(self, window: Window, sizes: np.ndarray) -> None:
        """Takes how many requests come from every rank."""
        for (each, group), columns in zip(self._pairs(window), self._columns, strict=True):
            each.expect(group, sizes[:, columns])

    def pin(self, window: Window, may_wait: Callable[[], bool]) -> None:
        """Puts requested rows of tiered tables into fast memory; `may_wait` as for `Windows.pin`."""
        for each, group in self._pairs(window):
            if each.is_tiered:
                each.hold(group, window.number, may_wait, finds_final=self._finds_final)

    def early(self, window: Window) -> None:
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

    def squares(self, window: Window, guests: Mapping[str, np.ndarray]) -> dict[int, float]:
        """Owners add gradients up; an update that follows takes these sums. See `Windows.squares`."""
        return {
            index: self._stored.squares(*each.sums(group, guests))
            for index, (each, group) in zip(self._tables.indices, self._pairs(window), strict=True)
            if not group.group.exchange.is_frozen
        }

    def collect(self, window: Window, step: Step, *, forgets: bool) -> Collected:
        """Gradients have come with the micro-batches; owners add them up as they update."""
        return Collected(window, step, forgets)

    def withdraw(self, collected: Collected) -> None:
        """No-op: the window stays open."""

    def apply(self, collected: Collected) -> None:
        """Updates the rows of this rank, their copies and their replicas. Collective."""
        window, step, forgets = collected
        updates, number = self._stored.updates(step), window.number
        del self._open[number]
        for (each, group), update in zip(self._pairs(window), updates, strict=True):
            if forgets:
                each.forget(group, number)
            else:
                each.update(group, update, number)
        self._stored.begin_synchronization(updates, step)
        self._stored.flush()
        for each, group in self._pairs(window):
            if each.is_tiered:  # rows that waited for other replicas
                group.group.unpin()

    def skip(self, window: Window) -> None:
        """See `Windows.skip`."""
        del self._open[window.number]
        for each, group in self._pairs(window):
            each.forget(group, window.number)

    def end(self) -> None:
        """Drops what was opened and never updated."""
        for window in self._open.values():
            self.drop(window)
        self._open.clear()

    def _pairs(self, window: Window) -> list[tuple[MicroBatchGroup, WindowGroup]]:
        return list(zip(self._groups, self._mine(window), strict=True))

    def _trained(self, window: Window) -> list[tuple[MicroBatchGroup, WindowGroup]]:
        return [(each, group) for each, group in self._pairs(window) if group.group.exchange.sums_gradients]


def windows_on_hosts(
    tables: StoredTables, options: WindowOptions, exchanges: Sequence[GroupExchange], common: CommonCounters
) -> Windows:
    """Windows between hosts, by micro-batch but where the plan relays rows. Collective.

    Args:
        tables, options: as for `Windows`.
        exchanges: of all groups.
        common: counts messages that serve all groups.
    """
    if {kind for exchange in exchanges for kind in exchange.address_map.kinds} & RELAYS:
        return Windows(tables, options, "the plan relays rows, from host to host")
    rows, gradients = (_channel(tables.mesh, use) for use in USES)
    on_host = [each for each in exchanges if isinstance(each, HostGroupExchange)]
    how = (rows, gradients, tables.mesh.ranks_per_node, options.form, common)
    groups = [OnHost(exchange, *how, verifies=options.verifies) for exchange in on_host]
    needs_keys = options.finds_final or any(each.is_tiered for each in groups)
    return MicroBatchWindows(tables, options, groups, rows, common, tables.replica_keys() if needs_keys else None)


def _channel(mesh: Mesh, use: str) -> Channel:
    if mesh.world_size == 1:
        return Channel.between_hosts(mesh)
    group = mesh.subgroup([range(mesh.world_size)], use)
    return Channel(mesh, group, mesh.rank, mesh.world_size, is_direct=not mesh.is_one_host)

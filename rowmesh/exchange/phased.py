"""Phased exchange: the rows of a window travel with the micro-batches that need them, by the collective transport.

    open    how much comes, which rows (keys), and which micro-batches use them
    final   rows that the window before does not touch: they do not change any more
    fetch   for each micro-batch, the rows that come with it
    push    for each micro-batch, the gradients that go with it
    update  when all gradients are here

Both sides of a message know the uses of every row, and so what is in it. Which rows are final the stop alone knows, who
sees what all ranks ask of it, in this window and in the one before; it says so, in one bit a row.

Fetching and pushing have process groups of their own, so that two threads can do them at once.

Source: NestPipe §V. Differs: delta (a row is fetched once a window and pushed once) and final rows are not in the
paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rowmesh.errors import PeerError
from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.handshake import Step, check_rates, joined, parted
from rowmesh.exchange.phased_group import FIRST, PhasedGroup, Travel
from rowmesh.exchange.window import Form, Window, WindowGroup
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.ops.window import FINAL
from rowmesh.optim.rules import Update
from rowmesh.placement.address_map import RELAYS

NO_WINDOW = 0  # instead of the number of one
USES = ("rows", "gradients")  # of the two process groups


def phased_obstacle(transport: str, kinds: Sequence[str], *, is_tiered: bool = False) -> str | None:
    """Why the rows of some tables cannot travel by micro-batch, or None where they can."""
    if transport != "collective" and not (is_tiered and transport == "local"):
        return f"the transport is {transport}, which reads rows in place"
    return "the plan relays rows, from host to host" if set(kinds) & RELAYS else None


class PhasedExchange:
    """The windows of some groups. Making one is collective.

    Args:
        mesh: the ranks.
        exchanges: of the groups.
        common: counts what serves all groups.
        form: how rows travel.
        finds_final: whether rows are fetched as soon as they are final.
        verifies: whether versions of rows are kept and checked.
    """

    def __init__(
        self,
        mesh: Mesh,
        exchanges: Sequence[GroupExchange],
        common: CommonCounters,
        form: Form,
        *,
        finds_final: bool,
        verifies: bool,
    ) -> None:
        self._mesh, self._common, self._finds_final = mesh, common, finds_final
        self._rows, self._gradients = (_channel(mesh, use) for use in USES)
        channels = (self._rows, self._gradients, mesh.ranks_per_node, form)
        self._groups = [PhasedGroup(exchange, *channels, common, verifies=verifies) for exchange in exchanges]
        width = 1 + sum(2 * exchange.num_segments + 1 for exchange in exchanges)
        self._handshake = torch.zeros(mesh.world_size, width, dtype=torch.int64, device="cpu")

    @property
    def num_bytes(self) -> int:
        """Memory beside that of windows."""
        return self._handshake.nbytes + sum(group.num_bytes for group in self._groups)

    def begin(self) -> None:
        """All windows so far are updated, or will never be."""
        for group in self._groups:
            group.begin()

    def open(self, window: Window, groups: Sequence[WindowGroup]) -> list[Travel]:
        """Tells the stops which rows are needed; returns what will travel, one for each group."""
        counts = self._exchange_counts(window, groups)
        pairs = list(zip(self._groups, groups, strict=True))
        keys = [each.post_keys(group, *asked) for (each, group), asked in zip(pairs, counts, strict=True)]
        finds_final = self._finds_final
        return [
            each.settle(group, works, window.number, window.num_parts, finds_final=finds_final)
            for (each, group), works in zip(pairs, keys, strict=True)
        ]

    def retrieve(self, travels: Sequence[Travel], number: int, may_wait: Callable[[], bool]) -> None:
        """Brings the rows that were asked for into fast memory, where they are in tiers; see `GroupExchange.hold`."""
        for group, travel in zip(self._groups, travels, strict=True):
            if group.exchange.is_tiered:
                group.hold(travel, number, may_wait, finds_final=self._finds_final)

    def fetch_final(self, travels: Sequence[Travel]) -> None:
        """Fetches the rows that the window before does not touch."""
        if not self._finds_final:
            return
        pairs = list(zip(self._groups, travels, strict=True))
        bits = [group.post_final(travel) for group, travel in pairs]
        for (group, travel), work in zip(pairs, bits, strict=True):
            group.learn_final(travel, work)
        self.fetch(travels, FINAL)

    def fetch(self, travels: Sequence[Travel], phase: int) -> None:
        """Fetches the rows that come in a phase."""
        pairs = list(zip(self._groups, travels, strict=True))
        works = [group.post_rows(travel, phase) for group, travel in pairs]
        for (group, travel), work in zip(pairs, works, strict=True):
            group.place_rows(travel, phase, work)

    def pack(self, travels: Sequence[Travel], phase: int) -> None:
        """Copies the gradients that go in a phase; the next micro-batch may begin its own after that."""
        for group, travel in zip(self._groups, travels, strict=True):
            group.pack_gradients(travel, phase)

    def push(self, travels: Sequence[Travel], phase: int) -> None:
        """Sends the packed gradients of a phase."""
        pairs = list(zip(self._groups, travels, strict=True))
        works = [group.post_gradients(travel, phase) for group, travel in pairs]
        for (group, travel), work in zip(pairs, works, strict=True):
            group.add_gradients(travel, phase, work)

    def update(self, travels: Sequence[Travel], updates: Sequence[Update], number: int) -> None:
        """Updates the rows of this rank."""
        for group, travel, update in zip(self._groups, travels, updates, strict=True):
            group.update(travel, update, number)

    def _exchange_counts(self, window: Window, groups: Sequence[WindowGroup]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Offsets and accesses of what each rank asks of this one, for every group."""
        out, column, cuts = self._handshake.numpy(), 1, []
        out[:, 0] = joined(window.number, window.step_before)
        for each in groups:
            outbox, segments = each.group.look_up.send, each.group.exchange.num_segments
            split, end = column + segments + 1, column + 2 * segments + 1
            out[:, column:split], out[:, split:end] = outbox.segment_offsets, outbox.accesses
            cuts.append((slice(column, split), slice(split, end)))
            column = end
        counts = self._rows.exchange_equal(self._handshake, self._common, "opening a window").numpy()
        check_numbers(self._mesh, counts[:, 0].tolist(), window.number, window.step_before)
        return [(counts[:, offsets], counts[:, accesses]) for offsets, accesses in cuts]


def check_numbers(mesh: Mesh, told: list[int], number: int, step: Step | None) -> None:
    """Raises PeerError where a rank opens another window than this one, or none where this one opens one.

    Args:
        mesh: the ranks.
        told: what each has `joined`.
        number: of this rank's window.
        step: of the last batch before it that is stepped for sure.

    Raises:
        ConfigurationError: ranks had different learning rates in that step.
    """
    numbers, digests = parted(told)
    if numbers.count(number) != len(numbers):
        name = mesh.name
        opened = ["has no more" if other == NO_WINDOW else f"opens batch {other - FIRST}" for other in numbers]
        windows = ", ".join(f"rank {name(rank)} {what}" for rank, what in enumerate(opened))
        raise PeerError(
            f"rank {name(mesh.rank)}: ranks are out of step: {windows}; every rank must bring equally many batches to "
            "its pipeline"
        )
    check_rates(mesh, digests, step)


def _channel(mesh: Mesh, use: str) -> Channel:
    if mesh.world_size == 1:
        return Channel.between_hosts(mesh)
    group = mesh.subgroup([range(mesh.world_size)], use)
    return Channel(mesh, group, mesh.rank, mesh.world_size, is_direct=not mesh.is_one_host)

"""Device windows: how the windows of a part on a device travel.

Nothing here knows of streams: every stage is done on the current one, which a pipeline chooses, after what the schedule
lets it come after. See [Note: streams] in `rowmesh.pipeline.streams`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rowmesh.exchange.cores import CorePart
from rowmesh.exchange.device.phased import FINAL, DevicePhasedGroup, DeviceTravel
from rowmesh.exchange.device.window import DeviceWindow, DeviceWindowGroup
from rowmesh.exchange.device_collective import DeviceCollective
from rowmesh.exchange.handshake import Step, joined
from rowmesh.exchange.phased import NO_WINDOW, check_numbers, phased_obstacle
from rowmesh.exchange.route import RoutePart
from rowmesh.exchange.shard_group import ShardGroup
from rowmesh.exchange.window import Form
from rowmesh.exchange.windows import COMPUTED, WholeWindows


class WholeDeviceWindows(WholeWindows[DeviceWindow]):
    """Rows come with the first micro-batch, gradients go after the last one: for any transport, plan and table.

    Those of one rank do not travel: they are read and updated in place.
    """

    is_on_device = True

    def __init__(self, part: ShardGroup | CorePart, obstacle: str) -> None:
        super().__init__(part, obstacle)
        self._fetched: DeviceWindow | None = None  # and not updated

    def fetch(self, window: DeviceWindow, part: int) -> None:
        """Brings all rows with the first micro-batch. Collective."""
        if part == 0:
            self._fetched = window
        super().fetch(window, part)
        if part == 0:
            for group in self._mine(window):
                group.read_fetched()

    def update(self, window: DeviceWindow, step: Step) -> None:
        """Sends all gradients; owners update. Collective.

        Raises:
            IdRangeError: some ids are no rows; nothing is updated.
        """
        for group in self._mine(window):
            group.hand_gradients_over()
        super().update(window, step)
        self._fetched = None

    def let_go(self, window: DeviceWindow) -> None:
        """Gives rows up that the current stream has read and nobody will update, where they are held."""
        for group in self._mine(window):
            group.group.unpin()

    def end(self) -> None:
        """What was fetched and never updated may leave fast memory, though the program may keep the batch."""
        if self._fetched is not None:
            self.let_go(self._fetched)
            self._fetched = None

    def _mine(self, window: DeviceWindow) -> list[DeviceWindowGroup]:
        return [window.groups[index] for index in self._part.indices]


class PhasedDeviceWindows:
    """Several ranks: rows and gradients travel by micro-batch.

    Where tables have replicas no row is final before its window opens: what other replica groups touch is known to them
    alone.

    Args:
        part: on several ranks.
        form: how rows travel, "delta" or "unsplit".
        finds_final: whether rows are fetched as soon as they are final.
    """

    is_phased, is_tiered, is_on_device = True, False, True
    num_bytes = 0

    def __init__(self, part: ShardGroup, form: Form, *, finds_final: bool) -> None:
        assert isinstance(part.transport, DeviceCollective)
        self.reason = f"rows and gradients travel by micro-batch ({form}), over {part.reason}"
        self._part, self._transport = part, part.transport
        self._finds_final = finds_final and part.replicas == 1
        self._numbers = torch.zeros(part.mesh.world_size, 1, dtype=torch.int64, device="cpu")
        self._groups = [DevicePhasedGroup(each, part.transport.channel, form) for each in part.transport.groups]
        self._travels: dict[int, list[DeviceTravel]] = {}

    def begin(self, number: int) -> None:
        """What came before is updated. Collective."""
        self._part.flush()

    def open(self, window: DeviceWindow) -> None:
        """Tells owners what is needed, and by which micro-batches. Collective; the host waits for sizes.

        Raises:
            PeerError: a rank brings another batch, or one with ids that are no rows.
            IdRangeError: this rank does.
        """
        self._agree(window.number, window.step_before)
        self._transport.exchange_counts(RoutePart(window.route, self._part.indices))
        pairs = [(each, window.groups[index]) for each, index in zip(self._groups, self._part.indices, strict=True)]
        keys = [each.post_keys(group) for each, group in pairs]
        travels = [each.take_keys(group, works) for (each, group), works in zip(pairs, keys, strict=True)]
        self._travels[window.number] = travels
        if not self._finds_final:
            self._settle(travels, [None] * len(travels))

    def pass_over(self) -> None:
        """Tells the others that there is no window; those who have one would wait amid messages of devices. Collective.

        Raises:
            PeerError: a rank has one.
        """
        self._agree(NO_WINDOW)

    def _agree(self, number: int, step: Step | None = None) -> None:
        self._numbers[:] = joined(number, step)
        told = self._transport.hosts.exchange_equal(self._numbers, self._transport.common, "opening a window")
        check_numbers(self._part.mesh, told[:, 0].tolist(), number, step)

    def retrieve(self, window: DeviceWindow, may_wait: Callable[[], bool]) -> None:
        """Rows are where they are."""

    def final(self, window: DeviceWindow) -> None:
        """Fetches rows that the window before does not touch. Collective; the host waits for sizes."""
        if not self._finds_final:
            return
        travels = self._travels[window.number]
        before = self._travels.get(window.number - 1, [None] * len(travels))
        bits, told = [], []
        for each, travel, other in zip(self._groups, travels, before, strict=True):
            bits.append(each.find_final(travel, other))
            told.append(each.post_final(travel, bits[-1]))
        self._settle(travels, [(message.wait(), mine) for message, mine in zip(told, bits, strict=True)])
        self._fetch(travels, FINAL)

    def _settle(
        self, travels: Sequence[DeviceTravel], final: Sequence[tuple[torch.Tensor, torch.Tensor] | None]
    ) -> None:
        """Sorts what travels by phase, and brings all sizes to the host in one copy."""
        counts = [
            count
            for each, travel, bits in zip(self._groups, travels, final, strict=True)
            for count in each.sort(travel, bits)
        ]
        numbers = iter(torch.cat(counts).tolist() if counts else ())
        for each, travel in zip(self._groups, travels, strict=True):
            each.settle(travel, numbers)

    def fetch(self, window: DeviceWindow, part: int) -> None:
        """Fetches the rows that come with a micro-batch. Collective."""
        self._fetch(self._travels[window.number], part + 1)

    def _fetch(self, travels: Sequence[DeviceTravel], phase: int) -> None:
        posted = [each.post_rows(travel, phase) for each, travel in zip(self._groups, travels, strict=True)]
        for message in posted:
            message.wait()

    def pack(self, window: DeviceWindow, part: int) -> None:
        """Gradients of a row do not change any more when they go."""

    def push(self, window: DeviceWindow, part: int) -> None:
        """Sends the gradients that go with a micro-batch. Collective."""
        pairs = zip(self._groups, self._travels[window.number], strict=True)
        posted = [each.post_gradients(travel, part) for each, travel in pairs]
        for message in posted:
            message.wait()

    def update(self, window: DeviceWindow, step: Step) -> None:
        """Updates the rows of this rank, their copies and their replicas. Collective."""
        updates, travels = self._part.updates(step), self._travels.pop(window.number)
        if any("replicated" in each.exchange.lane_kinds for each in self._groups):
            self._transport.count_copies([each for travel in travels for each in travel.window.group.lanes])
        for each, travel, update in zip(self._groups, travels, updates, strict=True):
            each.update(travel, update)
        self._part.begin_synchronization(updates, step)
        self._part.flush()

    def let_go(self, window: DeviceWindow) -> None:
        """Nothing is held."""

    def end(self) -> None:
        """What was opened and never updated is forgotten."""
        self._travels.clear()


def whole_obstacle(part: ShardGroup | CorePart) -> str | None:
    """Why the rows of some tables cannot travel by micro-batch, or None where they can."""
    if isinstance(part, CorePart):
        return COMPUTED
    if any(exchange.is_tiered for exchange in part.exchanges):
        return "owners bring tiered rows to their devices when they are asked"
    exchanges = part.exchanges
    return phased_obstacle(part.transport.name, [kind for each in exchanges for kind in each.lane_kinds])

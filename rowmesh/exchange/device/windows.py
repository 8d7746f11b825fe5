"""Device windows: how the windows of a part on a device travel.

Nothing here knows of streams: every stage is done on the current one, which a pipeline chooses, after what the schedule
lets it come after. See [Note: streams] in `rowmesh.pipeline.streams`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rowmesh.exchange.device.checks import Unread
from rowmesh.exchange.device.collective import DeviceCollective
from rowmesh.exchange.device.part import DevicePart
from rowmesh.exchange.device.phased import FINAL, DevicePhasedGroup, DeviceTravel
from rowmesh.exchange.device.route import DeviceRoutePart
from rowmesh.exchange.device.window import DeviceWindow
from rowmesh.exchange.phased import NO_WINDOW, check_numbers
from rowmesh.exchange.window import Form


class DeviceWindows:
    """What both kinds have in common; see `Windows` of `rowmesh.exchange.windows`."""

    is_tiered = False
    is_on_device = True
    num_bytes = 0

    def __init__(self, part: DevicePart) -> None:
        self._part = part

    def retrieve(self, window: DeviceWindow, may_wait: Callable[[], bool]) -> None:
        """Rows are where they are."""

    def pack(self, window: DeviceWindow, part: int) -> None:
        """Gradients of a row do not change any more when they go."""

    def pass_over(self) -> None:
        """Nobody waits."""

    def let_go(self, window: DeviceWindow) -> None:
        """Nothing is held."""


class WholeDeviceWindows(DeviceWindows):
    """One rank: rows are read and updated in place."""

    is_phased = False

    def __init__(self, part: DevicePart) -> None:
        super().__init__(part)
        self.reason = f"nothing travels: {part.reason}"
        self._unread: dict[int, Unread] = {}

    def begin(self, number: int) -> None:
        """Nothing is under way."""

    def open(self, window: DeviceWindow) -> None:
        """Sends what the host has to know of the batch on its way."""
        self._unread[window.number] = unread = Unread(rank=0)
        unread.add(DeviceRoutePart(window.route, self._part.indices))

    def final(self, window: DeviceWindow) -> None:
        """Rows are where they are."""

    def fetch(self, window: DeviceWindow, part: int) -> None:
        """Rows are where they are."""

    def push(self, window: DeviceWindow, part: int) -> None:
        """Gradients are where they are."""

    def update(self, window: DeviceWindow, lrs: Sequence[float], step: int) -> None:
        """Updates rows; looks at the batch's ids before, which were counted when it was opened.

        Raises:
            IdRangeError: some are no rows; nothing is updated.
        """
        self._unread.pop(window.number).read()
        for index in self._part.indices:
            window.groups[index].group.gradients = window.groups[index].gradients()
        self._part.push([window.route], lrs, step)

    def end(self) -> None:
        """What was opened and never updated is forgotten."""
        self._unread.clear()


class PhasedDeviceWindows(DeviceWindows):
    """Several ranks: rows and gradients travel by micro-batch.

    Args:
        part: on several ranks.
        form: how rows travel, "delta" or "unsplit".
        finds_final: whether rows are fetched as soon as they are final.
    """

    is_phased = True

    def __init__(self, part: DevicePart, form: Form, *, finds_final: bool) -> None:
        super().__init__(part)
        assert isinstance(part.transport, DeviceCollective)
        self.reason = f"rows and gradients travel by micro-batch ({form}), over {part.reason}"
        self._transport, self._finds_final = part.transport, finds_final
        self._numbers = torch.zeros(part.mesh.world_size, 1, dtype=torch.int64, device="cpu")
        self._groups = [DevicePhasedGroup(each, part.transport.channel, form) for each in part.transport.groups]
        self._travels: dict[int, list[DeviceTravel]] = {}

    def begin(self, number: int) -> None:
        """Nothing is under way."""
        self._travels.clear()

    def open(self, window: DeviceWindow) -> None:
        """Tells owners what is needed, and by which micro-batches. Collective; the host waits for sizes.

        Raises:
            PeerError: a rank brings another batch, or one with ids that are no rows.
            IdRangeError: this rank does.
        """
        self._agree(window.number)
        self._transport.exchange_counts(DeviceRoutePart(window.route, self._part.indices))
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

    def _agree(self, number: int) -> None:
        self._numbers[:] = number
        told = self._transport.hosts.exchange_equal(self._numbers, self._transport.common, "opening a window")
        check_numbers(self._part.mesh, told[:, 0].tolist(), number)

    def final(self, window: DeviceWindow) -> None:
        """Fetches rows that the window before does not touch. Collective; the host waits for sizes."""
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

    def push(self, window: DeviceWindow, part: int) -> None:
        """Sends the gradients that go with a micro-batch. Collective."""
        pairs = zip(self._groups, self._travels[window.number], strict=True)
        posted = [each.post_gradients(travel, part) for each, travel in pairs]
        for message in posted:
            message.wait()

    def update(self, window: DeviceWindow, lrs: Sequence[float], step: int) -> None:
        """Updates the rows of this rank."""
        updates, travels = self._part.updates(lrs, step), self._travels.pop(window.number)
        if any("replicated" in each.exchange.lane_kinds for each in self._groups):
            self._transport.count_copies([each for travel in travels for each in travel.window.group.lanes])
        for each, travel, update in zip(self._groups, travels, updates, strict=True):
            each.update(travel, update)

    def end(self) -> None:
        """What was opened and never updated is forgotten."""
        self._travels.clear()


def pipeline_obstacles(part: object, form: Form, *, verifies: bool) -> list[str]:
    """Why the windows of a part cannot travel."""
    obstacles = []
    if isinstance(part, DevicePart):
        is_tiered = any(exchange.is_tiered for exchange in part.exchanges)
        has_nodes = any("node" in exchange.lane_kinds for exchange in part.exchanges)
        found = [
            (part.replicas > 1, "tables with replicas"),
            (is_tiered and part.mesh.world_size > 1, "tiered tables on several ranks"),
            (part.transport.name == "one_sided", "transport 'one_sided' (use 'auto' or 'collective')"),
            (has_nodes, "rows with one copy a node"),
        ]
        obstacles += [what for is_so, what in found if is_so]
    else:
        obstacles.append("tensor-train tables")
    if form == "naive":
        obstacles.append("exchange 'naive' (use 'delta' or 'unsplit')")
    if verifies:
        obstacles.append("verify (rows on a device have no versions)")
    return obstacles

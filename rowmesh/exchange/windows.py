"""Windows: how the windows of a part travel: by micro-batch where its transport can, else whole.

    open → final → fetch, part by part → push, part by part → update

`fetch` and `push` may be in two threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from rowmesh.errors import RowmeshError
from rowmesh.exchange.cores import CorePart
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.phased import PhasedExchange, Travel, phased_obstacle
from rowmesh.exchange.phased_group import FIRST
from rowmesh.exchange.route import Route
from rowmesh.exchange.shard_group import ShardGroup
from rowmesh.exchange.window import Form, Window

COMPUTED = "tensor-train rows are computed where they are looked up"


class Windows(Protocol):
    """How windows travel.

    Attributes:
        is_phased: whether by micro-batch.
        is_tiered: whether rows are brought into fast memory first.
        is_on_device: whether what is done is asked of a device, and may be done later.
        reason: why so.
    """

    is_phased: bool
    is_tiered: bool
    is_on_device: bool
    reason: str

    def begin(self, number: int) -> None:
        """Takes the number of the first of some windows."""
        ...

    def open(self, window: Window) -> None:
        """Tells owners what is needed. Collective."""
        ...

    def pass_over(self) -> None:
        """There is no window where other ranks may have one, which wait for nothing else than its messages."""
        ...

    def retrieve(self, window: Window, may_wait: Callable[[], bool]) -> None:
        """Brings rows into fast memory; `may_wait` tells whether updates of other windows may still make room."""
        ...

    def final(self, window: Window) -> None:
        """Brings what does not change any more. Collective."""
        ...

    def fetch(self, window: Window, part: int) -> None:
        """Brings the rows that come with a micro-batch. Collective."""
        ...

    def pack(self, window: Window, part: int) -> None:
        """Puts gradients aside that the next micro-batch would change."""
        ...

    def push(self, window: Window, part: int) -> None:
        """Sends the gradients that go with a micro-batch. Collective."""
        ...

    def update(self, window: Window, step: Step) -> None:
        """Updates rows. Collective."""
        ...

    def let_go(self, window: Window) -> None:
        """Its rows were read and will not be updated: they may leave fast memory."""
        ...

    def end(self) -> None:
        """What was opened and never updated is forgotten."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory beside that of windows."""
        ...


class RoutedWindow(Protocol):
    """A window on any device."""

    number: int

    @property
    def route(self) -> Route:
        """Of the whole batch."""
        ...


W = TypeVar("W", bound=RoutedWindow)


class WholeWindows(Generic[W]):
    """Rows travel with the first micro-batch, gradients after the last one: for any transport, plan and replicas."""

    is_on_device = False

    def __init__(self, part: ShardGroup | CorePart, obstacle: str) -> None:
        self.is_phased = self.is_tiered = False
        self.reason = f"rows and gradients travel whole: {obstacle}"
        self._part = part
        self._updated = FIRST - 1

    def begin(self, number: int) -> None:
        """What came before is updated."""
        self._updated = number - 1

    def open(self, window: W) -> None:
        """Owners learn what is needed when it is fetched."""

    def pass_over(self) -> None:
        """Whoever waits for messages that do not come is told in the end."""

    def retrieve(self, window: W, may_wait: Callable[[], bool]) -> None:
        """Rows are where they are."""

    def final(self, window: W) -> None:
        """Nothing comes before the window opens."""

    def fetch(self, window: W, part: int) -> None:
        """Brings all rows with the first micro-batch. Collective."""
        if part == 0:
            if self._updated != window.number - 1:
                raise RowmeshError(
                    f"rows of batch {window.number - FIRST} would be read after the update of batch "
                    f"{self._updated - FIRST}"
                )
            self._part.fetch(window.route, lambda group: None)

    def pack(self, window: W, part: int) -> None:
        """Gradients stay where they are."""

    def push(self, window: W, part: int) -> None:
        """Gradients travel when rows are updated."""

    def update(self, window: W, step: Step) -> None:
        """Sends all gradients; owners update. Collective."""
        with torch.no_grad():
            self._part.push([window.route], step)
        self._updated = window.number

    def let_go(self, window: W) -> None:
        """Nothing is held."""

    def end(self) -> None:
        """Nothing is held."""

    @property
    def num_bytes(self) -> int:
        """Nothing is held."""
        return 0


class PhasedWindows:
    """Rows and gradients travel by micro-batch. Making one is collective.

    Where tables have replicas no row is final before its window opens: what other replica groups touch is known to them
    alone.
    """

    is_on_device = False

    def __init__(self, part: ShardGroup, form: Form, *, finds_final: bool, verifies: bool) -> None:
        self.is_phased, self.is_tiered = True, any(exchange.is_tiered for exchange in part.exchanges)
        self.reason = f"rows and gradients travel by micro-batch ({form})"
        self._part, self._form = part, form
        self._exchange = PhasedExchange(
            part.mesh, part.exchanges, part.transport.common, form,
            finds_final=finds_final and part.replicas == 1, verifies=verifies,
        )  # fmt: skip
        self._travels: dict[int, list[Travel]] = {}

    def begin(self, number: int) -> None:
        """What came before is updated. Collective."""
        self._part.flush()
        self._exchange.begin()

    def open(self, window: Window) -> None:
        """Tells owners what is needed, and with which micro-batch. Collective."""
        groups = [window.groups[index] for index in self._part.indices]
        self._travels[window.number] = self._exchange.open(window, groups)

    def pass_over(self) -> None:
        """Whoever waits for messages that do not come is told in the end."""

    def retrieve(self, window: Window, may_wait: Callable[[], bool]) -> None:
        """Brings rows that were asked for into fast memory."""
        self._exchange.retrieve(self._travels[window.number], window.number, may_wait)

    def final(self, window: Window) -> None:
        """Fetches rows that the window before does not touch. Collective."""
        self._exchange.fetch_final(self._travels[window.number])

    def fetch(self, window: Window, part: int) -> None:
        """Fetches the rows that come with a micro-batch. Collective."""
        self._exchange.fetch(self._travels[window.number], part)

    def pack(self, window: Window, part: int) -> None:
        """Puts gradients of one micro-batch alone aside, where they travel so."""
        if self._form == "naive":
            self._exchange.pack(self._travels[window.number], part)

    def push(self, window: Window, part: int) -> None:
        """Sends the gradients that go with a micro-batch. Collective."""
        if self._form != "naive":
            self._exchange.pack(self._travels[window.number], part)
        self._exchange.push(self._travels[window.number], part)

    def update(self, window: Window, step: Step) -> None:
        """Updates the rows of this rank, their copies and their replicas. Collective."""
        updates = self._part.updates(step)
        self._exchange.update(self._travels.pop(window.number), updates, window.number)
        self._part.begin_synchronization(updates, step)
        self._part.flush()

    def let_go(self, window: Window) -> None:
        """Its rows may leave fast memory."""
        _release(self._travels.get(window.number, ()))

    def end(self) -> None:
        """What was opened and never updated is forgotten."""
        for travels in self._travels.values():
            _release(travels)
        self._travels.clear()

    @property
    def num_bytes(self) -> int:
        """Memory beside that of windows."""
        return self._exchange.num_bytes


def _release(travels: Sequence[Travel]) -> None:
    for travel in travels:
        if travel.held is not None:
            travel.held.unpin()


def make_windows(part: ShardGroup | CorePart, form: Form, *, finds_final: bool, verifies: bool) -> Windows:
    """How the windows of a part travel. Collective."""
    if isinstance(part, CorePart):
        return WholeWindows(part, COMPUTED)
    kinds = [kind for exchange in part.exchanges for kind in exchange.address_map.kinds]
    is_tiered = any(exchange.is_tiered for exchange in part.exchanges)
    if obstacle := phased_obstacle(part.transport.name, kinds, is_tiered=is_tiered):
        return WholeWindows(part, obstacle)
    return PhasedWindows(part, form, finds_final=finds_final, verifies=verifies)

"""Windows: how the windows of a pipeline travel, for the tables of one shard group; a transport makes them.

    open → pin → early → fetch, one by one → push, one by one → collect → apply

    open     ranks learn which rows are asked for, and by which micro-batches
    pin      tiered rows are put into fast memory, and stay there
    early    rows that the window before does not touch come: they do not change any more
    fetch    for each micro-batch, the rows that come with it
    push     for each micro-batch, the gradients that go with it
    squares  of the gradients of all ranks, summed by the owners, where the program asks for their norm
    collect  the gradients of all ranks are where their owners need them, and ranks agree; no row has changed
    apply    rows change; nothing that can be refused is left
    skip     rows stay as they are, in the place of collect and apply
    drop     a window that will not be updated lets its rows go

In `Windows`, a window travels whole: rows come with the first micro-batch and gradients go after the last one, by the
verbs of the plain step. It serves any transport, plan and table. `rowmesh.exchange.micro_batch` overrides what can
travel by micro-batch, and hides behind computation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.exchange.device_group import DeviceGroupExchange
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.replica_keys import ReplicaKeys
from rowmesh.exchange.route import AnyRouteGroup, Route
from rowmesh.exchange.window import FIRST, Form, Window, WindowGroup
from rowmesh.mesh import Mesh
from rowmesh.tables.update_rules import Update


@dataclass(frozen=True)
class WindowOptions:
    """The form of the windows of a pipeline.

    Attributes:
        form: how rows travel, where they do by micro-batch.
        finds_final: whether rows are fetched as soon as they are final.
        verifies: whether versions of rows are kept and checked.
        device: "cpu", or the name of the device that rows are on.

    Raises:
        ConfigurationError: a device cannot do this.
    """

    form: Form
    finds_final: bool
    verifies: bool
    device: str

    def __post_init__(self) -> None:
        refused = ["exchange 'naive' (use 'delta' or 'unsplit')"] * (self.form == "naive")
        refused += ["verify (rows on a device have no versions)"] * self.verifies
        if self.is_on_device and refused:
            raise ConfigurationError(
                f"a pipeline on device {self.device!r} cannot do this yet: {'; '.join(refused)}; change that, or use "
                "device 'cpu'"
            )

    @property
    def is_on_device(self) -> bool:
        """Whether rows are on a device."""
        return self.device != "cpu"


class WindowTables(Protocol):
    """A shard group, as windows see it: its plain step, and its parts of a route."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def indices(self) -> Sequence[int]: ...
    @property
    def reason(self) -> str: ...
    def fetch(self, route: Route, meanwhile: Callable[[AnyRouteGroup], None]) -> None: ...
    def collect(self, routes: Sequence[Route], step: Step) -> None: ...
    def apply(self) -> None: ...
    def withdraw(self) -> None: ...


class StoredTables(WindowTables, Protocol):
    """A shard group whose rows are stored, as windows by micro-batch see it."""

    @property
    def replicas(self) -> int: ...
    def replica_keys(self) -> ReplicaKeys | None: ...
    def updates(self, step: Step) -> list[Update]: ...
    def squares(self, slots: Tensor, sums: Tensor) -> float: ...
    def begin_synchronization(self, updates: Sequence[Update], step: Step) -> None: ...
    def flush(self) -> None: ...


class Collected(NamedTuple):
    """A window whose update ranks agree on.

    Attributes:
        window: whose gradients have come.
        step: in which its rows change.
        forgets: whether its gradients are dropped.
    """

    window: Window
    step: Step
    forgets: bool


class Windows:
    """The windows of one pipeline, which travel whole.

    Args:
        tables: of the shard group.
        options: what the pipeline asks for.
        obstacle: why rows do not travel by micro-batch.

    Attributes:
        is_split: whether rows travel by micro-batch.
        is_tiered: whether rows are pinned in fast memory before they are fetched.
        tells_replicas: whether opening a window tells other replicas of it, and of the end of data.
        is_on_device: whether work is launched on a device, and may be done later.
        reason: how rows travel, and why.
    """

    is_split = False
    is_tiered = False
    tells_replicas = False

    def __init__(self, tables: WindowTables, options: WindowOptions, obstacle: str) -> None:
        self.is_on_device, self._tables = options.is_on_device, tables
        self.reason = f"rows and gradients travel whole: {obstacle}"
        self._updated = FIRST - 1
        self._gathered = 0  # the last window whose gradients were gathered
        self._fetched: Window | None = None  # and not updated

    @property
    def num_bytes(self) -> int:
        """Memory beside that of windows."""
        return 0

    def begin(self, number: int) -> None:
        """Takes the number of the first window of a run; all earlier ones are updated, or will never be. Collective."""
        self._updated = number - 1

    def open(self, window: Window | None, state: int) -> list[int]:
        """No-op: owners learn what is needed when it is fetched."""
        return []

    def pin(self, window: Window, may_wait: Callable[[], bool]) -> None:
        """Puts rows into fast memory; `may_wait` says whether updates of other windows may still make room."""

    def early(self, window: Window) -> None:
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
        self._tables.fetch(window.route, lambda group: None)
        for group in self._mine(window):
            group.read_fetched()

    def pack(self, window: Window, part: int) -> None:
        """No-op: gradients stay where they are."""

    def push(self, window: Window, part: int) -> None:
        """No-op: gradients travel when rows are updated."""

    def squares(self, window: Window, guests: Mapping[str, np.ndarray]) -> dict[int, float]:
        """The sums of squares of the gradients of all ranks for the rows that this one owns, by number of the group.

        Args:
            window: whose gradients have come.
            guests: of each dynamic table the rows whose gradients are dropped.

        Returns:
            Those of groups whose gradients have come; gradients of others wait where the plain step looks for them.
        """
        self._gather_gradients(window)
        return {}

    def _gather_gradients(self, window: Window) -> None:
        if self._gathered != window.number:
            self._gathered = window.number
            for group in self._mine(window):
                group.gather_gradients()

    def collect(self, window: Window, step: Step, *, forgets: bool) -> Collected:
        """Agrees on the update of a window; without its gradients where all ranks have forgotten them. Collective.

        Raises:
            IdRangeError: some ids, on a device, are no rows; nothing is updated.
        """
        if forgets:
            self.drop(window)
            self._tables.collect([], step)
        else:
            self._gather_gradients(window)
            with torch.no_grad():
                self._tables.collect([window.route], step)
        return Collected(window, step, forgets)

    def withdraw(self, collected: Collected) -> None:
        """Takes back what was collected: no rank updates."""
        self._tables.withdraw()

    def apply(self, collected: Collected) -> None:
        """Changes rows. Collective."""
        with torch.no_grad():
            self._tables.apply()
        self._updated, self._fetched = collected.window.number, None

    def skip(self, window: Window) -> None:
        """Changes no row: the next window comes."""
        self.drop(window)
        self._updated, self._fetched = window.number, None

    def drop(self, window: Window) -> None:
        """The rows of a window were read and will not be updated: they may leave fast memory."""
        for group in self._mine(window):
            group.group.unpin()

    def end(self) -> None:
        """Drops windows that were opened and never updated."""
        if self._fetched is not None:
            self.drop(self._fetched)
            self._fetched = None

    def _mine(self, window: Window) -> list[WindowGroup]:
        return [window.groups[index] for index in self._tables.indices]


class PrefetchedWindows(Windows):
    """On one device alone, whose tables are tiered: the host copies rows into its memory ahead, on a stream of its own.

    It does so in the order of the batches (`pin`). The stream of communication waits for these copies when the batch's
    turn comes (`fetch`), and so does the one that computes. The batch's update comes after all its reads, so rows that
    are unpinned by then are not read any more.

    Args:
        tables, options: as for `Windows`.
        exchanges: of all groups.
    """

    is_tiered = True

    def __init__(self, tables: WindowTables, options: WindowOptions, exchanges: Sequence[DeviceGroupExchange]) -> None:
        super().__init__(tables, options, "there is one rank")
        self._exchanges = exchanges
        self.reason = f"rows are prefetched into the memory of {exchanges[0].device}: {tables.reason}"

    def begin(self, number: int) -> None:
        """Takes the number of the first window; from now on rows come in the order of the batches."""
        super().begin(number)
        for exchange in self._exchanges:
            exchange.let_come_early(comes_early=False)

    def pin(self, window: Window, may_wait: Callable[[], bool]) -> None:
        """See `Windows.pin`."""
        for exchange, group in zip(self._exchanges, self._mine(window), strict=True):
            exchange.retrieve(group.group, may_wait)

    def end(self) -> None:
        """Drops windows; rows come early again."""
        super().end()
        for exchange in self._exchanges:
            exchange.let_come_early(comes_early=True)

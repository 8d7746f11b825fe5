"""Backend: where rows live and look-ups run, the CPU or a device, as far as a collection has to know.

A collection asks its backend for the things that differ: a *router* (from a batch to what it needs), a *part* (rows,
and how they travel; another one of cores), a *pooling* (from rows to vectors), and for a pipeline *windows*. All else
is the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.cores import CorePart
from rowmesh.exchange.layout import Layouts
from rowmesh.exchange.part import Part
from rowmesh.exchange.pooling import Pooling
from rowmesh.exchange.route import Router
from rowmesh.exchange.window import Form, WindowMaker
from rowmesh.exchange.windows import Windows, make_windows
from rowmesh.tables import TableGroup


class Backend(Protocol):
    """Where rows live and look-ups run."""

    device: torch.device
    look_ups_overlap: bool  # those of several threads; else they take turns
    make_part: Callable[..., Any]  # takes what `Part` takes, and is used as it is
    make_core_part: Callable[..., Any]  # likewise, `CorePart` without the device

    def make_pooling(self, groups: Sequence[TableGroup], width: int) -> Pooling:
        """For the vectors of all groups.

        Args:
            groups: of the collection.
            width: columns of the pooled output.
        """
        ...

    def make_router(self, groups: Sequence[TableGroup], layouts: Layouts, rank: int) -> Router:
        """For batches of all groups."""
        ...

    def make_window_maker(self) -> Any:
        """For a pipeline: makes windows of routed batches, as `WindowMaker` does."""
        ...

    def make_windows(self, part: Any, form: Form, *, finds_final: bool, verifies: bool) -> Windows:
        """For a pipeline: how the windows of a part travel. Collective.

        Raises:
            ConfigurationError: they cannot, on this device.
        """
        ...


class HostBackend:
    """The CPU."""

    device, look_ups_overlap = torch.device("cpu"), True
    make_part = Part
    make_core_part = staticmethod(partial(CorePart, None))

    def make_pooling(self, groups: Sequence[TableGroup], width: int) -> Pooling:
        """Numba's kernels."""
        return Pooling(groups, width)

    def make_router(self, groups: Sequence[TableGroup], layouts: Layouts, rank: int) -> Router:
        """Numba's kernels."""
        return Router(groups, layouts, rank)

    def make_window_maker(self) -> WindowMaker:
        """Over reused memory."""
        return WindowMaker()

    def make_windows(self, part: Any, form: Form, *, finds_final: bool, verifies: bool) -> Windows:
        """By micro-batch where the transport can, else whole."""
        return make_windows(part, form, finds_final=finds_final, verifies=verifies)


def backend_for(device: str | torch.device) -> Backend:
    """The backend of a device.

    Raises:
        ConfigurationError: the device cannot be used; says what is missing.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError as error:  # a name that torch does not know
        raise ConfigurationError(f"device must be 'cpu' or 'cuda' (or 'cuda:1', …), got {device!r}") from error
    if kind == "cpu":
        return HostBackend()
    from rowmesh.exchange.device.backend import DeviceBackend

    return DeviceBackend(device)

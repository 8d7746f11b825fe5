"""Backend: where rows live and look-ups run, the CPU or a device, as far as a collection has to know.

A collection asks its backend for the things that differ: a *router* (from a batch to what it needs), a *part* (rows,
and how they travel; another one of cores), a *pooling* (from rows to vectors), and for a pipeline *windows*. All else
is the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.core_part import CorePart
from rowmesh.exchange.layout import Layouts
from rowmesh.exchange.micro_batch import Windows, make_windows
from rowmesh.exchange.part import Part
from rowmesh.exchange.pooling import GroupPooling, Pooling
from rowmesh.exchange.route import RouteGroup
from rowmesh.exchange.router import HostRouter, Router
from rowmesh.exchange.window import Form
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableGroup


class Pools(Protocol):
    """From rows to vectors, and from gradients of vectors to gradients of rows; as `pooling.Pooling` does it."""

    def compress(self, group: RouteGroup) -> None:
        """Prepares the backward; may run while rows travel."""
        ...

    def forward(self, groups: Sequence[RouteGroup], batch: SparseBatch, num_samples: int) -> tuple[Tensor, ...]:
        """`[num_samples, width]` for the pooled groups, then `[ids of the group, D]` for each sequence group."""
        ...

    def backward(self, groups: Sequence[RouteGroup], gradients: Sequence[Tensor]) -> None:
        """Sums the gradients of equal ids, for push to send."""
        ...

    def is_finite(self, groups: Sequence[RouteGroup]) -> bool:
        """Whether all summed gradients are."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that is kept from batch to batch."""
        ...


class Backend(Protocol):
    """Where rows live and look-ups run."""

    device: torch.device
    look_ups_overlap: bool  # those of several threads; else they take turns
    make_part: Callable[..., Any]  # takes what `Part` takes, and is used as it is
    make_core_part: Callable[..., Any]  # likewise, `CorePart`

    def make_pooling(self, groups: Sequence[TableGroup], width: int) -> Pools:
        """For the vectors of all groups.

        Args:
            groups: of the collection.
            width: columns of the pooled output.
        """
        ...

    def make_router(self, groups: Sequence[TableGroup], layouts: Layouts, rank: int) -> Router:
        """For batches of all groups."""
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
    make_core_part = CorePart

    def make_pooling(self, groups: Sequence[TableGroup], width: int) -> Pooling:
        """Numba's kernels."""
        poolings = [GroupPooling(group.dim, group.dtype) for group in groups]
        return Pooling(poolings, [group.is_sequence for group in groups], width)

    def make_router(self, groups: Sequence[TableGroup], layouts: Layouts, rank: int) -> HostRouter:
        """Numba's kernels."""
        return HostRouter(layouts, rank)

    def make_windows(self, part: Any, form: Form, *, finds_final: bool, verifies: bool) -> Windows:
        """By micro-batch where the transport can, else whole."""
        return make_windows(part, form, finds_final=finds_final, verifies=verifies, device="cpu")


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

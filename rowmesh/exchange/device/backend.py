"""The device backend: rows live in a GPU's memory, and all of a step's look-up, exchange and update runs there.

The four verbs are those of the CPU, over tensors instead of addresses::

    route   ids go to the device; bounded, made unique, located and sorted there          router, route
    fetch   sizes come to the host in one copy; keys and rows travel                      part, messages
    pool    rows become vectors; backward sums the gradients of equal ids                 pooling
    push    gradients travel, are merged in the order of the ranks, and update rows

Tensor-train tables compute rows from cores that every rank has (`rowmesh.exchange.cores`), and are pooled as
others are.

The kernels are those of `rowmesh/ops/*/cuda.py`; see [Note: GPU kernels] in `rowmesh.ops.gpu`. Memory comes from
torch's caching allocator, so that nothing here keeps buffers.

See [Note: what the host waits for] in `rowmesh.ops.look_up.device`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.cores import CorePart
from rowmesh.exchange.device.part import DevicePart
from rowmesh.exchange.device.tiered_windows import TieredDeviceWindows
from rowmesh.exchange.device.window import DeviceWindowMaker
from rowmesh.exchange.device.windows import (
    PhasedDeviceWindows,
    WholeDeviceWindows,
    whole_obstacle,
)  # fmt: skip
from rowmesh.exchange.layout import Layouts
from rowmesh.exchange.pooling import Pooling
from rowmesh.exchange.route import Router
from rowmesh.exchange.window import Form
from rowmesh.ops.gpu import require_triton
from rowmesh.tables import TableGroup

logger = logging.getLogger("rowmesh")


class DeviceBackend:
    """A GPU.

    Args:
        device: "cuda", the current one, or "cuda:1".

    Raises:
        ConfigurationError: it cannot be used; says what is missing.
    """

    look_ups_overlap = False  # the host only launches them, and what it keeps of them is kept once

    def __init__(self, device: str | torch.device) -> None:
        self.name, self.device = str(device), usable_device(device)
        self.make_part = partial(DevicePart, self.device)
        self.make_core_part = partial(CorePart, self.device)

    def make_pooling(self, groups: Sequence[TableGroup], width: int) -> Pooling:
        """Triton's kernels."""
        return Pooling(groups, width, self.device)

    def make_window_maker(self) -> DeviceWindowMaker:
        """Triton's kernels."""
        return DeviceWindowMaker(self.device)

    def make_windows(self, part: Any, form: Form, *, finds_final: bool, verifies: bool) -> Any:
        """By micro-batch where the transport can, else whole; those of one rank do not travel."""
        found = (
            (form == "naive", "exchange 'naive' (use 'delta' or 'unsplit')"),
            (verifies, "verify (rows on a device have no versions)"),
        )
        if obstacles := [what for is_so, what in found if is_so]:
            raise ConfigurationError(
                f"a pipeline on device {self.name!r} cannot do this yet: {'; '.join(obstacles)}; change that, or use "
                "device 'cpu'"
            )
        if part.mesh.world_size == 1 and any(exchange.is_tiered for exchange in part.exchanges):
            return TieredDeviceWindows(part)
        if obstacle := whole_obstacle(part):
            return WholeDeviceWindows(part, obstacle)
        return PhasedDeviceWindows(part, form, finds_final=finds_final)

    def make_router(self, groups: Sequence[TableGroup], layouts: Layouts, rank: int) -> Router:
        """Triton's kernels."""
        return Router(groups, layouts, rank, self.device)


def usable_device(device: str | torch.device) -> torch.device:
    """The device on which kernels run: the CPU where Triton interprets them.

    Raises:
        ConfigurationError: it cannot be used; says what is missing.
    """
    wanted = torch.device(device)
    if wanted.type != "cuda":
        raise ConfigurationError(f"device must be 'cpu' or 'cuda' (or 'cuda:1', …), got {str(device)!r}")
    require_triton(device)
    if torch.cuda.is_available():
        if wanted.index is not None and wanted.index >= torch.cuda.device_count():
            raise ConfigurationError(
                f"there is no device {str(device)!r}: torch sees {torch.cuda.device_count()} GPU(s), from 'cuda:0' on"
            )
        return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
    if os.environ.get("TRITON_INTERPRET") == "1":
        logger.warning("device %s: there is no GPU; TRITON_INTERPRET=1, so kernels are interpreted, slowly", device)
        return torch.device("cpu")
    built = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU or no driver"
    raise ConfigurationError(
        f"device {str(device)!r} cannot be used: {built}; torch.cuda.is_available() is false. Install a CUDA build of "
        "torch (pytorch.org/get-started) that the machine's NVIDIA driver can run, or use device 'cpu'"
    )

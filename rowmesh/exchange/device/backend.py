"""The device backend: rows live in a GPU's memory, and all of a step's look-up, exchange and update runs there.

The four verbs are those of the CPU, over tensors instead of addresses::

    route   ids go to the device; bounded, made unique, located and sorted there          router, route
    fetch   sizes come to the host in one copy; keys and rows travel                      part, messages
    pool    rows become vectors; backward sums the gradients of equal ids                 pooling
    push    gradients travel, are merged in the order of the ranks, and update rows

Tensor-train tables compute rows from cores that every rank has (core_part), and are pooled as the others are.

The kernels are those of `rowmesh/ops/*/cuda.py`; see [Note: GPU kernels] in `rowmesh.ops.gpu`. Memory comes from
torch's caching allocator, so that nothing here keeps buffers.

[Note: what the host waits for]
On one rank nothing: how many unique ids there are stays on the device, and whether all ids were rows of their tables is
copied to the host beside the computation and looked at before the next update or look-up. So it is where ranks read
each other's rows. Where they send them the host waits once a batch, for the sizes that an all-to-all needs: one copy
brings them, those of the other ranks, and the counts of ids outside their tables (these alone, where all tables are
tensor-train). An evaluation, after which nothing may come, looks at once. An update of rows with copies needs the sizes
of what homes send: how many rows they merged, which is copied to the host since the look-up; so does what replicas tell
each other, of which ranks that read each other's rows learn only then. Tiered tables are read
from their store by the host, and on several ranks it waits for what is asked of this one: see
`rowmesh.exchange.device.tiered`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.device.core_part import DeviceCorePart
from rowmesh.exchange.device.part import DevicePart
from rowmesh.exchange.device.pooling import DevicePooling
from rowmesh.exchange.device.router import DeviceRouter
from rowmesh.exchange.layout import Layouts
from rowmesh.exchange.micro_batch import Windows, make_windows
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
        self.make_core_part = partial(DeviceCorePart, self.device)

    def make_pooling(self, groups: Sequence[TableGroup], width: int) -> DevicePooling:
        """Triton's kernels."""
        return DevicePooling(groups, width, self.device)

    def make_windows(self, part: Any, form: Form, *, finds_final: bool, verifies: bool) -> Windows:
        """By micro-batch where the transport can, else whole; those of one rank do not travel."""
        return make_windows(part, form, finds_final=finds_final, verifies=verifies, device=self.name)

    def make_router(self, groups: Sequence[TableGroup], layouts: Layouts, rank: int) -> DeviceRouter:
        """Triton's kernels."""
        return DeviceRouter(groups, layouts, self.device)


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

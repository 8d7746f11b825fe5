"""Devices: on which one rows live, and which classes serve it.

`None` in the place of a device is the host's memory, with Numba's kernels. Otherwise it is where tensors are and Triton
runs `rowmesh/ops/*/cuda.py`: a GPU, or the CPU where kernels are interpreted. The four verbs are the same on both, over
tensors instead of addresses::

    route   ids go to the device; bounded, made unique, located and sorted there
    fetch   sizes come to the host in one copy; keys and rows travel
    pool    rows become vectors; backward sums the gradients of equal ids
    push    gradients travel, are merged in the order of the ranks, and update rows

Memory of a device comes from torch's caching allocator, so that nothing here keeps buffers.

What the host waits for: see [Note: what the host waits for] in `rowmesh.ops.look_up.device`.
"""

from __future__ import annotations

import logging
import os
from typing import Any, cast

import torch

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.cores import CorePart
from rowmesh.exchange.shard_group import ShardGroup
from rowmesh.exchange.window import Form, WindowMaker
from rowmesh.exchange.windows import Windows, make_windows
from rowmesh.ops.gpu import require_triton

logger = logging.getLogger("rowmesh")


def usable_device(device: str | torch.device) -> torch.device | None:
    """Where rows can live: None in the host's memory; else a GPU, or the CPU where Triton interprets kernels.

    Raises:
        ConfigurationError: it cannot be used; says what is missing.
    """
    try:
        wanted = torch.device(device)
    except RuntimeError as error:  # a name that torch does not know
        raise ConfigurationError(f"device must be 'cpu' or 'cuda' (or 'cuda:1', …), got {device!r}") from error
    if wanted.type == "cpu":
        return None
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


def make_window_maker(device: torch.device | None) -> WindowMaker:
    """From routed batches to windows, for a pipeline."""
    if device is None:
        return WindowMaker()
    from rowmesh.exchange.device.window import DeviceWindowMaker

    return cast("WindowMaker", DeviceWindowMaker(device))


def windows_of(
    shard_group: ShardGroup | CorePart, form: Form, *, finds_final: bool, verifies: bool, is_on_device: bool
) -> Windows:
    """How the windows of a shard group travel: by micro-batch where its transport can, else whole. Collective."""
    if not is_on_device:
        return make_windows(shard_group, form, finds_final=finds_final, verifies=verifies)
    from rowmesh.exchange.device.tiered_windows import TieredDeviceWindows
    from rowmesh.exchange.device.windows import PhasedDeviceWindows, WholeDeviceWindows, whole_obstacle

    group: Any = shard_group
    made: Any
    if group.mesh.world_size == 1 and any(exchange.is_tiered for exchange in group.exchanges):
        made = TieredDeviceWindows(group)
    elif obstacle := whole_obstacle(group):
        made = WholeDeviceWindows(group, obstacle)
    else:
        made = PhasedDeviceWindows(group, form, finds_final=finds_final)
    return made


def check_windows(device: str, form: Form, *, verifies: bool) -> None:
    """Raises ConfigurationError for what a pipeline cannot do on a device that was asked for by this name."""
    found = (
        (form == "naive", "exchange 'naive' (use 'delta' or 'unsplit')"),
        (verifies, "verify (rows on a device have no versions)"),
    )
    if obstacles := [what for is_so, what in found if is_so]:
        raise ConfigurationError(
            f"a pipeline on device {device!r} cannot do this yet: {'; '.join(obstacles)}; change that, or use "
            "device 'cpu'"
        )

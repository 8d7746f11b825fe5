"""Devices: on which one rows live, and which classes serve it.

`None` in the place of a device is the host's memory, with Numba's kernels. Otherwise it is where tensors are and Triton
runs `rowmesh/ops/*/cuda.py`: a GPU, or the CPU where kernels are interpreted. The four verbs are the same on both, over
tensors instead of addresses::

    route   ids go to the device; bounded, made unique, located and sorted there
    fetch   sizes come to the host in one copy; keys and rows travel
    pool    rows become vectors; backward sums the gradients of equal ids
    push    gradients travel, are merged in the order of the ranks, and update rows

Memory of a device comes from torch's caching allocator, so that nothing here keeps buffers.

Waits of the host: see [Note: what the host waits for] in `rowmesh.ops.look_up.device`.
"""

from __future__ import annotations

import logging
import os

import torch

from rowmesh.errors import ConfigurationError
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

"""The random states of a process, as plain values: those of torch, of the GPU in use, of NumPy and of Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """What random numbers will follow in this process, on the host and on `device`."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "torch": _hex(torch.get_rng_state()),
        "numpy": [[int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }
    if device.type == "cuda":
        states["cuda"] = _hex(torch.cuda.get_rng_state(device))
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Takes over what `random_states` gave; of a device only where it gave that of one."""
    torch.set_rng_state(_tensor(states["torch"]))
    keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)


def _hex(state: torch.Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

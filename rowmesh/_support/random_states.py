"""The random states of a process, as plain values: those of torch, of the GPU in use, of NumPy and of Python.

Each step seeds torch's on the host anew, by its number and the rank: what a step draws there does not depend on what
steps before it drew, so that nobody must know the state of a rank that is lost.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

RANDOM_STATES = "rowmesh._support.random_states"
"""Under which name a checkpoint of one's own loop has those of all ranks."""


def random_states(device: torch.device) -> dict[str, Any]:
    """The states that decide which random numbers follow in this process, on the host and on `device`."""
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


def unseeded(states: dict[str, Any]) -> dict[str, Any]:
    """The parts of `random_states` that `seed_step` does not set."""
    return {name: state for name, state in states.items() if name != "torch"}


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch's random numbers on the host for a step of a rank."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest, "little", signed=True))


def _hex(state: torch.Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

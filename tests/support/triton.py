"""Where GPU kernels are tested: on the GPU where there is one, else in Triton's interpreter, else not at all.

A module that tests kernels begins so, and its tests take the fixture `device`::

    pytestmark = pytest.mark.triton
    cuda = kernels_of("gather")
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

from tests.support import sanitizer


def find_obstacle() -> str | None:
    """Why kernels cannot be tested here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install '.[gpu]'"
    version = importlib.metadata.version("triton")
    if not torch.cuda.is_available() and tuple(map(int, version.split(".")[:2])) < (3, 7):
        return f"the interpreter of triton {version} does not know NumPy 2.4: pip install 'triton>=3.7'"
    return None


def use_interpreter() -> None:
    """Without a GPU, lets kernels run in the interpreter; must come before triton is imported for the first time."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def find_device() -> torch.device:
    """Where the tensors of a test belong."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernels_of(op: str) -> ModuleType:
    """The GPU kernels of an op; where they cannot be tested, the module that asks for them is skipped."""
    if obstacle := find_obstacle():
        pytest.skip(obstacle, allow_module_level=True)
    kernels = importlib.import_module(f"rowmesh.ops.{op}.cuda")
    if find_device().type == "cpu":
        sanitizer.install()
    return kernels


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Has torch raise where the host would wait for the GPU, as far as torch notices."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")  # which is an error in tests
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tensors of a test belong."""
    return find_device()

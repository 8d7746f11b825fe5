"""What tests and doctests share: where GPU kernels run."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.triton import find_device, find_obstacle, use_interpreter

use_interpreter()
collect_ignore_glob = ["rowmesh/ops/*/cuda.py"] if find_obstacle() else []


@pytest.fixture(autouse=True)
def _device_of_doctests(doctest_namespace):
    """Examples of GPU kernels make their tensors on `device`."""
    doctest_namespace["device"] = find_device()


@pytest.fixture(autouse=True)
def _no_fresh_memory_is_read(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where kernels are tested, memory that nobody has written is NaN, or the largest number."""
    is_filled = request.node.get_closest_marker("triton") is not None and find_device().type == "cpu"
    torch.use_deterministic_algorithms(is_filled)  # which has torch fill it
    yield
    torch.use_deterministic_algorithms(False)

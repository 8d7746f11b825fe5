"""What tests and doctests share: where GPU kernels run."""

import pytest

from tests.support.triton import find_device, find_obstacle, use_interpreter

use_interpreter()
collect_ignore_glob = ["rowmesh/ops/*/cuda.py"] if find_obstacle() else []


@pytest.fixture(autouse=True)
def _device_of_doctests(doctest_namespace):
    """Examples of GPU kernels make their tensors on `device`."""
    doctest_namespace["device"] = find_device()

"""What tests and doctests share: where GPU kernels run."""

import pytest

from tests.support.triton import HAS_TRITON, find_device, use_interpreter

use_interpreter()
collect_ignore_glob = [] if HAS_TRITON else ["rowmesh/ops/*/cuda.py"]


@pytest.fixture(autouse=True)
def _device_of_doctests(doctest_namespace):
    """Examples of GPU kernels make their tensors on `device`."""
    doctest_namespace["device"] = find_device()

"""Launches find compiled kernels again by a key of their own: it tells apart all that Triton compiles apart."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rowmesh.ops.gpu import _kind_of

triton = pytest.importorskip("triton")
library = pytest.importorskip("triton._C.libtriton")
pytestmark = pytest.mark.triton
if not hasattr(library, "native_specialize_impl"):
    pytest.skip(f"triton {triton.__version__} tells arguments apart elsewhere", allow_module_level=True)

MEMORY = torch.zeros(64, dtype=torch.float64)
NUMBERS = [0, 1, 2, 15, 16, 32, -16, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, 2**63, -(2**63)]
ARGUMENTS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS) | st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0.0, 1.0, 0.5, 16.0]),
    st.builds(
        lambda dtype, first: MEMORY.view(dtype)[first:],
        st.sampled_from([torch.float64, torch.float32, torch.int64, torch.int32, torch.int16, torch.uint8]),
        st.integers(0, 9),
    ),
)


@given(st.lists(ARGUMENTS, min_size=2, max_size=40), st.booleans())
def test_equal_keys_are_of_one_kernel(arguments, specialize):
    from triton.backends.compiler import BaseBackend

    found = {}
    for argument in arguments:
        kind = library.native_specialize_impl(BaseBackend, argument, False, specialize, True)
        assert found.setdefault(_kind_of(argument), kind) == kind, argument

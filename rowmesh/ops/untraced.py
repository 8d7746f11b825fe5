"""Untraced: methods that torch.compile leaves to Python, since kernels that read addresses cannot be traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rowmesh.errors import RowmeshError

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """The function, called between the graphs of a compiled model; elsewhere as it is.

    Under torch.export, torch.jit.trace and make_fx, which make one graph of a whole model, it raises RowmeshError: the
    graph would fail in a kernel, or keep the vectors of its example for good.

    As `torch.compiler.disable`, which takes two seconds to import when a function is decorated; here nothing is
    imported before somebody compiles.

    >>> untraced(abs)(-2)
    2
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                raise _untraceable("torch.export")
            return torch.compiler.disable(function)(*args, **kwargs)
        if torch._C._is_tracing():  # pyright: ignore[reportAttributeAccessIssue]
            raise _untraceable("torch.jit.trace")
        if torch._C._len_torch_dispatch_stack():
            _refuse_modes()
        return function(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


def _refuse_modes() -> None:
    """Raises RowmeshError under a mode that gives tensors without memory, or notes operators alone."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # where there is one

    for mode in _get_current_dispatch_mode_stack():
        if (name := type(mode).__name__) in _MODES:
            raise _untraceable(_MODES[name])


_MODES = {"ProxyTorchDispatchMode": "make_fx", "FakeTensorMode": "a FakeTensorMode"}


def _untraceable(what: str) -> RowmeshError:
    return RowmeshError(
        f"{what} cannot trace a look-up, whose rows are in no graph: trace the dense part of the model by itself, "
        "given vectors as its inputs; `rowmesh export` and rowmesh.publish write the tables. torch.compile works"
    )

"""Untraced: methods that torch.compile leaves to Python, since kernels that read addresses cannot be traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """The function, called between the graphs of a compiled model; elsewhere as it is.

    As `torch.compiler.disable`, which takes two seconds to import when a function is decorated; here nothing is
    imported before somebody compiles.

    >>> untraced(abs)(-2)
    2
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]

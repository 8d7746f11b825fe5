"""Packages that rowmesh uses where they are installed, and names the extra of where they are not."""

from __future__ import annotations

import importlib
from typing import Any

from rowmesh.errors import ConfigurationError


def load(module: str, extra: str, purpose: str) -> Any:
    """A module of a package that an extra brings, imported at its first use.

    Args:
        module: its name.
        extra: of rowmesh, that installs it.
        purpose: what it is for, as the beginning of the error.

    Raises:
        ConfigurationError: the package is not installed, or cannot be imported.

    Example:
        >>> load("no_such_package", "reorder", "reordering works")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        rowmesh.errors.ConfigurationError: ... with no_such_package, which cannot be imported ... '.[reorder]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigurationError(
            f"{purpose} with {_NAMES.get(package, package)}, which cannot be imported ({error}); "
            f"run, in a checkout of rowmesh: pip install '.[{extra}]'"
        ) from error


_NAMES = {"sknetwork": "scikit-network"}

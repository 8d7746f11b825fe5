"""How rows stand in the state dictionaries of modules and optimizers: whole, a shard a rank, or not at all.

`state_dict()` and `load_state_dict()` of torch have no argument for it, so it is a context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Form = Literal["whole", "sharded", "elsewhere"]
_FORM: ContextVar[Form] = ContextVar("rowmesh_state_form", default="whole")


def state_form() -> Form:
    """The form now: "whole" is torch's own, one tensor a table; with "elsewhere" a checkpoint keeps the rows."""
    return _FORM.get()


@contextmanager
def in_form(form: Form) -> Iterator[None]:
    """State dictionaries within have rows in this form.

    >>> with in_form("sharded"):
    ...     state_form()
    'sharded'
    >>> state_form()
    'whole'
    """
    token = _FORM.set(form)
    try:
        yield
    finally:
        _FORM.reset(token)

"""Plain values between ranks: JSON, so that a rank never runs what another one sends.

None, booleans, numbers (NaN and infinity too), text, lists, and mappings whose keys are text. Tuples arrive as lists.
Other types define how they are sent, by `to_plain` and `from_plain`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

from rowmesh import errors
from rowmesh.errors import PeerError, RowmeshError

T = TypeVar("T")
PlainError = list[Any]
"""What `error_to_plain` gives. Unlike the error it holds no frames, and so no buffers of the steps that failed."""


class Plain(Protocol):
    """A value that is sent as plain ones."""

    def to_plain(self) -> Any:
        """Plain values."""
        ...

    @classmethod
    def from_plain(cls, values: Any) -> Self:
        """From what `to_plain` returned.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is something else.
        """
        ...


def encode(value: Any) -> bytes:
    """The bytes of a plain value.

    Raises:
        TypeError: it is not plain.

    Example:
        >>> encode({"rows": (1, 2), "loss": float("nan")})
        b'{"rows": [1, 2], "loss": NaN}'
    """
    return json.dumps(value).encode()


def decode(data: bytes, sender: int, doing: str, read: Callable[[Any], T] | None = None) -> Any:
    """The value that a rank sent.

    Args:
        data: its bytes.
        sender: the number of the rank, for the message.
        doing: what it was sent for, for the message.
        read: converts the plain values.

    Raises:
        PeerError: the bytes are no such value.
    """
    try:
        value = json.loads(data.decode())
        return value if read is None else read(value)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PeerError(
            f"while {doing}, rank {sender} sent what this rank cannot read ({error}); start all ranks with the same "
            "version of rowmesh"
        ) from error


def error_to_plain(error: BaseException) -> PlainError:
    """The kind of an error, from a closed list, and what is needed to raise it elsewhere.

    Example:
        >>> error_to_plain(errors.DataError("no label"))
        ['DataError', 'no label']
    """
    if isinstance(error, OSError):
        if error.errno is None:
            return ["OSError", str(error)]
        return ["OSError", error.errno, error.strerror, None if error.filename is None else str(error.filename)]
    kind = next(each.__name__ for each in type(error).__mro__ if _ERRORS.get(each.__name__) is each)
    return [kind, str(error)]


def error_from_plain(values: Any) -> BaseException:
    """The error that another rank met; of a class that it names, but only of the closed list.

    Raises:
        ValueError, KeyError, TypeError: it is none.

    Example:
        >>> error_from_plain(["OSError", 28, "No space left on device", "runs/a"])
        OSError(28, 'No space left on device')
    """
    kind, *arguments = values
    return _ERRORS[kind](*arguments)


def _errors() -> dict[str, type[Exception]]:
    ours = {name: each for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    assert RowmeshError.__name__ in ours
    return {**ours, "OSError": OSError, "MemoryError": MemoryError}


_ERRORS = _errors()

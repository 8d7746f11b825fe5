"""Passwords in URLs, which no file, page or message shows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

HIDDEN = "***"
"""Stands in the place of a password."""
_URL = re.compile(r"(?P<before>[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@]*:)(?P<secret>[^\s/]*)(?=@)")
_PARAMETER = re.compile(r"(?P<before>://\S*?[?&](?:password|ssl_password)=)(?P<secret>[^&\s#]*)")
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
T = TypeVar("T")


def masked(text: str) -> str:
    """A text whose URLs have no passwords; names of variables stay, which are none.

    >>> (
    ...     masked("redis://:secret@host:6379/0"),
    ...     masked("rediss://ann:$PASSWORD@host"),
    ...     masked("redis://h?password=p&db=1"),
    ... )
    ('redis://:***@host:6379/0', 'rediss://ann:$PASSWORD@host', 'redis://h?password=***&db=1')
    """

    def hide(match: re.Match[str]) -> str:
        is_open = _VARIABLE.fullmatch(match["secret"]) or not match["secret"]
        return match[0] if is_open else match["before"] + HIDDEN

    return _PARAMETER.sub(hide, _URL.sub(hide, text))


def masked_values(values: T) -> T:
    """The same of all texts in nested mappings and lists.

    >>> masked_values({"publish": {"to": "redis://:secret@host"}, "steps": [1, 2]})
    {'publish': {'to': 'redis://:***@host'}, 'steps': [1, 2]}
    """
    found: Any = values
    if isinstance(values, str):
        found = masked(values)
    elif isinstance(values, Mapping):
        found = {key: masked_values(value) for key, value in values.items()}
    elif isinstance(values, list | tuple):
        found = type(values)(masked_values(value) for value in values)
    return found


def places_of_passwords(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """The keys of nested mappings whose values have passwords.

    >>> list(places_of_passwords({"publish": {"to": "redis://:secret@host"}}))
    ['publish.to']
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from places_of_passwords(value, f"{before}{key}.")
        elif isinstance(value, str) and masked(value) != value:
            yield f"{before}{key}"

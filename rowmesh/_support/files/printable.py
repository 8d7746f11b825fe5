"""printable, say: what comes from data, names and files reaches a terminal as text, and never as commands to it."""

from __future__ import annotations

import logging
import sys
import unicodedata
from typing import TextIO

_BREAKS = "\u2028\u2029"
_DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def printable(text: object, *, lines: bool = False) -> str:
    """A text without control characters: they are shown as Python writes them.

    Escape sequences would set a terminal's title, move its cursor or hide what stands there; a newline in a name would
    begin a line that looks like one of ours, and marks of direction would turn text around.

    Args:
        text: to be printed.
        lines: whether newlines are meant: what follows one is then moved to the right, where it is not.

    Example:
        >>> printable("a\\x1b]0;title\\x07\\nrowmesh: done")
        'a\\\\x1b]0;title\\\\x07\\\\nrowmesh: done'
    """
    if lines:
        first, *others = (printable(line) for line in str(text).split("\n"))
        return "\n".join([first, *(line if line.startswith("  ") else f"  {line}" for line in others)])
    own = str(text)
    if own.isprintable():
        return own
    return "".join(_escaped(each) if _is_control(each) else each for each in own)


def say(*lines: object, file: TextIO | None = None) -> None:
    """Prints lines, each on its own, at once."""
    print(*map(printable, lines), sep="\n", file=file or sys.stdout, flush=True)


class PrintableFormatter(logging.Formatter):
    """Messages of loggers likewise."""

    def format(self, record: logging.LogRecord) -> str:
        """The message; lines of a traceback stay lines."""
        return printable(super().format(record), lines=True)


def _is_control(character: str) -> bool:
    return unicodedata.category(character) == "Cc" or character in _BREAKS or character in _DIRECTIONS


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()

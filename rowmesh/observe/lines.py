"""Lines of a name and a text, as runs print them, fitted to a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from typing import TextIO

NAME_COLUMNS = 10
"""Columns before the text of a line."""


def fitted(lines: Iterable[str], stream: TextIO) -> list[str]:
    """The lines; on a terminal those that are too long go on below their text. Files get every line whole.

    >>> import sys
    >>> fitted(["plan      cyclic, over all ranks"], sys.stdout)
    ['plan      cyclic, over all ranks']
    """
    if not stream.isatty():
        return list(lines)
    columns = shutil.get_terminal_size().columns
    return [part for line in lines for part in folded(line, columns)]


def folded(line: str, columns: int) -> list[str]:
    """A line in parts of so many columns, but for single words that are longer.

    >>> folded("plan      cyclic, over all ranks", 24)
    ['plan      cyclic, over', '          all ranks']
    """
    if len(line) <= columns:
        return [line]
    indent = " " * NAME_COLUMNS
    return textwrap.wrap(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

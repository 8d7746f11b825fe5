"""What commands print: lines as they are, and tables of numbers."""

from __future__ import annotations

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.table import Table


def say(console: Console, *lines: str) -> None:
    """Prints lines as they are, whatever their length and characters."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def table_of_numbers(first: str, *others: str, box: Box | None = HEAVY_HEAD) -> Table:
    """A table without rows yet, whose first column is words and whose other columns are numbers."""
    table = Table(box=box)
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column, justify="right")
    return table

"""What commands print: lines as they are, and tables of numbers."""

from __future__ import annotations

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.table import Table

_ANY_WIDTH = 10_000


def write(console: Console, *lines: str) -> None:
    """Prints lines as they are, whatever their length and characters."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def show(console: Console, table: Table) -> None:
    """Prints a table; no narrower than its longest words, as rich would leave numbers out."""
    least = table.__rich_measure__(console, console.options.update(max_width=_ANY_WIDTH)).minimum
    if least > console.width:
        table.width = least
    console.print(table, crop=False)


def table_of_numbers(first: str, *others: str, box: Box | None = HEAVY_HEAD) -> Table:
    """A table without rows yet, whose first column is words and whose other columns are numbers."""
    table = Table(box=box)
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column, justify="right")
    return table

"""The output of commands: lines as they are, and tables of numbers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import HEAVY_HEAD, Box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from rowmesh._support.files.printable import printable

_ANY_WIDTH = 10_000


def write(console: Console, *lines: str) -> None:
    """Prints lines as they are, whatever their length and characters."""
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def show(console: Console, table: Table) -> None:
    """Prints a table. On a terminal that is too narrow for it, its columns come in several tables, one below the other.

    No column is narrower than its longest number, as rich would leave a part of it out.
    """
    for column in table.columns:
        column.header, *cells = map(_plain, (column.header, *column.cells))
        column._cells[:] = cells
    for part in _fitting(console, table) if console.is_terminal else [table]:
        _widen(part, console)
        console.print(part, crop=False)


def _plain(cell: RenderableType) -> RenderableType:
    """A cell whose text is shown as it is: brackets in a name are no markup, and control characters no commands."""
    return Text(printable(cell)) if isinstance(cell, str) else cell


def _widen(table: Table, console: Console) -> None:
    """Sets the widths of columns: of their longest words, of whole cells where there is room, of whole heads likewise.

    Rich would break words of some columns and leave room in others.
    """
    room = console.width - _width(console, table)
    widths = {index: _widths_of(console, column) for index, column in enumerate(table.columns)}
    for column, (least, _, _) in zip(table.columns, widths.values(), strict=True):
        column.width = least
    for wish in (1, 2):
        for index in sorted(widths, key=lambda index: widths[index][wish] - widths[index][0]):
            column = table.columns[index]
            more = widths[index][wish] - (column.width or 0)
            if 0 < more <= room:
                column.width, room = widths[index][wish], room - more
    if room < 0:
        table.width = _width(console, table)


def _fitting(console: Console, table: Table) -> list[Table]:
    """The table in parts that fit, each with the first column; cells may take a second line where that is enough."""
    if _width(console, table) <= console.width:
        return [table]
    first, *others = range(len(table.columns))
    parts, taken = [], list[int]()
    for column in others:
        if taken and _width(console, _part(table, [first, *taken, column])) > console.width:
            parts.append(_part(table, [first, *taken]))
            taken = []
        taken.append(column)
    return [*parts, _part(table, [first, *taken])]


def _widths_of(console: Console, column: Column) -> tuple[int, int, int]:
    """The widths of a column for its longest word, for its longest cell, and for cells and head; without padding."""
    options = console.options.update(max_width=_ANY_WIDTH)
    texts = (console.render_str(cell) if isinstance(cell, str) else cell for cell in (column.header, *column.cells))
    head, *cells = (Measurement.get(console, options, text) for text in texts)
    longest = max((each.maximum for each in cells), default=0)
    whole = max(head.maximum, longest)
    if column.no_wrap:
        return whole, whole, whole
    return max(head.minimum, *(each.minimum for each in cells), 0), max(head.minimum, longest), whole


def _width(console: Console, table: Table) -> int:
    """The least width at which no cell breaks within a word: with padding, and lines between and around columns."""
    lines = int(table.box is not None)
    return sum(_widths_of(console, column)[0] + 2 + lines for column in table.columns) + lines


def _part(table: Table, columns: Sequence[int]) -> Table:
    """Some of the columns."""
    part = Table(box=table.box)
    for index in columns:
        column = table.columns[index]
        part.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
    cells = [list(table.columns[index].cells) for index in columns]
    for row, values in zip(table.rows, zip(*cells, strict=True), strict=True):
        part.add_row(*values, style=row.style)
    return part


def table_of_numbers(first: str, *others: str, box: Box | None = HEAVY_HEAD) -> Table:
    """A table without rows yet, whose first column is words and whose other columns are numbers."""
    table = Table(box=box)
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column, justify="right")
    return table

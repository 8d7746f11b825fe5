"""Text files (CSV, TSV; compressed or not) as a stream of tables whose rows know their line numbers.

A row is a line: a quoted value may hold the delimiter but no line break.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from rowmesh.data.compression import CORRUPT, open_stream
from rowmesh.data.quarantine import BadRows
from rowmesh.data.schema import Schema
from rowmesh.data.source import RawTable, check_columns
from rowmesh.errors import DataError

BLOCK_BYTES = 8 << 20
MAX_LINE_BYTES = 64 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_text(path: Path, schema: Schema, quarantine: BadRows) -> Iterator[RawTable]:
    """Tables of whole lines; rows with the wrong number of columns go to the quarantine.

    Raises:
        DataError: the file cannot be decompressed, its header lacks a column, or a line never ends.
    """
    for names, block, line, position in row_blocks(path, schema):
        yield from BlockParser(path, schema, names, quarantine, position).parse(block, line)


def row_blocks(path: Path, schema: Schema) -> Iterator[tuple[tuple[str, ...], bytes, int, int]]:
    """The columns, a block of whole lines without the header, the number of its first line, and as `_line_blocks`."""
    names, line = schema.columns, 1
    for block, position in _line_blocks(path):
        if line == 1:
            block = block.removeprefix(BYTE_ORDER_MARK)
            _check_line_ends(path, block)
        if not names:
            header, _, block = block.partition(b"\n")
            names, line = _header(path, header, schema), 2
        yield names, block, line, position
        line += block.count(b"\n")


def _line_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Blocks that end with a line break, and how many bytes of the (compressed) file were read."""
    try:
        with open_stream(path) as (stream, raw):
            rest = b""
            while data := stream.read(BLOCK_BYTES):
                cut = data.rfind(b"\n") + 1
                if cut:
                    yield rest + data[:cut], raw.tell()
                    rest = b""
                rest += data[cut:]
                if len(rest) > MAX_LINE_BYTES:
                    ends = "; its lines end with a carriage return alone" if b"\r" in rest else ""
                    raise DataError(f"{path}: a line is longer than {MAX_LINE_BYTES} bytes{ends}; is this a text file?")
            if rest:
                yield rest + b"\n", raw.tell()
    except CORRUPT as error:
        raise DataError(f"{path}: cannot be read to its end: {error}") from error


def _header(path: Path, header: bytes, schema: Schema) -> tuple[str, ...]:
    text = header.decode("utf-8", "backslashreplace").rstrip("\r")
    if "\0" in text:
        raise DataError(f"{path}: the header holds bytes of value 0; is this a text file?")
    try:
        names = next(_csv_rows(text, schema), [])
    except csv.Error as error:
        raise DataError(f"{path}: the header is no line of text ({error}); is this a text file?") from error
    check_columns(path, schema, names)
    return tuple(names)


def _check_line_ends(path: Path, block: bytes) -> None:
    """Raises DataError where the first block of a file ends its lines in a way that is not read."""
    if block.count(b"\n") == 1 and block.rstrip(b"\r\n").count(b"\r"):  # the one that was added at the end
        raise DataError(
            f"{path}: its lines end with a carriage return alone, so that it is one line; convert it, as in: "
            f"tr '\\r' '\\n' < {path.name}"
        )


def _csv_rows(text: str, schema: Schema, *, strict: bool = False) -> Iterator[list[str]]:
    quoting = csv.QUOTE_MINIMAL if schema.quote else csv.QUOTE_NONE
    quote = schema.quote or None
    return csv.reader([text], delimiter=schema.delimiter, quotechar=quote, quoting=quoting, strict=strict)


def _is_utf8(block: bytes) -> bool:
    try:
        return block.isascii() or bool(block.decode())
    except UnicodeDecodeError:
        return False


class BlockParser:
    """Parses one block of lines, knowing the line of every row."""

    def __init__(self, path: Path, schema: Schema, names: tuple[str, ...], quarantine: BadRows, position: int) -> None:
        self.path, self.schema, self.names = path, schema, names
        self.quarantine, self.position = quarantine, position

    def parse(self, block: bytes, first_line: int) -> Iterator[RawTable]:
        """Tables of the block's rows, usually one; bad rows are quarantined with their line."""
        if not block:
            return
        num_lines = block.count(b"\n")
        malformed: list[tuple[int, str]] = []
        table = self._read(block, malformed)
        # [Note: lines are rows] A lone carriage return makes more rows than lines, an open quote fewer;
        # the empty line at the end is one that a quote in the last line would swallow. Where rows and
        # lines disagree, halving the block finds the line, at the cost of parsing twice.
        if table is not None and table.num_rows + len(malformed) == num_lines + 1:
            for number, reason in malformed:
                self._reject(block, first_line, number, reason)
            good = np.delete(np.arange(num_lines), [number for number, _ in malformed])
            yield RawTable(table.slice(0, len(good)), first_line + good, _LineText(block, good), self.position)
        elif num_lines == 1:
            self._reject(block, first_line, 0, self._why(block))
        else:
            middle = block.find(b"\n", len(block) // 2) + 1
            if middle == len(block):
                middle = block.rfind(b"\n", 0, len(block) - 1) + 1
            yield from self.parse(block[:middle], first_line)
            yield from self.parse(block[middle:], first_line + block.count(b"\n", 0, middle))

    def _read(self, block: bytes, malformed: list[tuple[int, str]]) -> pa.Table | None:
        """The rows of a block and an empty one at the end; None where lines are not rows."""
        if block.count(b"\r") != block.count(b"\r\n"):
            return None

        def on_invalid(row: pa_csv.InvalidRow) -> str:
            malformed.append(
                (row.number - 1, self._wrong_number(row.actual_columns))
            )  # numbers are exact on a single thread
            return "skip"

        # [Note: lines that are no UTF-8] The handler of invalid rows takes text only. Without it an invalid row
        # is an error: halving the block finds the line, and `_why` says what is wrong with it.
        ended = block + b"\n"
        try:
            return pa_csv.read_csv(
                pa.BufferReader(ended),
                pa_csv.ReadOptions(use_threads=False, block_size=len(ended) + 1, column_names=self.names),
                pa_csv.ParseOptions(
                    delimiter=self.schema.delimiter,
                    quote_char=self.schema.quote or False,
                    ignore_empty_lines=False,
                    invalid_row_handler=on_invalid if _is_utf8(block) else None,
                ),
                pa_csv.ConvertOptions(
                    column_types=dict.fromkeys(self.names, pa.binary()),
                    include_columns=list(self.schema.source_columns),
                    null_values=[],
                ),
            )
        except pa.ArrowInvalid:
            return None

    def _why(self, line: bytes) -> str:
        """The reason why a line does not parse."""
        text = line.rstrip(b"\r\n").decode("latin-1")  # a character for each byte
        try:
            num_columns = len(next(_csv_rows(text, self.schema, strict=True), ()))
        except csv.Error:
            num_columns = len(self.names)
        if num_columns == len(self.names) or "\r" in text:
            return "a line break inside a value, or a quote that is not closed"
        return self._wrong_number(num_columns)

    def _wrong_number(self, num_columns: int) -> str:
        return f"{num_columns} column{'' if num_columns == 1 else 's'} instead of {len(self.names)}"

    def _reject(self, block: bytes, first_line: int, number: int, reason: str) -> None:
        self.quarantine.add(self.path, first_line + number, reason, _LineText(block)(number))


class _LineText:
    """The text of a block's lines, split only when one is asked for."""

    def __init__(self, block: bytes, rows: NDArray[np.int64] | None = None) -> None:
        self.block, self.rows = block, rows
        self.lines: list[bytes] | None = None

    def __call__(self, row: int) -> bytes:
        if self.lines is None:
            self.lines = self.block.split(b"\n")
        return self.lines[row if self.rows is None else self.rows[row]].removesuffix(b"\r")

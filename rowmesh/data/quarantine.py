"""Quarantine: rows that cannot be used, kept with the reason, up to a budget."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Protocol, Self

from rowmesh.errors import DataError

MAX_ROW_CHARACTERS = 10_000


class BadRows(Protocol):
    """What readers tell of rows that cannot be used."""

    def add(self, file: Path, line: int, reason: str, row: bytes | str) -> None:
        """Takes one bad row, or raises DataError."""
        ...


class NoBadRows:
    """Refuses the first bad row: for tables in memory, of which nothing may be left out."""

    def add(self, file: Path, line: int, reason: str, row: bytes | str) -> None:
        """Raises DataError, which names the row, counted from 0, and what is wrong."""
        raise DataError(f"{file}: row {line - 1}: {reason}")


class Quarantine:
    """Writes every bad row to a file of JSON lines and stops when there are too many.

    Each line of the file holds `file`, `line` (1-based; the row number in Parquet), `reason` and `row`.

    Args:
        path: the file; created with the first bad row.
        max_bad_rows: how many bad rows are tolerated; one more raises.
        keep_at: where the file is moved when that happens, since the folder it is in will not stay.
    """

    def __init__(self, path: Path, max_bad_rows: int, keep_at: Path) -> None:
        self.path = path
        self.keep_at = keep_at
        self.max_bad_rows = max_bad_rows
        self.num_bad_rows = 0
        self._first: list[str] = []
        self._file = None

    def add(self, file: Path, line: int, reason: str, row: bytes | str) -> None:
        """Records one bad row.

        Raises:
            DataError: the budget is spent; names the first bad rows and the quarantine file.
        """
        if self._file is None:
            # names of files need not be UTF-8
            self._file = self.path.open("w", encoding="utf-8", errors="backslashreplace")
        text = row.decode("utf-8", "backslashreplace") if isinstance(row, bytes) else row
        record = {"file": str(file), "line": line, "reason": reason, "row": text[:MAX_ROW_CHARACTERS]}
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.num_bad_rows += 1
        if len(self._first) < 3:
            self._first.append(f"{file}:{line}: {reason}")
        if self.num_bad_rows > self.max_bad_rows:
            self.close()
            shutil.move(self.path, self.keep_at)
            raise DataError(
                f"{self.num_bad_rows} bad rows, more than the {self.max_bad_rows} allowed; {self.first()}\n"
                f"They are in {self.keep_at}. Check the schema, mend the rows, or raise --max-bad-rows"
            )

    def first(self) -> str:
        """The first bad rows, one a line."""
        return "the first:\n  " + "\n  ".join(self._first)

    def close(self) -> None:
        """Closes the file; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Quarantine: rows that cannot be used, kept with the reason, up to a budget."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Protocol, Self

from rowmesh.errors import DataError

logger = logging.getLogger("rowmesh")
MAX_ROW_CHARACTERS = 10_000


class BadRows(Protocol):
    """A receiver of the rows that readers cannot use."""

    def add(self, file: Path, line: int, reason: str, row: bytes | str) -> None:
        """Takes one bad row, or raises DataError."""
        ...


class NoBadRows:
    """Refuses the first bad row: for tables in memory, of which nothing may be left out."""

    def add(self, file: Path, line: int, reason: str, row: bytes | str) -> None:
        """Raises DataError, which names the row, counted from 0, and what is wrong."""
        raise DataError(f"{file}: row {line - 1}: {reason}")


class FewBadRows:
    """Leaves bad rows out, up to a limit, and keeps none: of those that models are evaluated on. Warns of the first.

    Args:
        max_bad_rows: how many bad rows are tolerated; one more raises.
        option: what raises the limit, for the message.
    """

    def __init__(self, max_bad_rows: int, option: str) -> None:
        self._max_bad_rows, self._option, self._num_bad_rows, self._first = max_bad_rows, option, 0, ""

    def add(self, file: Path, line: int, reason: str, row: bytes | str) -> None:
        """Counts one bad row.

        Raises:
            DataError: there are too many; names the first.
        """
        self._num_bad_rows += 1
        self._first = self._first or f"{file}:{line}: {reason}"
        if self._num_bad_rows > self._max_bad_rows:
            raise DataError(
                f"{self._num_bad_rows} bad rows, more than the {self._max_bad_rows} allowed; the first: {self._first}. "
                f"Check the schema, mend the rows, or raise {self._option}"
            )
        if self._num_bad_rows == 1:
            logger.warning("bad rows are left out, the first: %s", self._first)


class Quarantine:
    """Writes every bad row to a file of JSON lines and stops when there are too many.

    Each line of the file holds `file`, `line` (1-based; the row number in Parquet), `reason` and `row`.

    Args:
        path: the file; created with the first bad row.
        max_bad_rows: how many bad rows are tolerated; one more raises.
        keep_at: where the file is moved when that happens, since the folder it is in will not stay.
        option: what raises the limit, for the message.
    """

    def __init__(self, path: Path, max_bad_rows: int, keep_at: Path, option: str = "--max-bad-rows") -> None:
        self.path, self._option = path, option
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
        self._file.flush()  # a run that is killed does not read the row again
        self.num_bad_rows += 1
        if len(self._first) < 3:
            self._first.append(f"{file}:{line}: {reason}")
        if self.num_bad_rows > self.max_bad_rows:
            self.close()
            shutil.move(self.path, self.keep_at)
            raise DataError(
                f"{self.num_bad_rows} bad rows, more than the {self.max_bad_rows} allowed; {self.first()}\n"
                f"They are in {self.keep_at}. Check the schema, mend the rows, or raise {self._option}"
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

"""FileSource: the rows of text or Parquet files, in the order of their names; and of files that appear later."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from rowmesh.data.parquet import KnownForms, column_forms, read_forms, read_tables, row_text
from rowmesh.data.quarantine import BadRows
from rowmesh.data.raw.source import Chunk, Position
from rowmesh.data.schema import Schema
from rowmesh.data.source import RawTable
from rowmesh.data.text import BlockParser, row_blocks
from rowmesh.errors import ConfigurationError, DataError

END_FILE = "_END"
"""A file of this name says that no more files will come."""
_UNFINISHED = (".tmp", ".part", ".partial", ".crdownload")
_NEWLINE = ord("\n")
_POSITION = ("file", "row", "before", "size")
_WHOLE = (
    "Files must appear whole, by a rename: cut it back to what it was, and give what came later in a file of its own "
    "with a later name"
)


class FileSource:
    """The rows of files, in the order in which they are given; or of a folder's, in the order of their names.

    With `follow`, files that appear in the folder later are read too, until there is one called `_END`. A file must
    appear whole, by a rename: one that grows after it was read is an error, since the rest would be skipped. Its name
    must come after those of all that were there: what comes before would be skipped by a run that is further on, so
    that is an error, also where it appears while a run is stopped. Names that begin with "." or "_", or end with .tmp,
    .part, .partial or .crdownload, are not read. Without `follow` no file may appear in the folder meanwhile: each rank
    lists it by itself.

    Columns of Parquet files hold lists or single ids, integers or text, and all files in the same way. The first file
    says which; where its column is of type null, the next ones do, or, with `follow`, the column holds single ids.

    Args:
        paths: files; or one folder.
        schema: how to read them.
        follow: whether to wait for more files.
        forms: of the columns of Parquet files, as far as they are known from elsewhere; those of these files are added.

    Raises:
        ConfigurationError: there is no such file, one is given twice, or files are to be followed that are no folder.
        DataError: nothing is followed, and the folder has no files to read; or one of them is a link to nothing.
    """

    def __init__(
        self, paths: Sequence[str | Path], schema: Schema, *, follow: bool = False, forms: KnownForms | None = None
    ) -> None:
        self.schema, self.follow = schema, follow
        self._forms = KnownForms(schema) if forms is None else forms
        self._files = [Path(path) for path in paths]
        self._folder = self._files[0] if len(self._files) == 1 and self._files[0].is_dir() else None
        if not self._files:
            raise ConfigurationError("no files to read; give some, or a folder")
        if follow and self._folder is None:
            raise ConfigurationError(
                f"files can be followed in one folder, and {', '.join(map(str, self._files))} is none; give the folder "
                "in which they appear"
            )
        if self._folder is None and (missing := [path for path in self._files if not path.is_file()]):
            raise ConfigurationError(f"{missing[0]} is no file; give files, or one folder")
        if twice := [path for path, count in Counter(self._files).items() if count > 1]:
            raise ConfigurationError(f"{twice[0]} is given twice; give each file once")
        self._check_some(self.files)
        self._base = self._folder or Path(os.path.commonpath([path.absolute().parent for path in self._files]))

    @property
    def files(self) -> list[Path]:
        """The files that are there now, in their order.

        Raises:
            DataError: one is a link to nothing, or no file.
        """
        if self._folder is None:
            return self._files
        found = []
        for path in self._folder.iterdir():
            if not _is_data(path.name):
                continue
            if path.is_file():
                found.append(path)
            elif path.is_symlink() and not path.exists():
                raise DataError(
                    f"{path} is a link to {path.readlink()}, which is not there; put that back, or remove the link"
                )
            elif path.exists() and not path.is_dir():
                raise DataError(
                    f"{path} is a pipe, a socket or a device, and no file; remove it, or name it _{path.name}"
                )
        return sorted(found)

    @property
    def multi_hot(self) -> tuple[bool, ...]:
        """By categorical feature, whether rows have lists; of Parquet files known with the first chunk."""
        return self.schema.separated if self.schema.format == "text" else self._forms.multi_hot

    def chunks(self, position: Position | None) -> Iterator[Chunk | None]:
        """Chunks of rows; see `Source.chunks`."""
        has_forms = self.schema.format == "text"
        done: list[Path] = []
        sizes: list[int] = []  # that they had when they were read
        resumed = None
        if position is not None:
            if lost := [key for key in _POSITION if key not in position]:
                raise DataError(
                    f"the position has no {', '.join(lost)}: it is none in files; give a position that a loader of "
                    "these files returned, or start without the position"
                )
            resumed, there = str(position["file"]), self.files
            names = [self._name(path) for path in there]
            if resumed not in names:
                raise DataError(
                    f"the position is in {resumed}, row {position['row']:,}, and there is no such "
                    "file any more; put it back, or start without the position"
                )
            done = there[: names.index(resumed)]
            sizes = [path.stat().st_size for path in done]
            self._check_read_before(resumed, names[: len(done)], sizes, position["before"])
            _check_size(there[len(done)], position["size"])
        digest = xxhash.xxh3_64(b"".join(_digested(self._name(path)) for path in done))
        size_digest = xxhash.xxh3_64(_sized(sizes))
        while True:
            is_last = not self.follow or (self._folder is not None and (self._folder / END_FILE).exists())
            files = self.files  # listed after the end was looked for, so that none before the end is missed
            self._check_some(files)
            self._check_order(files, done)
            if files and not has_forms:
                self._learn_forms(files[: max(len(done), 1)] if self.follow else files)
                has_forms = True
            for path in files[len(done) :]:
                if done:
                    _check_size(done[-1], sizes[-1])
                skip = int(position["row"]) if position is not None and self._name(path) == resumed else 0
                before = [len(done), digest.hexdigest(), size_digest.hexdigest()]
                file = _File(path, self._name(path), before, path.stat().st_size)
                yield from self._chunks_of(file, skip)
                _check_size(path, file.size)
                done.append(path)
                sizes.append(file.size)
                digest.update(_digested(file.name))
                size_digest.update(_sized([file.size]))
            for path, size in zip(done, sizes, strict=True) if is_last else zip(done[-1:], sizes[-1:], strict=True):
                _check_size(path, size)
            if is_last:
                return
            yield None

    def _learn_forms(self, files: Sequence[Path]) -> None:
        """Reads the forms of columns from files, before any row, until the forms of all columns are known.

        Ranks that follow files may see different files at the start. They agree only on the first file and on the
        files that were read before, so the first file alone decides which columns hold lists.
        """
        for path in files:
            if self._forms.is_complete:
                return
            self._forms.add(path, read_forms(path, self.schema))
            if self.follow:
                self._forms.take_unknown_as_single(path)

    def _name(self, path: Path) -> str:
        """A file in positions: below the folder that all have in common, which may move."""
        return path.absolute().relative_to(self._base.absolute()).as_posix()

    def _check_some(self, files: list[Path]) -> None:
        if not files and not self.follow:
            raise DataError(
                f"{self._folder} has no files to read; names that begin with . or _, names of unfinished files "
                f"({', '.join(_UNFINISHED)}) and folders in it are left out"
            )

    def _check_read_before(self, resumed: str, names: Sequence[str], sizes: Sequence[int], read: Sequence[Any]) -> None:
        """Refuses a position before which other files were read than are there now."""
        there = [len(names), *(xxhash.xxh3_64_hexdigest(of) for of in (b"".join(map(_digested, names)), _sized(sizes)))]
        if list(read) == there:
            return
        if list(read)[:2] == there[:2]:
            latest = max(self.files[: len(names)], key=lambda path: path.stat().st_mtime_ns)
            raise DataError(
                f"{self._base}: one of the {len(names):,} files before {resumed}, in which the position is, has "
                f"another size than when it was read; written to last was {latest}. {_WHOLE}, or start without the "
                "position"
            )
        what = "appeared" if len(names) > int(read[0]) else "are gone or have other names"
        raise DataError(
            f"{self._base}: {len(names):,} files come before {resumed}, in which the position is, and {read[0]:,} were "
            f"read before it: some {what} after {resumed} was begun. Files must appear in the order of their names, "
            "and stay, or some runs would skip rows: give late files later names, put back what is gone, or start "
            "without the position"
        )

    def _check_order(self, files: list[Path], done: list[Path]) -> None:
        if files[: len(done)] == done:
            return
        known, there = set(done), set(files)
        if late := [path for path in files[: len(done)] if path not in known]:
            raise DataError(
                f"{late[0]} appeared after {done[-1].name} was read, and its name comes before; files must appear in "
                "the order of their names, or some runs would skip them: give it a later name"
            )
        if gone := [path for path in done if path not in there]:
            raise DataError(f"{gone[0]} was read and is gone; files that are followed must stay until the run ends")

    def _chunks_of(self, file: _File, skip: int) -> Iterator[Chunk]:
        is_text = self.schema.format == "text"
        chunks = _text_chunks(file, self.schema) if is_text else _table_chunks(file, self.schema, self._forms)
        row = 0
        for chunk in chunks:
            row += len(chunk)
            if row > skip:
                yield chunk if row - len(chunk) >= skip else _Rest(chunk, skip - (row - len(chunk)))
        if row < skip:
            raise DataError(
                f"{file.path} has {row:,} rows, and the position is after row {skip:,} of it: it is not the file that "
                "was read; put that back, or start without the position"
            )


class _File(NamedTuple):
    """A file, what positions name it, how many come before it, with digests of their names and sizes, and its size."""

    path: Path
    name: str
    before: list[int | str]
    size: int

    def position(self, row: int) -> Position:
        """The place after so many rows."""
        return {"file": self.name, "row": row, "before": self.before, "size": self.size}


class _Rest:
    """A chunk without its first rows, which were read before."""

    def __init__(self, chunk: Chunk, first: int) -> None:
        self.name, self._chunk, self._first = chunk.name, chunk, first

    def __len__(self) -> int:
        return len(self._chunk) - self._first

    def tables(self, first: int, end: int, quarantine: BadRows) -> Iterator[RawTable]:
        """See `Chunk`."""
        return self._chunk.tables(self._first + first, self._first + end, quarantine)

    def position(self, rows: int) -> Position:
        """See `Chunk`."""
        return self._chunk.position(self._first + rows)


class _TextChunk:
    """Whole lines."""

    def __init__(self, file: _File, schema: Schema, names: tuple[str, ...], block: bytes, line: int, row: int) -> None:
        self.name, self._file, self._schema, self._names = str(file.path), file, schema, names
        self._block, self._line, self._row = block, line, row
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE) + 1
        self._bounds = np.concatenate([np.zeros(1, np.int64), ends])

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def tables(self, first: int, end: int, quarantine: BadRows) -> Iterator[RawTable]:
        """See `Chunk`."""
        part = self._block[self._bounds[first] : self._bounds[end]]
        parser = BlockParser(self._file.path, self._schema, self._names, quarantine, 0)
        return parser.parse(part, self._line + first)

    def position(self, rows: int) -> Position:
        """See `Chunk`."""
        return self._file.position(self._row + rows)


class _TableChunk:
    """Rows of a Parquet file."""

    def __init__(self, file: _File, table: pa.Table, row: int) -> None:
        self.name, self._file, self._table, self._row = str(file.path), file, table, row

    def __len__(self) -> int:
        return self._table.num_rows

    def tables(self, first: int, end: int, quarantine: BadRows) -> Iterator[RawTable]:
        """See `Chunk`."""
        part = self._table.slice(first, end - first)
        lines = np.arange(self._row + first + 1, self._row + end + 1)
        yield RawTable(part, lines, row_text(part), self._row + end)

    def position(self, rows: int) -> Position:
        """See `Chunk`."""
        return self._file.position(self._row + rows)


def _text_chunks(file: _File, schema: Schema) -> Iterator[_TextChunk]:
    row = 0
    for names, block, line, _ in row_blocks(file.path, schema):
        chunk = _TextChunk(file, schema, names, block, line, row)
        if len(chunk):
            yield chunk
        row += len(chunk)


def _table_chunks(file: _File, schema: Schema, forms: KnownForms) -> Iterator[_TableChunk]:
    path, row = file.path, 0
    for table in read_tables(path, schema, lambda types: forms.add(path, column_forms(path, schema, types))):
        if table.num_rows:
            yield _TableChunk(file, table, row)
        row += table.num_rows


def _check_size(path: Path, size: int) -> None:
    """Refuses a file that has another size than when it was read."""
    if not path.exists() or (now := path.stat().st_size) == size:  # what is gone, others say
        return
    what = f"{path} has {now:,} bytes, and had {size:,} when it was read"
    if now > size:
        raise DataError(f"{what}: what came later would be skipped. {_WHOLE}")
    raise DataError(f"{what}: it is not the file that was read; put that back, or start without the position")


def _sized(sizes: Sequence[int]) -> bytes:
    return b"".join(size.to_bytes(8, "little") for size in sizes)


def _digested(name: str) -> bytes:
    return os.fsencode(name) + b"\0"


def _is_data(name: str) -> bool:
    return not name.startswith((".", "_")) and not name.endswith(_UNFINISHED)

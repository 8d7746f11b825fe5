"""Chain: an increment and what it adds to, down to a full checkpoint; read as if it were one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh._support.files.regular import read_regular
from rowmesh.checkpoint.entries import RowsPart, TableEntry
from rowmesh.checkpoint.files import SavedArray, SavedFiles, cannot_read
from rowmesh.checkpoint.manifest import MANIFEST, Manifest, as_numpy, step_name
from rowmesh.errors import CheckpointError, DamagedCheckpointError, UnreadableError
from rowmesh.ops.ranges import intersect
from rowmesh.tables.shard import ROWS, row_dtype

CHUNK_ROWS = 1 << 18  # bounds the temporaries of a copy
CHUNK_BYTES = 8 << 20  # that a thread verifies and copies at once
NUM_THREADS = 4
"""Threads of a rank: while one waits for the disk, others verify and copy, all without the interpreter."""


class ChainLink(NamedTuple):
    """A checkpoint of a chain."""

    folder: Path
    manifest: Manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = folder / MANIFEST
    try:
        text = read_regular(path).decode()
    except FileNotFoundError:
        raise CheckpointError(
            f"no model in {folder}: {MANIFEST} is missing (did training finish? is it the right folder?)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise cannot_read(f"cannot read {path}: {getattr(error, 'strerror', None) or error}", error) from None
    return Manifest.from_json(text, path)


def parent_of(link: ChainLink) -> Path | None:
    """Where the checkpoint is that one adds to; None: it is full."""
    parent = link.manifest.parent
    return None if parent is None else link.folder.absolute().parent / step_name(parent.step)


def read_chain(folder: Path) -> tuple[ChainLink, ...]:
    """A checkpoint and those that it adds to, the newest first; the last is full.

    Raises:
        CheckpointError: one is missing, cannot be read, or is another than the increment was made of.
    """
    links = [ChainLink(folder, read_manifest(folder))]
    while (place := parent_of(links[-1])) is not None:
        links.append(_parent(links[-1], place))
    return tuple(links)


def _parent(child: ChainLink, place: Path) -> ChainLink:
    wanted = child.manifest.parent
    assert wanted is not None
    what = f"{child.folder} is an increment of step {wanted.step:,}"
    if _is_missing(place / MANIFEST):
        kind = UnreadableError if place.is_symlink() else DamagedCheckpointError  # its disk may not be mounted now
        raise kind(f"{what}, and {place} is missing; restore it from a copy, or take an older checkpoint")
    try:
        manifest = read_manifest(place)
    except CheckpointError as error:
        raise type(error)(f"{what}, which cannot be read: {error}") from None
    is_same = manifest.identity == wanted.identity and manifest.depth == wanted.depth
    if not is_same and (manifest.parent is not None or manifest.replaces != wanted.identity):
        raise DamagedCheckpointError(
            f"{what}, but of another one than {place}: of files {wanted.identity.folder}, digest "
            f"{wanted.identity.digest}, and not {manifest.folder}, {manifest.digest}; restore that "
            "one from a copy, or take an older checkpoint"
        )
    if (own := _shapes(child.manifest)) != (other := _shapes(manifest)):
        raise DamagedCheckpointError(f"{what}, and has other tables: {own}, and {place} {other}")
    return ChainLink(place, manifest)


def _is_missing(path: Path) -> bool:
    """Whether it is known that there is no such file; not where the system does not let that be known."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _shapes(manifest: Manifest) -> dict[str, tuple[object, ...]]:
    return {
        name: (entry.num_rows, entry.dim, entry.dtype, entry.optimizer, entry.content.text)
        for name, entry in manifest.tables.items()
    }


class SavedTable:
    """The rows of one table of a chain, mapped.

    Args:
        name: of the table.
        entries: of the table, the newest first.
        files: of the same checkpoints.
    """

    def __init__(self, name: str, entries: Sequence[TableEntry], files: Sequence[SavedFiles]) -> None:
        self._name, self._full, self._files = name, entries[-1], files[-1]
        self._mapped: list[dict[str, SavedArray]] = [{} for _ in self._full.parts]
        # The oldest first: what is newer is put over it.
        newer = list(zip(entries[:-1], files[:-1], strict=True))[::-1]
        self._increments = [_Changed(name, entry, of) for entry, of in newer]

    def fill(self, numbers: range, targets: Mapping[str, Tensor]) -> None:
        """Copies rows to targets: "values" and states, `[len(numbers), …]`.

        Raises:
            CheckpointError: a file is missing, damaged, or has something else; or a row is in no file.
        """
        found, copies = 0, list[Callable[[], None]]()
        for part, mapped in zip(self._full.parts, self._mapped, strict=True):
            if common := _common(part, numbers):
                _map(self._name, self._files, part, mapped, targets)
                copies += _copies(common, targets, mapped)
                found += sum(len(wanted) for _, _, wanted in common)
        _do_all(copies)
        if found != len(numbers):
            raise DamagedCheckpointError(
                f"table {self._name!r}: {len(numbers) - found} of {len(numbers)} rows are in no file of "
                f"{self._files.folder}"
            )
        for each in self._increments:
            each.fill(numbers, targets)


class _Changed:
    """The rows of one table of an increment."""

    def __init__(self, name: str, entry: TableEntry, files: SavedFiles) -> None:
        self._name, self._files, self._parts = name, files, entry.parts
        self._mapped: list[dict[str, SavedArray]] = [{} for _ in entry.parts]
        dtype, found = torch.empty(0, dtype=row_dtype(entry.num_rows), device="cpu"), []
        for part in entry.parts:
            found.append(files.array(name, ROWS, part.files, dtype, (part.count,))[:])
        rows = np.concatenate(found) if found else np.empty(0, np.int64)
        order = np.argsort(rows, kind="stable")
        self._rows = rows[order]
        self._places = order  # in all parts, one after the other
        self._firsts = np.cumsum([0, *(part.count for part in entry.parts)])
        if len(rows) and not 0 <= self._rows[0] <= self._rows[-1] < entry.num_rows:
            raise DamagedCheckpointError(
                f"table {name!r}: an increment in {files.folder} has rows {self._rows[0]:,} to {self._rows[-1]:,} of "
                f"{entry.num_rows:,}"
            )
        if len(twice := np.flatnonzero(self._rows[1:] == self._rows[:-1])):
            raise DamagedCheckpointError(f"table {name!r}: row {self._rows[twice[0]]:,} is twice in {files.folder}")

    def fill(self, numbers: range, targets: Mapping[str, Tensor]) -> None:
        """Copies those of the rows that it has."""
        if not len(numbers):
            return
        first, last = np.searchsorted(self._rows, [numbers.start, numbers[-1] + 1])
        at, rest = np.divmod(self._rows[first:last].astype(np.int64) - numbers.start, numbers.step)
        here = np.flatnonzero(rest == 0)
        at, places = at[here], self._places[first:last][here]
        parts = np.searchsorted(self._firsts, places, side="right") - 1
        for number in np.unique(parts).tolist():
            part, mapped, own = self._parts[number], self._mapped[number], parts == number
            _map(self._name, self._files, part, mapped, targets)
            for kind, target in targets.items():
                _copy(mapped[kind], places[own] - self._firsts[number], as_numpy(target), at[own])


def _copy(source: SavedArray, places: npt.NDArray[Any], target: npt.NDArray[Any], at: npt.NDArray[Any]) -> None:
    for begin in range(0, len(places), CHUNK_ROWS):
        chunk, to = places[begin : begin + CHUNK_ROWS], at[begin : begin + CHUNK_ROWS]
        low = int(chunk.min())
        target[to] = source[low : int(chunk.max()) + 1][chunk - low]


def _do_all(copies: Sequence[Callable[[], None]]) -> None:
    """In threads; raises the first error, in their order."""
    if len(copies) < 2:
        for copy in copies:
            copy()
        return
    with ThreadPoolExecutor(NUM_THREADS, "rowmesh-read") as threads:
        try:
            for done in [threads.submit(copy) for copy in copies]:
                done.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _map(
    name: str, files: SavedFiles, part: RowsPart, mapped: dict[str, SavedArray], targets: Mapping[str, Tensor]
) -> None:
    for kind, target in targets.items():
        if kind not in mapped:
            mapped[kind] = files.array(name, kind, part.files, target, (part.count, *target.shape[1:]))


def _common(part: RowsPart, numbers: range) -> list[tuple[int, range, range]]:
    """The ranges of a part that have some of the rows: the first place of each in the files, which of its rows, and
    where in `numbers` they are.
    """
    found, before = list[tuple[int, range, range]](), 0
    for bounds in part.ranges:
        rows = range(bounds.start, bounds.start + bounds.count * bounds.stride, bounds.stride)
        if (common := intersect(rows, numbers)) is not None:
            found.append((before, *common))
        before += bounds.count
    return found


def _copies(
    common: Sequence[tuple[int, range, range]], targets: Mapping[str, Tensor], sources: Mapping[str, SavedArray]
) -> Iterator[Callable[[], None]]:
    """Calls that copy the common rows, in any order."""
    for before, saved, wanted in common:
        for kind, target in targets.items():
            rows = _rows_of(target)
            for begin in range(0, len(saved), rows):
                to, at = wanted[begin : begin + rows], saved[begin : begin + rows]
                from_rows = slice(before + at.start, before + at.stop, at.step)
                to_rows = slice(to.start, to.stop, to.step)
                yield partial(_copy_rows, sources[kind], from_rows, as_numpy(target), to_rows)


def _rows_of(target: Tensor) -> int:
    """Rows that are copied at once."""
    return max(1, CHUNK_BYTES // (target[:1].numel() * target.itemsize)) if len(target) else 1


def _copy_rows(source: SavedArray, from_rows: slice, target: npt.NDArray[Any], to_rows: slice) -> None:
    target[to_rows] = source[from_rows]

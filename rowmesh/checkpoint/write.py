"""Writing a checkpoint: every rank its own rows, and nothing visible before all of it is on disk."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from rowmesh._support.faults import reach
from rowmesh._support.files.advice import advice, as_refusal, may_pass
from rowmesh._support.files.atomic import sync_folder, write_text
from rowmesh._support.files.checksums import Checksums
from rowmesh.checkpoint.entries import SavedRange, TableEntry, WrittenTable
from rowmesh.checkpoint.manifest import DENSE, MANIFEST, Identity, Manifest, Parent, file_name
from rowmesh.checkpoint.new_files import NewFiles, write_whole
from rowmesh.checkpoint.owned import check_free, remove_files
from rowmesh.errors import CheckpointError, CheckpointWriteError
from rowmesh.mesh.peers import Peers
from rowmesh.tables.shard import Form, Rows, RowSource
from rowmesh.tables.spec import TableSpec

T = TypeVar("T")

WRITING = "writing a checkpoint"
"""The action of the ranks, for the message of a PeerError."""


def save(
    folder: Path,
    embeddings: RowSource,
    dense: Mapping[str, Any] | memoryview,
    *,
    metadata: Mapping[str, Any] | None = None,
    peers: Peers | None = None,
    parent: Parent | None = None,
    replaces: Identity | None = None,
    beside_steps: bool = False,
) -> None:
    """Writes a checkpoint, replacing the one in `folder` only when all of it is on disk.

    Collective and blocking: every rank calls it, and all must see the same file system. No
    rows travel; every rank writes its own, and rank 0 writes `dense`.

    Args:
        folder: where; made if need be. An interrupted write leaves the former checkpoint as it was, and a
            folder beside it that the next write removes.
        embeddings: whose rows and optimizer state to write.
        dense: state dictionaries, for `torch.save`, or what it wrote of them; rank 0's are written.
        metadata: JSON values for the manifest.
        peers: the ranks; default: this process alone.
        parent: the checkpoint that the rows of `embeddings` add to: those that changed since. Default: they are all.
        replaces: the increment that this one is made of.
        beside_steps: whether training goes on meanwhile, so that large files are to pass the page cache.

    Raises:
        CheckpointWriteError: on every rank, where the system let a rank not write (disk full, say). Where it is the
            last step that failed, of which the message tells, the new checkpoint has its place nevertheless.
        CheckpointError: on every rank, where a rank failed otherwise.
        PeerError: another rank is gone, or stopped, or took longer than the process group waits; names it.
    """
    embeddings.synchronize()
    peers = peers or Peers()
    rank, token = peers.rank, peers.gather(secrets.token_hex(8), WRITING)[0]
    target, specs = folder / token, list[tuple[TableSpec, Form]]()
    try:
        _together(lambda: _prepare(folder, target) if rank == 0 else None, folder, peers)
        written = _together(
            lambda: _write_rows(NewFiles(target, beside_steps), embeddings, dense, rank, specs), folder, peers
        )
        manifest = _manifest(token, specs, written, dict(metadata or {}), parent)
        manifest = replace(manifest, replaces=replaces)
        _together(lambda: _publish(folder, manifest) if rank == 0 else None, folder, peers)
    except BaseException:
        if rank == 0 and not _is_published(folder, token):
            shutil.rmtree(target, ignore_errors=True)
            with contextlib.suppress(OSError):  # stays where it holds a former checkpoint
                folder.rmdir()
        raise
    if rank == 0:
        with contextlib.suppress(OSError):  # the new checkpoint is whole; the next write removes what is left
            _remove_others(folder, keep=token)


class _Written(NamedTuple):
    """The part of every table that a rank wrote, and the checksums of its files by name."""

    parts: dict[str, WrittenTable]
    checksums: dict[str, Checksums]


def _prepare(folder: Path, target: Path) -> None:
    reach("checkpoint.prepare", folder)
    check_free(folder)
    target.mkdir(parents=True)
    sync_folder(folder)


def _write_rows(
    new: NewFiles,
    embeddings: RowSource,
    dense: Mapping[str, Any] | memoryview,
    rank: int,
    specs: list[tuple[TableSpec, Form]],
) -> _Written:
    parts = {}
    waiting = [*embeddings.shards("owned")]
    while waiting:  # a table that is written need not be known any more
        rows = waiting.pop(0)
        specs.append((rows.spec, rows.form))
        parts[rows.spec.name] = _write_table(new, rows, rank)
    if rank == 0:
        new.write(DENSE, partial(_write_dense, dense), "checkpoint.write_dense")
    reach("checkpoint.sync", new.folder)
    sync_folder(new.folder)
    return _Written(parts, new.checksums)


def _write_table(new: NewFiles, rows: Rows, rank: int) -> WrittenTable:
    """Writes what this rank has of a table; the first rank alone what all have."""
    table, files, sizes, ranges = rows.spec.name, {}, {}, list[SavedRange]()
    if rank and rows.is_common:
        return WrittenTable(rank, {}, {}, (), None)
    point = "checkpoint.write_cores" if rows.is_common else "checkpoint.write_rows"
    for kind, array in rows.arrays:
        files[kind], sizes[kind] = file_name(table, rank, kind), len(array)
        new.write(files[kind], partial(write_whole, array=array), point)
    for prefix, pieces in rows.pieces.items():
        if pieces:
            names = {kind: file_name(table, rank, prefix + kind) for kind in ("values", *pieces[0].state)}
            files |= {prefix + kind: name for kind, name in names.items()}
            ranges += [SavedRange.of(piece.rows) for piece in pieces if isinstance(piece.rows, range)]
            new.write_pieces(names, pieces)
    return WrittenTable(rank, files, sizes, ranges, rows.logical)


def _write_dense(values: Mapping[str, Any] | memoryview, file: Any) -> None:
    if isinstance(values, memoryview):
        file.write(values)
    else:
        torch.save(dict(values), file)


def _manifest(
    token: str,
    tables: Sequence[tuple[TableSpec, Form]],
    written: Sequence[_Written],
    metadata: dict[str, Any],
    parent: Parent | None,
) -> Manifest:
    entries = {}
    for table, form in tables:
        parts = [of_rank.parts[table.name] for of_rank in written]
        entries[table.name] = TableEntry.of(table, form, parts, is_increment=parent is not None)
    checksums = {name: each for of_rank in written for name, each in of_rank.checksums.items()}
    number = max(entry.content.formats[parent is not None] for entry in entries.values())
    return Manifest(token, len(written), entries, metadata, checksums, number, parent)


def _publish(folder: Path, manifest: Manifest) -> None:
    reach("checkpoint.publish", folder)
    try:
        write_text(folder / MANIFEST, manifest.to_json())
        reach("checkpoint.published", folder)
    except OSError as error:
        if _is_published(folder, manifest.folder):
            raise _UnsyncedError(error) from error
        raise


def _is_published(folder: Path, token: str) -> bool:
    """Whether the manifest names the folder `token`: an error after that must not remove it."""
    try:
        return f'"{token}"' in (folder / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _remove_others(folder: Path, keep: str) -> None:
    """Removes former checkpoints and what interrupted writes left, as far as the system lets it."""
    reach("checkpoint.remove_former", folder)
    remove_files(folder, keep=keep)


def _together(action: Callable[[], T], folder: Path, peers: Peers) -> list[T]:
    """Every rank's result of `action`, on every rank; CheckpointError on all where it failed on one."""
    result: T | None = None
    failure: _Failure | None = None
    try:
        result = action()
    except Exception as error:  # of whatever kind: the other ranks wait
        error = as_refusal(error)
        text = f"rank {peers.name(peers.rank)} cannot write the checkpoint in {folder}: {_reason(error)}"
        failure = _Failure(text, may_pass(error), isinstance(error, _UnsyncedError))
    outcomes = peers.gather((_to_plain(result), failure), WRITING)
    if failures := [_Failure(*failure) for _, failure in outcomes if failure]:
        kind = CheckpointWriteError if all(failure.may_pass for failure in failures) else CheckpointError
        outcome = _UNSYNCED if any(failure.is_unsynced for failure in failures) else _STAYS
        raise kind("; ".join([*(failure.text for failure in failures), outcome]))
    return cast("list[T]", [_from_plain(each) for each, _ in outcomes])


class _UnsyncedError(OSError):
    """The manifest has its place, and whether it keeps it after a power cut is not known."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.errno, error.strerror, error.filename)


_STAYS = "the former checkpoint stays until a new one is whole"
_UNSYNCED = (
    "its manifest had its place by then, but a power cut may take that away; where it replaced another one, the new "
    "one is read, and the files of the former stay until the next is written"
)


class _Failure(NamedTuple):
    """Why a rank could not write, whether another time or place may do, and what is read then."""

    text: str
    may_pass: bool
    is_unsynced: bool


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        if error.strerror is None:  # NumPy raises such
            return f"only a part was written ({error}); is the disk full?"
        return f"{error.strerror}; {known}" if (known := advice(error)) else error.strerror
    return str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__} {error}"


def _to_plain(written: Any) -> Any:
    """The result of a step of writing, to be sent: nothing, or the parts of tables and the checksums of files."""
    if written is None:
        return None
    parts = {table: part.to_plain() for table, part in written.parts.items()}
    return parts, {name: sums.to_json() for name, sums in written.checksums.items()}


def _from_plain(values: Any) -> _Written | None:
    if values is None:
        return None
    parts, checksums = values
    return _Written(
        {table: WrittenTable.from_plain(part) for table, part in parts.items()},
        {name: Checksums.from_json(sums) for name, sums in checksums.items()},
    )

"""Writing a checkpoint: every rank its own rows, and nothing visible before all of it is on disk."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh._support.faults import reach
from rowmesh._support.files.advice import advice, as_refusal, may_pass
from rowmesh._support.files.atomic import sync_folder, write_text
from rowmesh._support.files.checksums import Checksums, Writable
from rowmesh.checkpoint.manifest import (
    DEMOTED_INCREMENT_FORMAT,
    DENSE,
    FORMAT,
    INCREMENT_FORMAT,
    KNOWN_FORMAT,
    KNOWN_INCREMENT_FORMAT,
    MANIFEST,
    ROWS,
    CoresEntry,
    Identity,
    KnownEntry,
    KnownPart,
    Manifest,
    Parent,
    Part,
    RowRange,
    TableEntry,
    as_numpy,
    dtype_name,
    file_name,
    row_dtype,
)
from rowmesh.checkpoint.new_files import NewFiles, Piece, write_whole
from rowmesh.checkpoint.owned import check_free, remove_files
from rowmesh.errors import CheckpointError, CheckpointWriteError
from rowmesh.mesh.peers import Peers
from rowmesh.tables.dynamic.demoted_records import IDS as DEMOTED_IDS
from rowmesh.tables.dynamic.demoted_records import PREFIX
from rowmesh.tables.dynamic.demoted_records import REMOVED as DEMOTED_REMOVED
from rowmesh.tables.dynamic.records import REMOVED, facts_of
from rowmesh.tables.dynamic.saved_shards import SavedShards

if TYPE_CHECKING:
    from rowmesh.tables import TableSpec

T = TypeVar("T")

WRITING = "writing a checkpoint"
"""What ranks do, for the message of a PeerError."""


class LocalRows(Piece, Protocol):
    """Some rows of a table in this rank's memory: their numbers, values and optimizer state."""

    @property
    def rows(self) -> range: ...
    def commit(self) -> None: ...


class Cores(Protocol):
    """The cores of a tensor-train table and their optimizer state, by name."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


class Records(Protocol):
    """What a dynamic table knows on this rank: see `rowmesh.tables.dynamic.records`."""

    @property
    def shards(self) -> range: ...
    @property
    def step(self) -> int: ...
    @property
    def is_first(self) -> bool: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def arrays(self) -> Iterator[tuple[str, npt.NDArray[np.int64]]]: ...
    @property
    def rows(self) -> Sequence[ChangedRows]: ...
    @property
    def demoted_rows(self) -> Sequence[ChangedRows]: ...
    def load(self, parts: Sequence[SavedShards], states: Sequence[str]) -> None: ...


class RowHolder(Protocol):
    """What can be checkpointed: an `EmbeddingCollection`."""

    @property
    def tables(self) -> Sequence[TableSpec]: ...
    def synchronize(self) -> None: ...
    def forget_differences(self) -> None: ...
    def local_rows(self, table: str) -> Sequence[LocalRows]: ...
    def held_rows(self, table: str) -> Sequence[LocalRows]: ...
    def cores(self, table: str) -> Cores: ...
    def records(self, table: str) -> Records | None: ...
    def go_on_after(self, table: str, step: int) -> None: ...


class ChangedRows(Piece, Protocol):
    """As `LocalRows`, for rows that have no order."""

    @property
    def rows(self) -> npt.NDArray[np.int64]: ...


class Increment(NamedTuple):
    """What is written of rows in place of all.

    Attributes:
        parent: the checkpoint that it adds to.
        rows: those of a table that this rank owns and that changed since; of a dynamic table `records` has what did.
    """

    parent: Parent
    rows: Callable[[str], Sequence[ChangedRows]]


def save(
    folder: Path,
    embeddings: RowHolder,
    dense: Mapping[str, Any] | memoryview,
    *,
    metadata: Mapping[str, Any] | None = None,
    peers: Peers | None = None,
    increment: Increment | None = None,
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
        increment: which rows to write; default: all, which makes a full checkpoint.
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
    target = folder / token
    try:
        _together(lambda: _prepare(folder, target) if rank == 0 else None, folder, peers)
        written = _together(
            lambda: _write_rows(NewFiles(target, beside_steps), embeddings, dense, rank, increment), folder, peers
        )
        parent = None if increment is None else increment.parent
        manifest = _manifest(token, embeddings.tables, written, dict(metadata or {}), parent)
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
    """What a rank wrote: its part of every table, and the checksums of its files by name."""

    parts: dict[str, Part | KnownPart]
    checksums: dict[str, Checksums]


def _prepare(folder: Path, target: Path) -> None:
    reach("checkpoint.prepare", folder)
    check_free(folder)
    target.mkdir(parents=True)
    sync_folder(folder)


def _write_rows(
    new: NewFiles,
    embeddings: RowHolder,
    dense: Mapping[str, Any] | memoryview,
    rank: int,
    increment: Increment | None,
) -> _Written:
    parts = {}
    for table in embeddings.tables:
        if table.storage == "dynamic":
            parts[table.name] = _write_records(new, table.name, embeddings.records(table.name), rank)
            continue
        if table.storage == "tensor_train":
            files = {}
            if rank == 0:
                files = _write_cores(new, table.name, embeddings.cores(table.name))
            parts[table.name] = Part(rank, (), files)
            continue
        files = {}
        if increment is not None:
            changed, ranges = increment.rows(table.name), ()
            pieces, num_changed = changed, sum(len(piece.rows) for piece in changed)
            if changed:
                files[ROWS] = file_name(table.name, rank, ROWS)
                write = partial(_write_numbers, pieces=changed, dtype=row_dtype(table.num_rows))
                new.write(files[ROWS], write, "checkpoint.write_rows")
        else:
            pieces = [piece for piece in embeddings.local_rows(table.name) if len(piece.rows)]
            ranges, num_changed = tuple(RowRange.of(piece.rows) for piece in pieces), 0
        if pieces:
            names = {kind: file_name(table.name, rank, kind) for kind in ("values", *pieces[0].state)}
            files |= names
            new.write_pieces(names, pieces)
        parts[table.name] = Part(rank, ranges, files, num_changed)
    if rank == 0:
        new.write(DENSE, partial(_write_dense, dense), "checkpoint.write_dense")
    reach("checkpoint.sync", new.folder)
    sync_folder(new.folder)
    return _Written(parts, new.checksums)


def _write_cores(new: NewFiles, table: str, cores: Cores) -> dict[str, str]:
    files = {}
    for name, tensor in cores.tensors.items():
        files[name] = file_name(table, 0, name)
        new.write(files[name], partial(write_whole, array=as_numpy(tensor.cpu())), "checkpoint.write_cores")
    return files


def _write_records(new: NewFiles, table: str, records: Records | None, rank: int) -> KnownPart:
    """What this rank has of a dynamic table: nothing, where that is another one's to write."""
    if records is None or not records.is_first:
        return KnownPart(rank, 0, 0, 0, 0, 0, {})
    files, sizes = {}, {}
    for kind, array in records.arrays:
        files[kind], sizes[kind] = file_name(table, rank, kind), len(array)
        new.write(files[kind], partial(write_whole, array=array), "checkpoint.write_rows")
    for prefix, pieces in (("", records.rows), (PREFIX, records.demoted_rows)):
        if pieces:
            names = {kind: file_name(table, rank, prefix + kind) for kind in ("values", *pieces[0].state)}
            files |= {prefix + kind: name for kind, name in names.items()}
            new.write_pieces(names, pieces)
    shards, num_removed, num_demoted = records.shards, sizes.get(REMOVED, 0), sizes.get(DEMOTED_IDS, 0)
    numbers = (shards.start, len(shards), sizes["ids"], sizes["candidate_ids"], records.step)
    num_demoted_removed = sizes.get(DEMOTED_REMOVED, 0)
    return KnownPart(rank, *numbers, files, num_removed, num_demoted, num_demoted_removed, records.seed)


def _write_dense(values: Mapping[str, Any] | memoryview, file: Any) -> None:
    if isinstance(values, memoryview):
        file.write(values)
    else:
        torch.save(dict(values), file)


def _write_numbers(file: Writable, pieces: Sequence[ChangedRows], dtype: torch.dtype) -> None:
    """Which rows there are in an increment."""
    numbers = torch.from_numpy(np.concatenate([piece.rows for piece in pieces]))
    write_whole(file, as_numpy(numbers.to(dtype)))


def _manifest(
    token: str,
    tables: Sequence[TableSpec],
    written: Sequence[_Written],
    metadata: dict[str, Any],
    parent: Parent | None,
) -> Manifest:
    entries, parts = {}, [each.parts for each in written]
    for table in tables:
        facts = (table.num_rows, table.dim, dtype_name(table.dtype), table.optimizer.name)
        of_table = [by_table[table.name] for by_table in parts]
        if table.storage == "tensor_train":
            shape, files = table.tensor_train_shape, parts[0][table.name].files
            cores = CoresEntry(shape.row_factors, shape.dim_factors, shape.ranks, files)
            entries[table.name] = TableEntry(*facts, (), cores)
            continue
        if table.storage == "dynamic":
            known = tuple(
                part for by_table in parts if isinstance(part := by_table[table.name], KnownPart) and part.files
            )
            entries[table.name] = TableEntry(*facts, (), known=KnownEntry(facts_of(table), known))
            continue
        own = tuple(part for part in of_table if isinstance(part, Part) and part.count)
        covered = sum(part.count for part in own)
        if covered != table.num_rows and parent is None:
            raise CheckpointError(f"table {table.name!r} has {table.num_rows} rows, but ranks hold {covered}")
        entries[table.name] = TableEntry(*facts, own)
    checksums = {name: each for of_rank in written for name, each in of_rank.checksums.items()}
    number = FORMAT if parent is None else INCREMENT_FORMAT
    if any(entry.known for entry in entries.values()):
        number = KNOWN_FORMAT if parent is None else KNOWN_INCREMENT_FORMAT
        if parent is not None and any(entry.known and entry.known.demotes for entry in entries.values()):
            number = DEMOTED_INCREMENT_FORMAT
    return Manifest(token, len(parts), entries, metadata, checksums, number, parent)


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
    """What a step of writing returns, to be sent: nothing, or the parts of tables and the checksums of their files."""
    if written is None:
        return None
    parts = {table: asdict(part) for table, part in written.parts.items()}
    return parts, {name: sums.to_json() for name, sums in written.checksums.items()}


def _from_plain(values: Any) -> _Written | None:
    if values is None:
        return None
    parts, checksums = values
    return _Written(
        {
            table: Part(**{**part, "ranges": tuple(RowRange(**rows) for rows in part["ranges"])})
            if "ranges" in part
            else KnownPart(**part)
            for table, part in parts.items()
        },
        {name: Checksums.from_json(sums) for name, sums in checksums.items()},
    )

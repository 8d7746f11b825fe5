"""Writing a checkpoint: every rank its own rows, and nothing visible before all of it is on disk."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.checkpoint.manifest import (
    DENSE,
    MANIFEST,
    CheckpointError,
    CoresEntry,
    Manifest,
    Part,
    RowRange,
    TableEntry,
    as_numpy,
    dtype_name,
    file_name,
)
from rowmesh.mesh.groups import gather_in_group

if TYPE_CHECKING:
    from rowmesh.tables import TableSpec

CHUNK_ROWS = 1 << 18  # bounds the temporaries of a copy

T = TypeVar("T")


class LocalRows(Protocol):
    """Some rows of a table in this rank's memory: their numbers, values and optimizer state."""

    @property
    def rows(self) -> range: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def state(self) -> Mapping[str, Tensor]: ...
    def commit(self) -> None: ...
    def forget(self) -> None: ...


class Cores(Protocol):
    """The cores of a tensor-train table and their optimizer state, by name."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


class RowHolder(Protocol):
    """What can be checkpointed: an `EmbeddingCollection`."""

    @property
    def tables(self) -> Sequence[TableSpec]: ...
    def synchronize(self) -> None: ...
    def forget_differences(self) -> None: ...
    def local_rows(self, table: str) -> Sequence[LocalRows]: ...
    def held_rows(self, table: str) -> Sequence[LocalRows]: ...
    def cores(self, table: str) -> Cores: ...


def save(
    folder: Path,
    embeddings: RowHolder,
    dense: Mapping[str, Any],
    *,
    metadata: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a checkpoint, replacing the one in `folder` only when all of it is on disk.

    Collective and blocking: every rank of `group` calls it, and all must see the same file system. No
    rows travel; every rank writes its own, and rank 0 writes `dense`.

    Args:
        folder: where; made if need be. An interrupted write leaves the former checkpoint as it was, and a
            folder beside it that the next write removes.
        embeddings: whose rows and optimizer state to write.
        dense: state dictionaries, for `torch.save`; rank 0's are written.
        metadata: JSON values for the manifest.
        group: the process group; None for a single process.

    Raises:
        CheckpointError: on every rank, where any rank could not write (disk full, say).
    """
    embeddings.synchronize()
    rank = 0 if group is None else dist.get_rank(group)
    token = _from_rank_0(secrets.token_hex(8), group)
    target = folder / token
    try:
        _together(lambda: _prepare(folder, target) if rank == 0 else None, folder, group)
        parts = _together(lambda: _write_rows(target, embeddings, dense, rank), folder, group)
        manifest = _manifest(token, embeddings.tables, parts, dict(metadata or {}))
        _together(lambda: _publish(folder, manifest) if rank == 0 else None, folder, group)
    except BaseException:
        if rank == 0:
            shutil.rmtree(target, ignore_errors=True)
            with contextlib.suppress(OSError):  # stays where it holds a former checkpoint
                folder.rmdir()
        raise
    if rank == 0:
        _remove_others(folder, keep=token)


def _prepare(folder: Path, target: Path) -> None:
    target.mkdir(parents=True)
    _synchronize(folder)


def _write_rows(target: Path, embeddings: RowHolder, dense: Mapping[str, Any], rank: int) -> dict[str, Part]:
    parts = {}
    for table in embeddings.tables:
        if table.storage == "tensor_train":
            files = _write_cores(target, table.name, embeddings.cores(table.name)) if rank == 0 else {}
            parts[table.name] = Part(rank, (), files)
            continue
        pieces = [piece for piece in embeddings.local_rows(table.name) if len(piece.rows)]
        files = {}
        for kind in ("values", *pieces[0].state) if pieces else ():
            files[kind] = file_name(table.name, rank, kind)
            _write_file(target / files[kind], partial(_write_pieces, pieces=pieces, kind=kind))
        parts[table.name] = Part(rank, tuple(RowRange.of(piece.rows) for piece in pieces), files)
    if rank == 0:
        _write_file(target / DENSE, partial(torch.save, dict(dense)))
    _synchronize(target)
    return parts


def _write_cores(target: Path, table: str, cores: Cores) -> dict[str, str]:
    files = {}
    for name, tensor in cores.tensors.items():
        files[name] = file_name(table, 0, name)
        _write_file(target / files[name], partial(_write_whole, array=as_numpy(tensor.cpu())))
    return files


def _write_whole(file: IO[bytes], array: npt.NDArray[Any]) -> None:
    _write_header(file, array, len(array))
    _write_array(file, array)


def _write_pieces(file: IO[bytes], pieces: Sequence[LocalRows], kind: str) -> None:
    """The values or a state of one piece after the other as one .npy file, without a copy of the whole."""
    for number, piece in enumerate(pieces):
        array = as_numpy(piece.values if kind == "values" else piece.state[kind])
        if number == 0:
            _write_header(file, array, sum(len(each.rows) for each in pieces))
        _write_array(file, array)
        piece.forget()


def _write_header(file: IO[bytes], array: npt.NDArray[Any], count: int) -> None:
    """Of a .npy file with as many rows, of the kind that an array has."""
    shape = (count, *array.shape[1:])
    header = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _write_array(file: IO[bytes], array: npt.NDArray[Any]) -> None:
    for begin in range(0, len(array), CHUNK_ROWS):
        file.write(np.ascontiguousarray(array[begin : begin + CHUNK_ROWS]).data)


def _manifest(
    token: str, tables: Sequence[TableSpec], parts: Sequence[dict[str, Part]], metadata: dict[str, Any]
) -> Manifest:
    entries = {}
    for table in tables:
        facts = (table.num_rows, table.dim, dtype_name(table.dtype), table.optimizer.name)
        if table.storage == "tensor_train":
            shape, files = table.tensor_train_shape, parts[0][table.name].files
            cores = CoresEntry(shape.row_factors, shape.dim_factors, shape.ranks, files)
            entries[table.name] = TableEntry(*facts, (), cores)
            continue
        own = tuple(by_table[table.name] for by_table in parts if by_table[table.name].count)
        covered = sum(part.count for part in own)
        if covered != table.num_rows:
            raise CheckpointError(f"table {table.name!r} has {table.num_rows} rows, but ranks hold {covered}")
        entries[table.name] = TableEntry(*facts, own)
    return Manifest(token, len(parts), entries, metadata)


def _publish(folder: Path, manifest: Manifest) -> None:
    draft = folder / f"{MANIFEST}.{manifest.folder}"
    try:
        _write_file(draft, lambda file: file.write(manifest.to_json().encode()))
        draft.replace(folder / MANIFEST)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _synchronize(folder)


def _remove_others(folder: Path, keep: str) -> None:
    """Removes former checkpoints and what interrupted writes left."""
    for path in folder.iterdir():
        if re.fullmatch("[0-9a-f]{16}", path.name) and path.name != keep:
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(f"{MANIFEST}."):
            path.unlink(missing_ok=True)


def _write_file(path: Path, write: Callable[[Any], Any]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _synchronize(folder: Path) -> None:
    """Names of new files reach the disk with their folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _together(action: Callable[[], T], folder: Path, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's result of `action`, on every rank; CheckpointError on all where it failed on one."""
    result: T | None = None
    failure: str | None = None
    try:
        result = action()
    except (OSError, RuntimeError) as error:
        partly = f"only a part was written ({error}); is the disk full?" if isinstance(error, OSError) else str(error)
        reason = getattr(error, "strerror", None) or partly  # NumPy raises OSError without a reason
        rank = 0 if group is None else dist.get_rank(group)
        failure = f"rank {rank} cannot write the checkpoint in {folder}: {reason}"
    if group is None:
        results, failures = [result], [failure]
    else:
        outcomes = gather_in_group(group, (_to_plain(result), failure), "writing a checkpoint")
        results, failures = [_from_plain(each) for each, _ in outcomes], [failure for _, failure in outcomes]
    failures = list(filter(None, failures))
    if failures:
        raise CheckpointError(
            "; ".join(failures) + "; what was there before is unchanged. Free space or choose another folder"
        )
    return cast("list[T]", results)


def _from_rank_0(value: T, group: dist.ProcessGroup | None) -> T:
    if group is None:
        return value
    return gather_in_group(group, value, "writing a checkpoint")[0]


def _to_plain(parts: Any) -> Any:
    """What a step of writing returns, to be sent: nothing, or the parts of tables."""
    return None if parts is None else {table: asdict(part) for table, part in parts.items()}


def _from_plain(values: Any) -> dict[str, Part] | None:
    if values is None:
        return None
    return {
        table: Part(part["rank"], tuple(RowRange(**rows) for rows in part["ranges"]), part["files"])
        for table, part in values.items()
    }

"""Reading a checkpoint: every rank maps the files and copies the rows that it holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rowmesh.checkpoint.files import UNVERIFIABLE, SavedArray, SavedFiles
from rowmesh.checkpoint.manifest import MANIFEST, CoresEntry, Manifest, Part, TableEntry, as_numpy, dtype_name
from rowmesh.checkpoint.write import CHUNK_ROWS, Cores, LocalRows, RowHolder
from rowmesh.errors import CheckpointError
from rowmesh.ops.ranges import intersect

if TYPE_CHECKING:
    from rowmesh.tables import TableSpec

logger = logging.getLogger("rowmesh")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"no model in {folder}: {MANIFEST} is missing (did training finish? is it the right folder?)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return Manifest.from_json(text, path)


def load(folder: Path, embeddings: RowHolder, *, optimizer_state: bool = True, verify: bool = True) -> dict[str, Any]:
    """Fills the rows of `embeddings` that live on this rank; returns what was saved as `dense`.

    Ranks read independently, whatever number of them wrote: look rows up only after all have, and have all done with
    look-ups of before (`EmbeddingCollection.barrier`, both times), since ranks may read each other's rows.

    Args:
        folder: the checkpoint.
        embeddings: tables of the same names, rows, dims and dtypes as were saved.
        optimizer_state: False reads only the rows, whatever their optimizer is.
        verify: compare what is read with the checksums in the manifest; False reads damaged files as they are.

    Raises:
        CheckpointError: a table or file is missing, is damaged, or has another shape, dtype or optimizer. Rows of
            `embeddings` may have been set by then.
    """
    manifest = read_manifest(folder)
    if verify and not manifest.checksums:
        logger.info("the model in %s %s", folder, UNVERIFIABLE)
    files = SavedFiles(folder, manifest, verify=verify)
    _check_names(manifest, embeddings, folder)
    embeddings.forget_differences()
    for table in embeddings.tables:
        entry = manifest.tables[table.name]
        _check_table(table, entry, optimizer_state)
        if entry.cores is not None:
            _fill_cores(table.name, embeddings.cores(table.name), entry.cores, files, optimizer_state)
        else:
            _fill(table.name, embeddings.held_rows(table.name), entry, files, optimizer_state)
    return files.dense()


def _fill(table: str, pieces: Sequence[LocalRows], entry: TableEntry, files: SavedFiles, optimizer_state: bool) -> None:
    missing = wanted = sum(len(piece.rows) for piece in pieces)
    sources: list[dict[str, SavedArray]] = [{} for _ in entry.parts]
    for piece in pieces:
        targets = {"values": piece.values, **(piece.state if optimizer_state else {})}
        for part, mapped in zip(entry.parts, sources, strict=True):
            for kind, target in targets.items():
                if kind not in mapped:
                    mapped[kind] = files.array(table, kind, part.files, target, (part.count, *target.shape[1:]))
            missing -= fill_piece(piece.rows, targets, part, mapped)
        piece.commit()
    if missing:
        raise CheckpointError(f"table {table!r}: {missing} of {wanted} rows are in no file of {files.folder}")


def _fill_cores(table: str, cores: Cores, entry: CoresEntry, files: SavedFiles, optimizer_state: bool) -> None:
    for name, target in cores.tensors.items():
        if optimizer_state or "." not in name:
            own = target.cpu()  # a copy where cores are on a device
            as_numpy(own)[:] = files.array(table, name, entry.files, own, tuple(own.shape))[:]
            target.copy_(own)


def fill_piece(
    numbers: range, targets: Mapping[str, torch.Tensor], part: Part, sources: Mapping[str, SavedArray]
) -> int:
    """Copies what a part of the checkpoint has of a piece; returns how many rows that is."""
    found, before = 0, 0
    for bounds in part.ranges:
        common = intersect(range(bounds.start, bounds.start + bounds.count * bounds.stride, bounds.stride), numbers)
        if common is not None:
            saved, wanted = common
            for kind, target in targets.items():
                for begin in range(0, len(saved), CHUNK_ROWS):
                    to, at = wanted[begin : begin + CHUNK_ROWS], saved[begin : begin + CHUNK_ROWS]
                    values = sources[kind][before + at.start : before + at.stop : at.step]
                    as_numpy(target)[to.start : to.stop : to.step] = values
            found += len(saved)
        before += bounds.count
    return found


def _check_names(manifest: Manifest, embeddings: RowHolder, folder: Path) -> None:
    saved, wanted = set(manifest.tables), {table.name for table in embeddings.tables}
    if saved != wanted:
        raise CheckpointError(
            f"the model in {folder} has other tables: it lacks {sorted(wanted - saved) or 'none'} and has "
            f"{sorted(saved - wanted) or 'none'} besides; use the configuration it was trained with"
        )


def _check_storage(table: TableSpec, entry: TableEntry) -> None:
    name = table.name
    if entry.cores is not None and table.storage != "tensor_train":
        raise CheckpointError(
            f"table {name!r} is tensor-train cores of ranks {entry.cores.ranks} in the checkpoint and {table.storage} "
            f'here; use the configuration it was trained with (tables.{name}.storage = "tensor_train"), or fill such a '
            "table with the rows that its cores give (EmbeddingCollection.cores(…).rows)"
        )
    if entry.cores is None and table.storage == "tensor_train":
        raise CheckpointError(
            f"table {name!r} is dense in the checkpoint and a tensor-train table here; use the configuration it was "
            f'trained with (tables.{name}.storage = "dense"), or make cores of its rows with '
            "rowmesh.tensor_train.tt_svd"
        )


def _check_table(table: TableSpec, entry: TableEntry, optimizer_state: bool) -> None:
    _check_storage(table, entry)
    pairs: dict[str, tuple[Any, Any]] = {
        "num_rows": (entry.num_rows, table.num_rows),
        "dim": (entry.dim, table.dim),
        "dtype": (entry.dtype, dtype_name(table.dtype)),
    }
    if entry.cores is not None:
        for name in ("row_factors", "dim_factors", "ranks"):
            pairs[name] = getattr(entry.cores, name), getattr(table.tensor_train_shape, name)
    if optimizer_state:
        pairs["optimizer"] = (entry.optimizer, table.optimizer.name)
    for name, (saved, wanted) in pairs.items():
        if saved != wanted:
            raise CheckpointError(
                f"table {table.name!r}: {name} is {saved} in the checkpoint and {wanted} here; "
                "use the configuration it was trained with"
            )

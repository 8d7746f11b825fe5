"""Reading a checkpoint: every rank maps the files and copies the rows that it holds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rowmesh.checkpoint.chain import read_chain
from rowmesh.checkpoint.entries import TableEntry
from rowmesh.checkpoint.files import SavedFiles
from rowmesh.checkpoint.manifest import Manifest
from rowmesh.checkpoint.saved_tables import reader_of
from rowmesh.errors import CheckpointError
from rowmesh.tables.shard import RowHolder, TableShard

logger = logging.getLogger("rowmesh")


def load(folder: Path, embeddings: RowHolder, *, optimizer_state: bool = True, verify: bool = True) -> dict[str, Any]:
    """Fills the rows of `embeddings` that live on this rank; returns what was saved as `dense`.

    Ranks read independently, whatever number of them wrote: look rows up only after all have, and have all done with
    look-ups of before (`EmbeddingCollection.barrier`, both times), since ranks may read each other's rows.

    Args:
        folder: the checkpoint; those that an increment adds to are beside it.
        embeddings: tables of the same names, rows, dims and dtypes as were saved; a dynamic one may hold more ids.
        optimizer_state: False reads only the rows, whatever their optimizer is.
        verify: compare what is read with the checksums in the manifest; False reads damaged files as they are.

    Raises:
        CheckpointError: a table, file or parent is missing, is damaged, or has another shape, dtype or optimizer. Rows
            of `embeddings` may have been set by then. Only a rank that wants rows of a missing file raises;
            `rowmesh.checkpoint.together.on_every_rank` makes all ranks fail as it did.
    """
    chain = read_chain(folder)
    manifest = chain[0].manifest
    files = [SavedFiles(*link, verify=verify) for link in chain]
    _check_names(manifest, embeddings, folder)
    embeddings.forget_differences()
    reseeded: dict[str, tuple[int, int]] = {}
    for shard in embeddings.shards("held"):
        name = shard.spec.name
        entries = [link.manifest.tables[name] for link in chain]
        _check_table(shard, entries[0], optimizer_state)
        reader_of(name, entries, files).load(shard, optimizer_state=optimizer_state)
        reseeded |= _reseeded(shard, entries[0])
    if reseeded:
        saved, here = next(iter(reseeded.values()))
        logger.warning(
            "the dynamic tables %s of %s were trained with seed %s and are here made with seed %s: ids that they do "
            "not know start from other rows than they would have there; make them with seed %s for the same ones",
            *(", ".join(reseeded), folder, saved, here, saved),
        )
    return files[0].dense()


def _reseeded(shard: TableShard, entry: TableEntry) -> dict[str, tuple[int, int]]:
    """The seed that was saved and the own one by table, where they differ; only one rank of all says so of a table."""
    logical = shard.logical
    if entry.known is None or logical is None or logical.seed == entry.known.seed:
        return {}
    return {shard.spec.name: (entry.known.seed, logical.seed)} if logical.replica == 0 and 0 in logical.shards else {}


def _check_names(manifest: Manifest, embeddings: RowHolder, folder: Path) -> None:
    saved, wanted = set(manifest.tables), {table.name for table in embeddings.tables}
    if saved != wanted:
        raise CheckpointError(
            f"the model in {folder} has other tables: it lacks {sorted(wanted - saved) or 'none'} and has "
            f"{sorted(saved - wanted) or 'none'} besides; use the configuration it was trained with"
        )


def _check_form(shard: TableShard, entry: TableEntry) -> None:
    """Raises CheckpointError where a table is stored in another form than it was saved in."""
    name, storage, form = shard.spec.name, shard.spec.storage, entry.content.form
    if form == shard.form:
        return
    if "ids" in (form, shard.form):
        saved = "dynamic" if form == "ids" else "stored by row"
        raise CheckpointError(
            f"table {name!r} is {saved} in the checkpoint and {storage} here; use the configuration it was trained with"
        )
    if entry.cores is not None:
        raise CheckpointError(
            f"table {name!r} is tensor-train cores of ranks {entry.cores.ranks} in the checkpoint and {storage} "
            f'here; use the configuration it was trained with (tables.{name}.storage = "tensor_train"), or fill such a '
            "table with the rows that its cores give (EmbeddingCollection.cores(…).rows)"
        )
    raise CheckpointError(
        f"table {name!r} is dense in the checkpoint and a tensor-train table here; use the configuration it was "
        f'trained with (tables.{name}.storage = "dense"), or make cores of its rows with '
        "rowmesh.tensor_train.tt_svd"
    )


def _check_table(shard: TableShard, entry: TableEntry, optimizer_state: bool) -> None:
    _check_form(shard, entry)
    for name, saved, here in entry.differences(shard.spec, optimizer_state=optimizer_state):
        raise CheckpointError(
            f"table {shard.spec.name!r}: {name} is {saved} in the checkpoint and {here} here; "
            f"{entry.content.advice(name)}"
        )

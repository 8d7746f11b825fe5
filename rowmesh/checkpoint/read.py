"""Reading a checkpoint: every rank maps the files and copies the rows that it holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rowmesh.checkpoint.chain import SavedTable, read_chain
from rowmesh.checkpoint.files import SavedFiles
from rowmesh.checkpoint.known import known_entry, saved_shards
from rowmesh.checkpoint.manifest import CoresEntry, Manifest, TableEntry, as_numpy, dtype_name
from rowmesh.errors import CheckpointError
from rowmesh.exchange.resolve.known import no_state
from rowmesh.tables.dynamic.records import facts_of
from rowmesh.tables.dynamic.table_shard import DynamicShard
from rowmesh.tables.shard import LocalRows, RowHolder, TableShard
from rowmesh.tables.spec import TableSpec

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
            of `embeddings` may have been set by then. Of files that are missing only a rank says so that wants rows of
            them; `rowmesh.checkpoint.together.on_every_rank` has all ranks fail as one did.
    """
    chain = read_chain(folder)
    manifest = chain[0].manifest
    files = [SavedFiles(*link, verify=verify) for link in chain]
    _check_names(manifest, embeddings, folder)
    embeddings.forget_differences()
    reseeded: dict[str, tuple[int, int]] = {}
    for shard in embeddings.shards("held"):
        name = shard.spec.name
        _check_table(shard, manifest.tables[name], optimizer_state)
        if isinstance(shard, DynamicShard):
            entries = [link.manifest.tables[name] for link in chain]
            _fill_ids(shard, entries, files, optimizer_state)
            reseeded |= _reseeded(shard, entries[0])
        elif (cores := manifest.tables[name].cores) is not None:
            _fill_cores(name, shard.tensors, cores, files[0], optimizer_state)
        else:
            saved = SavedTable(name, [link.manifest.tables[name] for link in chain], files)
            _fill(saved, shard.views, optimizer_state)
    if reseeded:
        saved, here = next(iter(reseeded.values()))
        logger.warning(
            "the dynamic tables %s of %s were trained with seed %s and are here made with seed %s: ids that they do "
            "not know start from other rows than they would have there; make them with seed %s for the same ones",
            *(", ".join(reseeded), folder, saved, here, saved),
        )
    return files[0].dense()


def _reseeded(shard: DynamicShard, entry: TableEntry) -> dict[str, tuple[int, int]]:
    """The seed that was saved and the own one by table, where they differ; only one rank of all says so of a table."""
    saved, own = known_entry(entry).seed, None if shard.logical is None else shard.logical.seed
    if own is None or saved == own:
        return {}
    return {shard.spec.name: (saved, own)} if shard.replica == 0 and 0 in shard.shards else {}


def _fill(table: SavedTable, pieces: Sequence[LocalRows], optimizer_state: bool) -> None:
    for piece in pieces:
        table.fill(piece.rows, {"values": piece.values, **(piece.state if optimizer_state else {})})
        piece.commit()


def _fill_cores(
    table: str, tensors: Mapping[str, Tensor], entry: CoresEntry, files: SavedFiles, optimizer_state: bool
) -> None:
    for name, target in tensors.items():
        if optimizer_state or "." not in name:
            own = target.cpu()  # a copy where cores are on a device
            as_numpy(own)[:] = files.array(table, name, entry.files, own, tuple(own.shape))[:]
            target.copy_(own)


def _fill_ids(
    shard: DynamicShard, entries: Sequence[TableEntry], files: Sequence[SavedFiles], optimizer_state: bool
) -> None:
    table, saved = shard.spec, []
    states = list(table.optimizer.state) if optimizer_state else []
    if shard.shards:
        forms = {"values": torch.empty(0, table.dim, dtype=table.dtype)}
        forms |= {name: form for name, form in no_state(table).items() if name in states}
        saved = saved_shards(table.name, entries, files, forms=forms, shards=shard.shards)
    shard.load(saved, states, max(part.step for part in known_entry(entries[0]).parts))


def _check_names(manifest: Manifest, embeddings: RowHolder, folder: Path) -> None:
    saved, wanted = set(manifest.tables), {table.name for table in embeddings.tables}
    if saved != wanted:
        raise CheckpointError(
            f"the model in {folder} has other tables: it lacks {sorted(wanted - saved) or 'none'} and has "
            f"{sorted(saved - wanted) or 'none'} besides; use the configuration it was trained with"
        )


def _check_form(shard: TableShard, entry: TableEntry) -> None:
    """Raises CheckpointError where a table is stored in another form than it was saved in."""
    name, storage, forms = shard.spec.name, shard.spec.storage, (entry.form, shard.form)
    if entry.form == shard.form:
        return
    if "ids" in forms:
        saved = "dynamic" if entry.form == "ids" else "stored by row"
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


def _check_room(table: TableSpec, capacity: int) -> None:
    """Raises CheckpointError where a dynamic table cannot hold what is saved; more room changes nothing of that."""
    if table.num_rows < capacity:
        raise CheckpointError(
            f"table {table.name!r}: its capacity is {capacity} in the checkpoint and {table.num_rows} here; a dynamic "
            f"table may grow and cannot shrink: give a capacity of {capacity} or more"
        )


def _rule_advice(name: str, saved: Any) -> str:
    """What to write so that a rule of a dynamic table is that of the checkpoint, which capacity need not be."""
    if name == "store_capacity" and not saved:
        return "a dynamic table grows in its capacity alone: leave store_capacity out"
    return (
        f"a dynamic table grows in its capacity alone: give Dynamic({name}={saved!r}), or "
        f"tables.dynamic.{name}={saved} in a configuration"
    )


def _check_table(shard: TableShard, entry: TableEntry, optimizer_state: bool) -> None:
    _check_form(shard, entry)
    table = shard.spec
    pairs: dict[str, tuple[Any, Any]] = {
        "num_rows": (entry.num_rows, table.num_rows),
        "dim": (entry.dim, table.dim),
        "dtype": (entry.dtype, dtype_name(table.dtype)),
    }
    if entry.known is not None:
        del pairs["num_rows"]  # which is the capacity
        facts, rules = facts_of(table), dict(entry.known.rules)
        rules.pop("capacity", None)
        facts.pop("capacity")
        _check_room(table, entry.num_rows)
        if "mode" not in rules:  # it has no demoted ids, which is as good as none
            facts = {name: value for name, value in facts.items() if name not in ("mode", "store_capacity")}
        elif "mode" not in facts:
            facts |= {"mode": "drop", "store_capacity": rules["store_capacity"]}
        pairs |= {name: (rules.get(name), facts.get(name)) for name in facts | rules}
    if entry.cores is not None:
        for name in ("row_factors", "dim_factors", "ranks"):
            pairs[name] = getattr(entry.cores, name), getattr(table.tensor_train_shape, name)
    if optimizer_state:
        pairs["optimizer"] = (entry.optimizer, table.optimizer.name)
    for name, (saved, wanted) in pairs.items():
        if saved != wanted:
            is_rule = entry.known is not None and entry.known.rules.get(name) is not None
            todo = _rule_advice(name, saved) if is_rule else "use the configuration it was trained with"
            raise CheckpointError(
                f"table {table.name!r}: {name} is {saved} in the checkpoint and {wanted} here; {todo}"
            )

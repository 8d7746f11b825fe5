"""Row state: the rows of a collection, and the states of their optimizers, as tensors by name, for state dictionaries.

A table "item" has "item.weight" `[num_rows, dim]`; row-wise AdaGrad has "item.sum" `[num_rows]`; a tensor-train table
has "item.core1" to "item.core3", and "item.core1.sum". On several ranks a tensor of rows is a DTensor, of which each
rank has an equal block, whatever the plan: so any number of ranks can load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from rowmesh.collection.state_form import state_form
from rowmesh.errors import CheckpointError
from rowmesh.mesh import Mesh
from rowmesh.mesh.reshard import Block, block, bytes_of_row, reshard
from rowmesh.mesh.waiting import gather_objects
from rowmesh.tables import TableSpec
from rowmesh.tables.shard import Field, LocalRows, RowHolder, TableShard, fields_of
from rowmesh.tables.spec import names_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Kind = Literal["rows", "optimizer"]
_SAVING, _LOADING = "gathering rows for a state dictionary", "loading rows of a state dictionary"


class Holder(RowHolder, Protocol):
    """A holder of rows: an `EmbeddingCollection`."""

    mesh: Mesh

    def barrier(self) -> None: ...


class Entry(NamedTuple):
    """A tensor of a state dictionary.

    Attributes:
        table: whose it is.
        field: what it has of the table.
    """

    table: TableSpec
    field: Field


class _Field:
    """The values or one state of some rows of this rank."""

    def __init__(self, piece: LocalRows, field: str) -> None:
        self.rows, self._piece, self._field = piece.rows, piece, field

    def read(self) -> Tensor:
        """`[n, …]`."""
        return self._piece.fields[self._field]

    def done(self, *, changed: bool) -> None:
        """Writes what was changed back where rows are kept elsewhere, and frees copies."""
        if changed:
            self._piece.commit()
        else:
            self._piece.forget()


def entries(holder: Holder, kind: Kind) -> dict[str, Entry]:
    """The tensors of one kind by name."""
    found = {}
    for table in holder.tables:
        for field in fields_of(table):
            if field.is_state == (kind == "optimizer"):
                name = "weight" if field.name == "values" else field.name
                found[f"{table.name}.{name}"] = Entry(table, field)
    return found


def no_numbers(holder: Holder) -> str:
    """Why a state dictionary cannot have dynamic tables."""
    return (
        f"the dynamic tables {names_of(holder.tables, 'dynamic')} cannot be in a state dictionary: their rows have ids "
        "and no numbers. rowmesh.save(folder, {'model': model, …}) writes them with all else, and rowmesh.load reads "
        "them on any number of ranks; known_rows() gives copies of those of this rank"
    )


def save_rows(holder: Holder, kind: Kind) -> dict[str, Tensor]:
    """All rows, or all their states, with memory of their own. On several ranks collective.

    Raises:
        CheckpointError: rows are spread over several ranks and may not be sharded; or rows are kept in tiers, or have
            ids and no numbers.
    """
    form, mesh = state_form(), holder.mesh
    if form == "elsewhere":
        return {}
    if names_of(holder.tables, "dynamic"):
        raise CheckpointError(no_numbers(holder))
    if tiered := names_of(holder.tables, "tiered"):
        raise CheckpointError(
            f"state_dict() would bring all rows of the tiered tables {tiered} into memory; rowmesh.save(folder, "
            "{'model': model, …}) writes them from where they are"
        )
    if form == "whole" and mesh.world_size > 1:
        raise CheckpointError(
            f"state_dict() is of one process, and the rows of these tables are spread over {mesh.world_size} ranks. "
            "rowmesh.save(folder, {'model': model, …}) writes them, every rank its own, and rowmesh.load reads them on "
            "any number of ranks; for torch.distributed.checkpoint wrap what you save in rowmesh.ShardedState"
        )
    holder.synchronize()
    shards = {shard.spec.name: shard for shard in holder.shards("owned")}
    return {name: _saved(holder.mesh, shards[e.table.name], e) for name, e in entries(holder, kind).items()}


def _saved(mesh: Mesh, shard: TableShard, entry: Entry) -> Tensor:
    table, field = entry
    if not field.is_by_row:
        return _core_of(shard, field.name).read().detach().cpu().clone()
    mine = block(table.num_rows, mesh.rank, mesh.world_size)
    values = torch.empty((len(mine), *field.shape[1:]), dtype=field.dtype, device="cpu")
    have = [_Field(piece, field.name) for piece in shard.views]
    reshard(mesh, have, [Block(mine, values)], table.num_rows, bytes_of_row(values), _SAVING)
    if mesh.group is None:
        return values
    # Imported here, where it is needed: it takes as long as the rest of rowmesh.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size(field.shape)
    places = DeviceMesh.from_group(mesh.group, "cpu")
    stride = (table.dim, 1) if len(shape) > 1 else (1,)
    return DTensor.from_local(values, places, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _core_of(shard: TableShard, field: str) -> _Field:
    return next(_Field(view, field) for view in shard.views if field in view.fields)


def load_rows(holder: Holder, kind: Kind, tensors: Mapping[str, Tensor]) -> list[str]:
    """Sets rows, or their states, from those of `save_rows`, or from whole tensors, which every rank has.

    Collective where there are several ranks. A tensor may be of any device.

    Returns:
        Descriptions of tensors that do not fit, on any rank; nothing is set then.
    """
    mesh, known = holder.mesh, entries(holder, kind)
    mine = [text for name, tensor in tensors.items() if (text := _misfit(name, tensor, known[name], mesh))]
    everyone = gather_objects(mesh, [mine, sorted(tensors)], _LOADING)
    problems = list(dict.fromkeys(text for texts, _ in everyone for text in texts))
    if not problems and any(names != everyone[0][1] for _, names in everyone):
        problems = [f"ranks load different tables: {[names for _, names in everyone]}; give all ranks the same"]
    if problems or not tensors:
        return problems
    holder.forget_differences()
    holder.barrier()  # ranks may read each other's rows
    shards = {shard.spec.name: shard for shard in holder.shards("held")}
    for name in sorted(tensors):
        _load(mesh, shards[known[name].table.name], known[name], tensors[name].detach())
    holder.barrier()
    return []


def _misfit(name: str, tensor: object, entry: Entry, mesh: Mesh) -> str:
    """Why a tensor cannot be loaded; "" where it can."""
    field = entry.field
    if not isinstance(tensor, Tensor):
        return f"{name} must be a tensor, got {type(tensor).__name__}"
    if tuple(tensor.shape) != field.shape or tensor.dtype != field.dtype:
        return (
            f"size mismatch for {name}: copying {tensor.dtype} {tuple(tensor.shape)} from the state dictionary, "
            f"expected {field.dtype} {field.shape}"
        )
    if _is_sharded(tensor) and (not field.is_by_row or not _is_ours(tensor, mesh)):
        return (
            f"{name} is a DTensor placed {tensor.placements} on {tensor.device_mesh.size()} ranks; give it whole, "
            f"as tensor.full_tensor(), or in blocks of rows over the {mesh.world_size} ranks of this mesh"
        )
    return ""


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor."""
    return hasattr(tensor, "device_mesh")


def _is_ours(tensor: DTensor, mesh: Mesh) -> bool:
    """Whether each rank has its block of rows."""
    return [place.is_shard(0) for place in tensor.placements] == [True] and tensor.device_mesh.size() == mesh.world_size


def _load(mesh: Mesh, shard: TableShard, entry: Entry, tensor: Tensor) -> None:
    table, field = entry
    if not field.is_by_row:
        core = _core_of(shard, field.name)
        core.read().copy_(tensor)
        core.done(changed=True)
        return
    want = [_Field(piece, field.name) for piece in shard.views]
    if _is_sharded(tensor):
        local = tensor.to_local().cpu()
        have = [Block(block(table.num_rows, mesh.rank, mesh.world_size), local)]
        reshard(mesh, have, want, table.num_rows, bytes_of_row(local), _LOADING)
        return
    for part in want:
        rows = part.rows
        part.read().copy_(tensor[rows.start : rows.stop : rows.step])
        part.done(changed=True)

"""Row state: the rows of a collection, and the states of their optimizers, as tensors by name, for state dictionaries.

A table "item" has "item.weight" `[num_rows, dim]`; row-wise AdaGrad has "item.sum" `[num_rows]`; a tensor-train table
has "item.core1" to "item.core3", and "item.core1.sum". On several ranks a tensor of rows is a DTensor, of which each
rank has an equal block, whatever the plan: so any number of ranks can load it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from rowmesh.collection.outputs import LocalRows
from rowmesh.collection.state_form import state_form
from rowmesh.errors import CheckpointError
from rowmesh.mesh import Mesh
from rowmesh.mesh.reshard import Block, block, bytes_of_row, reshard
from rowmesh.mesh.waiting import gather_objects
from rowmesh.tables import TableSpec
from rowmesh.tables.cores import Cores
from rowmesh.tables.dense import compute_dtype
from rowmesh.tables.spec import names_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Kind = Literal["rows", "optimizer"]
_SAVING, _LOADING = "gathering rows for a state dictionary", "loading rows of a state dictionary"


class Holder(Protocol):
    """What has rows: an `EmbeddingCollection`."""

    mesh: Mesh

    @property
    def tables(self) -> Sequence[TableSpec]: ...
    def synchronize(self) -> None: ...
    def forget_differences(self) -> None: ...
    def barrier(self) -> None: ...
    def local_rows(self, table: str) -> list[LocalRows]: ...
    def held_rows(self, table: str) -> list[LocalRows]: ...
    def cores(self, table: str) -> Cores: ...


class Entry(NamedTuple):
    """One tensor of a state dictionary.

    Attributes:
        table: whose it is.
        field: "values", the name of an optimizer state, or that of a core or its state.
        shape: of the whole tensor.
        dtype: of its numbers.
    """

    table: TableSpec
    field: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Field:
    """The values or one state of some rows of this rank."""

    def __init__(self, piece: LocalRows, field: str) -> None:
        self.rows, self._piece, self._field = piece.rows, piece, field

    def read(self) -> Tensor:
        """`[n, …]`."""
        return self._piece.values if self._field == "values" else self._piece.state[self._field]

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
        if table.storage == "tensor_train":
            for name, tensor in holder.cores(table.name).tensors.items():
                if ("." in name) == (kind == "optimizer"):
                    found[f"{table.name}.{name}"] = Entry(table, name, tuple(tensor.shape), tensor.dtype)
        elif kind == "rows":
            found[f"{table.name}.weight"] = Entry(table, "values", (table.num_rows, table.dim), table.dtype)
        else:
            for name, extent in table.optimizer.state.items():
                shape = (table.num_rows,) if extent == "row" else (table.num_rows, table.dim)
                found[f"{table.name}.{name}"] = Entry(table, name, shape, compute_dtype(table.dtype))
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
    return {name: _saved(holder, entry) for name, entry in entries(holder, kind).items()}


def _saved(holder: Holder, entry: Entry) -> Tensor:
    table, mesh = entry.table, holder.mesh
    if table.storage == "tensor_train":
        return holder.cores(table.name).tensors[entry.field].detach().cpu().clone()
    mine = block(table.num_rows, mesh.rank, mesh.world_size)
    values = torch.empty((len(mine), *entry.shape[1:]), dtype=entry.dtype, device="cpu")
    have = [_Field(piece, entry.field) for piece in holder.local_rows(table.name)]
    reshard(mesh, have, [Block(mine, values)], table.num_rows, bytes_of_row(values), _SAVING)
    if mesh.group is None:
        return values
    # Imported here, where it is needed: it takes as long as the rest of rowmesh.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size(entry.shape)
    places = DeviceMesh.from_group(mesh.group, "cpu")
    stride = (table.dim, 1) if len(shape) > 1 else (1,)
    return DTensor.from_local(values, places, [Shard(0)], run_check=False, shape=shape, stride=stride)


def load_rows(holder: Holder, kind: Kind, tensors: Mapping[str, Tensor]) -> list[str]:
    """Sets rows, or their states, from those of `save_rows`, or from whole tensors, which every rank has.

    Collective where there are several ranks. A tensor may be of any device.

    Returns:
        What does not fit, on any rank; nothing is set then.
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
    for name in sorted(tensors):
        _load(holder, known[name], tensors[name].detach())
    holder.barrier()
    return []


def _misfit(name: str, tensor: object, entry: Entry, mesh: Mesh) -> str:
    """Why a tensor cannot be loaded; "" where it can."""
    if not isinstance(tensor, Tensor):
        return f"{name} must be a tensor, got {type(tensor).__name__}"
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
        return (
            f"size mismatch for {name}: copying {tensor.dtype} {tuple(tensor.shape)} from the state dictionary, "
            f"expected {entry.dtype} {entry.shape}"
        )
    if _is_sharded(tensor) and (entry.table.storage == "tensor_train" or not _is_ours(tensor, mesh)):
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


def _load(holder: Holder, entry: Entry, tensor: Tensor) -> None:
    table, mesh = entry.table, holder.mesh
    if table.storage == "tensor_train":
        holder.cores(table.name).tensors[entry.field].copy_(tensor)
        return
    want = [_Field(piece, entry.field) for piece in holder.held_rows(table.name)]
    if _is_sharded(tensor):
        local = tensor.to_local().cpu()
        have = [Block(block(table.num_rows, mesh.rank, mesh.world_size), local)]
        reshard(mesh, have, want, table.num_rows, bytes_of_row(local), _LOADING)
        return
    for part in want:
        rows = part.rows
        part.read().copy_(tensor[rows.start : rows.stop : rows.step])
        part.done(changed=True)

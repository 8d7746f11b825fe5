"""Operations of torch on modules, done to tables, or refused: state dictionaries, casts and moves, copies, freezing.

Rows are neither parameters nor buffers, so `nn.Module` would pass over them in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from rowmesh.collection.row_state import Holder, Kind, entries, load_rows, no_numbers, save_rows
from rowmesh.collection.state_form import state_form
from rowmesh.errors import CheckpointError, ConfigurationError, RowmeshError
from rowmesh.sparse import SparseBatch
from rowmesh.sparse.convert import KeyedJagged
from rowmesh.tables.spec import names_of

if TYPE_CHECKING:
    from rowmesh.collection.engine import Engine

F = TypeVar("F", bound=Callable[..., Any])


def frozen_or_not(method: F) -> F:
    """A method that looks rows up, without gradients where its tables are frozen."""

    @functools.wraps(method)
    def call(self: TableModule, *args: Any, **kwargs: Any) -> Any:
        if self.is_frozen:
            _refuse_trained_weights(args[0] if args else kwargs.get("batch"))
            with torch.no_grad():
                return method(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


def _refuse_trained_weights(batch: object) -> None:
    """Frozen tables are looked up without a graph, in which weights would get no gradient, in silence."""
    if isinstance(batch, KeyedJagged):
        weights = batch.weights_or_none()
    else:
        weights = batch.weights if isinstance(batch, SparseBatch) else None
    if weights is not None and weights.requires_grad and torch.is_grad_enabled():
        raise RowmeshError(
            'weights of ids get no gradient through tables that are frozen; look them up with pooling="none" and '
            "multiply the rows by the weights, or detach() the weights, or call requires_grad_(True)"
        )


def all_frozen(engine: Engine) -> bool:
    """Whether no table trains."""
    return all(exchange.is_frozen for exchange in engine.exchanges)


class TableModule(nn.Module):
    """Base of `EmbeddingCollection`: the methods of `nn.Module` that must know of rows."""

    device: torch.device
    engine: Engine
    is_frozen = False  # all tables

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freezes all tables, or lets them train again: frozen ones are looked up as under `torch.no_grad()`.

        Frozen tables send no gradients, and a step changes nothing of them. Collective. `freeze` is for some tables.
        `requires_grad_` of a module around this one does not come here: torch calls it for parameters alone.

        Example:
            >>> from rowmesh import EmbeddingCollection, SparseBatch, TableSpec
            >>> embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4)]).requires_grad_(False)
            >>> embeddings(SparseBatch.from_bags({"item": [[7]]})).values.requires_grad
            False
        """
        (self.unfreeze if requires_grad else self.freeze)(*(table.name for table in cast("Holder", self).tables))
        return super().requires_grad_(requires_grad)

    @property
    def frozen(self) -> tuple[str, ...]:
        """The names of the tables that are looked up and not trained."""
        exchanges = self.engine.exchanges
        return tuple(table.name for each in exchanges if each.is_frozen for table in each.group.tables)

    def freeze(self, *tables: str) -> None:
        """Lets tables be looked up and not trained: no gradients of them are sent, and a step changes nothing of them.

        They keep their optimizer state, are saved as usual, and train again from where they were after `unfreeze`.
        Collective: every rank names the same tables, between two steps. Fused tables freeze together: name all of
        them, or give those that are to freeze apart `TableSpec(frozen=True)`, and `unfreeze` them at first. On a
        device, and in a pipeline there, gradients of frozen tables are sent, and dropped by their owners.

        Raises:
            ConfigurationError: there is no such table; a table that is fused with it is not named; or ranks name
                different ones.
            RowmeshError: a batch had its backward and no step; or a pipeline runs.

        Example:
            >>> from rowmesh import EmbeddingCollection, TableSpec
            >>> tables = [TableSpec(name=name, num_rows=10, dim=4, frozen=name == "item") for name in ("user", "item")]
            >>> embeddings = EmbeddingCollection(tables)
            >>> embeddings.frozen
            ('item',)
            >>> embeddings.unfreeze("item")
            >>> embeddings.freeze("user")
            >>> embeddings.frozen
            ('user',)
        """
        self._freeze(tables, is_frozen=True)

    def unfreeze(self, *tables: str) -> None:
        """Lets frozen tables train again; as for `freeze`."""
        self._freeze(tables, is_frozen=False)

    def _freeze(self, tables: Sequence[str], *, is_frozen: bool) -> None:
        self.engine.freeze(tables, is_frozen=is_frozen)
        self.is_frozen = all_frozen(self.engine)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients of rows that no step has used, as `EmbeddingOptimizer.zero_grad` does.

        `zero_grad` of a module around this one does not come here: torch calls it for parameters alone.
        """
        self.engine.discard_pending()
        super().zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        """As of any module; says of a table why it is no attribute.

        Raises:
            AttributeError: there is none.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if all(table.name != name for table in self.__dict__.get("tables", ())):
                raise
        raise AttributeError(
            f"{name!r} is a table of this EmbeddingCollection, whose rows are no parameters of a module: rowmesh.save "
            f"writes them, held_rows({name!r}) and known_rows({name!r}) of a dynamic table give those of this rank. "
            "torch.distributed.checkpoint saves what rowmesh.ShardedState wraps; its get_model_state_dict and "
            "get_state_dict look for parameters alone"
        )

    def __prepare_scriptable__(self) -> Any:
        """As torch.jit.script asks for it: refused."""
        raise RowmeshError(
            "torch.jit.script cannot compile a look-up, whose rows are in no graph: script the dense part of the model "
            "by itself, given vectors as its inputs; `rowmesh export` and rowmesh.publish write the tables"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As `to`, `half`, `cuda` and others call it.

        Raises:
            ConfigurationError: it would cast, move, share or empty tables.
        """
        for table in cast("Holder", self).tables:
            before = torch.empty(0, dtype=table.dtype, device=self.device)
            after = fn(before)
            if after.dtype != before.dtype:
                raise ConfigurationError(
                    f"table {table.name!r} has rows of {before.dtype}, which cannot become {after.dtype}: give "
                    "TableSpec(…, dtype=…) when it is made, and cast the other modules by themselves"
                )
            if after.device != before.device:
                raise ConfigurationError(
                    f"tables stay on the device that they were made on, {before.device}, and cannot move to "
                    f"{after.device}: give EmbeddingCollection(…, device=…), and move the other modules by themselves"
                )
            if after.is_shared() and not before.is_cuda:
                raise ConfigurationError(
                    f"share_memory() does not share the rows of table {table.name!r}, which are no parameters: have "
                    'every process connect a Mesh, and EmbeddingCollection(…, transport="one_sided") share them; '
                    "call share_memory() of the other modules by themselves"
                )
            if after is not before:
                raise ConfigurationError(
                    f"to_empty(), or what else gives modules new memory, would leave the rows of table {table.name!r} "
                    "as they are, which are no parameters; call it of the other modules by themselves"
                )
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Refused."""
        raise self._no_copy()

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refused."""
        raise self._no_copy()

    def _no_copy(self) -> RowmeshError:
        """Says what works with these tables in the place of a copy."""
        holder = cast("Holder", self)
        has_state = holder.mesh.world_size == 1 and not names_of(holder.tables, "tiered", "dynamic")
        ways = "load_state_dict(embeddings.state_dict()), or by " * has_state + "rowmesh.save and rowmesh.load"
        return RowmeshError(
            "an EmbeddingCollection cannot be copied or pickled: its rows may be spread over ranks. Make another with "
            f"the same tables, and give it the rows by {ways}; for a moving average of rows take rowmesh.AveragedRows "
            "in the place of AveragedModel"
        )

    def save_state(self, kind: Kind) -> dict[str, Tensor]:
        """The rows of all tables by name, or the optimizer states of all rows; see `rowmesh.collection.row_state`.

        Raises:
            CheckpointError: they are spread over several ranks, or in tiers.
        """
        return save_rows(cast("Holder", self), kind)

    def load_state(self, kind: Kind, tensors: Mapping[str, Tensor]) -> None:
        """Sets what `save_state` returned.

        Raises:
            CheckpointError: it is of other tables, or of another optimizer.
        """
        holder = cast("Holder", self)
        if names_of(holder.tables, "dynamic"):
            raise CheckpointError(no_numbers(holder))
        wanted = set(entries(holder, kind))
        if wanted != set(tensors):
            raise CheckpointError(
                f"the state dictionary lacks {sorted(wanted - set(tensors)) or 'nothing'} and has "
                f"{sorted(set(tensors) - wanted) or 'nothing'} besides; use the tables and optimizers it was saved with"
            )
        if problems := load_rows(holder, kind, tensors):
            raise CheckpointError("; ".join(problems))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """As torch calls it: parameters, buffers and extra state of a subclass, and the rows."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if state_form() != "elsewhere":
            self._check_names()
        destination.update({f"{prefix}{name}": rows for name, rows in self.save_state("rows").items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As torch calls it: sets the rows that are there, and notes what is missing, unknown or of another shape.

        Parameters, buffers and extra state of a subclass are set as those of any module.
        """
        own = (prefix, local_metadata, strict, missing_keys)
        if state_form() == "elsewhere":
            super()._load_from_state_dict(state_dict, *own, unexpected_keys, error_msgs)
            return
        holder, unexpected = cast("Holder", self), list[str]()
        self._check_names()
        wanted = entries(holder, "rows")
        super()._load_from_state_dict(state_dict, *own, unexpected, error_msgs)
        unexpected_keys += [key for key in unexpected if key.removeprefix(prefix) not in wanted]
        given = {name: state_dict[key] for name in wanted if (key := f"{prefix}{name}") in state_dict}
        missing_keys += [f"{prefix}{name}" for name in wanted if name not in given]
        numbered = {name: rows for name, rows in given.items() if wanted[name].table.storage != "dynamic"}
        if len(numbered) < len(given):
            error_msgs.append(no_numbers(holder))
        error_msgs += load_rows(holder, "rows", numbered)

    def _check_names(self) -> None:
        """Raises ConfigurationError where a table and a child of a subclass would have the same names in a state."""
        tables = {table.name for table in cast("Holder", self).tables}
        if both := sorted(tables.intersection(name for name, child in self._modules.items() if child is not None)):
            raise ConfigurationError(
                f"{both} are tables and children of {type(self).__name__}, and a state dictionary would have one name "
                "for both; rename the children"
            )

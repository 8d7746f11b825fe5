"""Parts: what a program saves, by name: modules, optimizers and whatever has a state dictionary, and plain values."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rowmesh.collection.joint_optimizer import JointOptimizer
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.collection.saved_groups import schedule_in_order
from rowmesh.collection.state_form import Form, in_form
from rowmesh.errors import CheckpointError, ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.tables import TableSpec
from rowmesh.tables.shard import TableShard, Which

_CONTAINERS = (dict, OrderedDict, Counter, list, tuple, set)
_PLAIN = (bool, int, float, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


class Parts:
    """The parts that are saved or loaded, by name.

    Args:
        given: name → what has `state_dict` and `load_state_dict`, or a plain value.

    Attributes:
        tables: those of all modules.

    Raises:
        ConfigurationError: no module has tables, two have tables of the same name or are on different meshes, or an
            optimizer updates tables that no module has.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = {name: _unwrapped(part) for name, part in given.items()}
        modules = [part for part in self._given.values() if isinstance(part, nn.Module)]
        found = [each for module in modules for each in module.modules() if isinstance(each, EmbeddingCollection)]
        self.tables = Tables(list(dict.fromkeys(found)))
        for name, optimizer in self._embedding_optimizers():
            if optimizer.collection not in self.tables.collections:
                raise ConfigurationError(
                    f"{name!r} updates tables that no module here has, so their rows would be left out; give the "
                    "EmbeddingCollection too, or the model that it is in"
                )

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer of rows is among them."""
        return any(True for _ in self._embedding_optimizers())

    @property
    def names(self) -> list[str]:
        """The names of all parts, but for parts that are tables alone."""
        return [name for name, part in self._given.items() if not _has_tables_alone(part)]

    @property
    def stateful(self) -> list[str]:
        """The names of the parts that have a state dictionary."""
        return [name for name, part in self._given.items() if has_state(part)]

    def state(self, form: Form) -> dict[str, Any]:
        """The state dictionaries and the plain values, by name."""
        with in_form(form):
            return {name: _state_of(self._given[name]) for name in self._named(form)}

    def load(self, state: Mapping[str, Any], form: Form) -> None:
        """Gives state dictionaries to what they are of; plain values stay in `state`.

        Raises:
            CheckpointError: one does not fit; names it.
        """
        with in_form(form):
            for name in self._named(form):
                part = self._given[name]
                if not has_state(part):
                    continue
                try:
                    part.load_state_dict(self._in_order(part, state[name], state))
                except (RuntimeError, ValueError, KeyError, TypeError) as error:
                    raise CheckpointError(f"{name!r} does not fit what was saved: {error}") from error

    def _in_order(self, part: Any, of_part: Any, state: Mapping[str, Any]) -> Any:
        """The state of a part: that of a schedule by the groups of its optimizer here, whose tables may have moved."""
        if isinstance(part, torch.optim.lr_scheduler.LRScheduler):
            for optimizer, saved in self._states_of_rows(state):
                if optimizer is part.optimizer:
                    groups = [group for each in saved.get("optimizers", [saved]) for group in each["param_groups"]]
                    return schedule_in_order(of_part, optimizer.order_of(saved), len(groups))
        return of_part

    def _states_of_rows(self, state: Mapping[str, Any]) -> Iterator[tuple[EmbeddingOptimizer | JointOptimizer, Any]]:
        """Optimizers that update rows, and what was saved of them."""
        for name, part in self._given.items():
            if name in state and isinstance(part, EmbeddingOptimizer | JointOptimizer):
                yield part, state[name]
            if name in state and isinstance(part, JointOptimizer):
                for optimizer, saved in zip(part.optimizers, state[name]["optimizers"], strict=True):
                    if isinstance(optimizer, EmbeddingOptimizer):
                        yield optimizer, saved

    def _named(self, form: Form) -> list[str]:
        return self.names if form == "elsewhere" else list(self._given)

    def prepare(self) -> None:
        """Has dense optimizers that never stepped make their states, which a sharded load fills in place."""
        from torch.distributed.checkpoint.state_dict import _init_optim_state  # takes a second to import

        for _, optimizer in self._optimizers():
            if not isinstance(optimizer, EmbeddingOptimizer):
                _init_optim_state(optimizer)

    def _embedding_optimizers(self) -> Iterator[tuple[str, EmbeddingOptimizer]]:
        for name, optimizer in self._optimizers():
            if isinstance(optimizer, EmbeddingOptimizer):
                yield name, optimizer

    def _optimizers(self) -> Iterator[tuple[str, torch.optim.Optimizer]]:
        for name, part in self._given.items():
            for optimizer in part.optimizers if isinstance(part, JointOptimizer) else [part]:
                if isinstance(optimizer, torch.optim.Optimizer):
                    yield name, optimizer


class Tables:
    """The tables of several collections as of one, for a checkpoint.

    Args:
        collections: on the same mesh, their tables of different names.
    """

    def __init__(self, collections: Sequence[EmbeddingCollection]) -> None:
        if not collections:
            raise ConfigurationError(
                "no EmbeddingCollection is in what is saved or loaded; give it, or the model that it is in"
            )
        self.collections = collections
        self.mesh: Mesh = collections[0].mesh
        self.tables: list[TableSpec] = [table for each in collections for table in each.tables]
        names = set[str]()
        for each in collections:
            if each.mesh.run.group is not self.mesh.run.group:
                raise ConfigurationError("two EmbeddingCollections are on different meshes; save each by itself")
            for table in each.tables:
                if table.name in names:
                    raise ConfigurationError(
                        f"two EmbeddingCollections have a table {table.name!r}, and a checkpoint finds tables by name; "
                        "rename one"
                    )
                names.add(table.name)

    def synchronize(self) -> None:
        """Makes all replicas equal. Collective."""
        for each in self.collections:
            each.synchronize()

    def forget_differences(self) -> None:
        """Takes the rows of this rank as equal to those of other replicas."""
        for each in self.collections:
            each.forget_differences()

    def barrier(self) -> None:
        """Waits until all ranks have come here."""
        for each in self.collections:
            each.barrier()

    def shards(self, which: Which) -> list[TableShard]:
        """The shards of all tables on this rank."""
        return [shard for each in self.collections for shard in each.shards(which)]

    @property
    def row_epoch(self) -> tuple[int, int]:
        """Changes where rows changed otherwise than by updates."""
        epochs = [each.row_epoch for each in self.collections]
        return sum(migrations for migrations, _ in epochs), sum(sets for _, sets in epochs)


def has_state(part: Any) -> bool:
    """Whether it has a state dictionary of its own."""
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def check_plain(value: Any, where: str) -> None:
    """Raises CheckpointError, with the place, where a value could be written and not be read: an object of a class.

    Subclasses of numbers and dictionaries are such too: NumPy's float64, named tuples, defaultdict.
    """
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return
    if type(value) not in _CONTAINERS:
        advice = "; float(…) or .item() makes a plain number of it" if isinstance(value, np.generic) else ""
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which is no plain value and has no state_dict(){advice}; save "
            "numbers, text, tensors, lists and dictionaries of them"
        )
    if isinstance(value, Mapping):
        for key, each in value.items():
            check_plain(key, f"a key of {where}")
            check_plain(each, f"{where}[{key!r}]")
    else:
        for number, each in enumerate(value):
            check_plain(each, f"{where}[{number}]")


def _has_tables_alone(part: Any) -> bool:
    """Whether it is a collection that has no state beside its rows, as a subclass may have."""
    if not isinstance(part, EmbeddingCollection):
        return False
    with in_form("elsewhere"):
        return not part.state_dict()


def _state_of(part: Any) -> Any:
    return part.state_dict() if has_state(part) else part


def _unwrapped(part: Any) -> Any:
    """A module without what DistributedDataParallel or torch.compile wraps it in, which not every layout has."""
    while isinstance(part, nn.Module):
        if isinstance(part, nn.parallel.DistributedDataParallel):
            part = part.module
        elif "_orig_mod" in part._modules:
            part = part._modules["_orig_mod"]
        else:
            break
    return part

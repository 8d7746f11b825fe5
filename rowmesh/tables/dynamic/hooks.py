"""Hooks at the owner: what was decided of the ids of a dynamic table, step by step, for whoever keeps more beside it.

Requests carry ids and not hashes of them. So an owner knows of each row the table and the id (FusedRec's category and
instance), and can tell: for reports, for records that live beside the rows elsewhere, for rules of one's own.

Source: FusedRec §2 (category-aware lossless look-up), §3.2 step (b.1). Differs: a category is a table, as features that
share one have the same rows; and hooks see all of a step, not one request.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch.utils.hooks import RemovableHandle

from rowmesh.errors import RowmeshError
from rowmesh.tables.dynamic.state import OpenedIds


@dataclass(frozen=True)
class Decisions:
    """The owner's decisions about the ids of a step in some shards of a table. Each id is of one of the four kinds.

    Attributes:
        table: its name.
        step: its number, from 1.
        ids: int64 `[N]`, ascending: the distinct ids of these shards in the batches of all ranks.
        counts: int64 `[N]`, how often each occurs there.
        known: bool `[N]`: the table knew them before.
        admitted: bool `[N]`: they entered.
        promoted: bool `[N]`: they were demoted, and came back.
        guest: bool `[N]`: they were not admitted, their gradients are dropped.
        evicted_ids: int64 `[E]`, ascending: ids that left, or were demoted.
    """

    table: str
    step: int
    ids: np.ndarray
    counts: np.ndarray
    known: np.ndarray
    admitted: np.ndarray
    promoted: np.ndarray
    guest: np.ndarray
    evicted_ids: np.ndarray


DecisionHook = Callable[[Decisions], object]


class DecisionHooks:
    """The hooks of one table on one rank, called in the order in which they came.

    Args:
        table: its name.
        rank: its name in errors.
    """

    def __init__(self, table: str, rank: str) -> None:
        self._table, self._rank = table, rank
        self._hooks: OrderedDict[int, DecisionHook] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hooks)

    def add(self, hook: DecisionHook) -> RemovableHandle:
        """Adds one; `remove` of what it returns takes it away."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the hooks that are registered now, for `__call__`."""
        return tuple(self._hooks)

    def __call__(
        self, numbers: Sequence[int], step: int, ids: np.ndarray, counts: np.ndarray, opened: OpenedIds
    ) -> None:
        """Tells what was decided.

        Args:
            numbers: which hooks, as `numbers` gave them; those that were removed since are passed over.
            step, ids, counts: of what `DynamicShards.open` was told.
            opened: what it returned.

        Raises:
            RowmeshError: one raised an error; names it, table, step, rank and line.
        """
        old = ~opened.fresh
        decisions = Decisions(
            self._table,
            step,
            *map(_read_only, (ids, counts)),
            known=old & ~opened.promoted,
            admitted=opened.fresh & ~opened.guest,
            promoted=_read_only(opened.promoted),
            guest=_read_only(opened.guest),
            evicted_ids=np.sort(opened.evicted_ids),
        )
        for hook in [self._hooks[number] for number in numbers if number in self._hooks]:
            try:
                hook(decisions)
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                raise RowmeshError(
                    f"rank {self._rank}: hook {getattr(hook, '__qualname__', repr(hook))} of dynamic table "
                    f"{self._table!r} failed at step {step}, which no rank takes: {type(error).__name__}: {error} "
                    f"({where.filename}, line {where.lineno}); mend the hook, remove it, or leave the batch out"
                ) from error


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view

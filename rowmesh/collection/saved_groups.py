"""Saved groups: which parameter group of a saved optimizer each one of an EmbeddingOptimizer goes on from.

Torch takes groups by position. The groups of rows follow the tables, which may come in another order, or fuse
otherwise, in the program that loads. So each group is saved with the names of its tables, and found by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rowmesh.errors import CheckpointError

Group = Mapping[str, Any]
_OWN = ("params", "name", "tables")  # of a group here; all else comes from the saved one
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def sources(saved: Sequence[Group], own: Sequence[Group]) -> list[int]:
    """For each own group the position of the saved one.

    Args:
        saved: of a state dictionary.
        own: of the optimizer that loads it.

    Raises:
        CheckpointError: they are of other tables; or tables that are one group here had several, which differ.

    Example:
        >>> saved = [{"tables": ["a"], "lr": 0.1}, {"tables": ["b"], "lr": 0.2}]
        >>> sources(saved, [{"tables": ["b"]}, {"tables": ["a"]}])
        [1, 0]
    """
    if not all("tables" in group for group in saved):
        raise CheckpointError(
            f"the state dictionary has {len(saved)} parameter groups, and this optimizer {len(own)}: "
            f"{[group['name'] for group in own]}; not all of those saved say their tables, as the state of an "
            "EmbeddingOptimizer does: use one of this class"
        )
    place_of = {table: place for place, group in enumerate(saved) for table in group["tables"]}
    mine = [table for group in own for table in group["tables"]]
    if place_of.keys() != set(mine):
        raise CheckpointError(
            f"the state dictionary is of an optimizer of the tables {sorted(place_of)}, this one has {sorted(mine)}; "
            "use the tables that it was saved with"
        )
    return [_only(saved, {table: place_of[table] for table in group["tables"]}) for group in own]


def _only(saved: Sequence[Group], place_of: Mapping[str, int]) -> int:
    """The place of what all tables of a group go on from."""
    (first, place), *others = place_of.items()
    for table, other in others:
        if _rest(saved[other]) != _rest(saved[place]):
            raise CheckpointError(
                f"tables {first!r} and {table!r} are updated together here, and were not in the state dictionary: it "
                f"has {_rest(saved[place])} and {_rest(saved[other])}; give them rules of different learning rates, as "
                "they had, or set both groups alike before saving"
            )
    return place


def _rest(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OWN}


def taken(saved: Sequence[Group], own: Sequence[Group], order: Sequence[int]) -> list[dict[str, Any]]:
    """The saved groups as those of this optimizer.

    Raises:
        CheckpointError: one has no learning rate.
    """
    found = []
    for number, (group, place) in enumerate(zip(own, order, strict=True)):
        if "lr" not in saved[place]:
            raise CheckpointError(f"group {group['name']!r} has no learning rate in the state dictionary")
        found.append({**saved[place], "params": [number], "name": group["name"], "tables": group["tables"]})
    return found


def schedule_in_order(state: Mapping[str, Any], order: Sequence[int], num_saved: int) -> dict[str, Any]:
    """The state of a schedule of `torch.optim.lr_scheduler`, whose lists are by group, for groups in another order.

    Args:
        state: as it was saved.
        order: as `sources` gives it.
        num_saved: how many groups there were.

    Example:
        >>> schedule_in_order({"base_lrs": [0.1, 0.2], "last_epoch": 7}, [1, 0], 2)
        {'base_lrs': [0.2, 0.1], 'last_epoch': 7}
    """
    found = dict(state)
    for key in _BY_GROUP:
        if isinstance(values := found.get(key), list | tuple) and len(values) == num_saved:
            found[key] = type(values)(values[place] for place in order)
    if isinstance(within := found.get("_schedulers"), list):  # one after the other, or at once
        found["_schedulers"] = [schedule_in_order(each, order, num_saved) for each in within]
    return found

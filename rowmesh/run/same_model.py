"""Which keys of a configuration a model depends on, and how two configurations differ in them."""

from __future__ import annotations

from typing import Any

from rowmesh._support.files.manifest import differences
from rowmesh.run.config import Config

_FREE_SECTIONS = ("run", "checkpoint", "publish", "placement", "pipeline", "tiers")
_FREE_KEYS = {
    "data": ("folder", "raw_schema", "test", "max_bad_rows", "follow"),  # contents are compared by their digest
    "parallel": ("transport", "timeout_s", "together"),
    "train": ("device", "cuda_graphs", "log_every", "progressive_every", "start_from"),
}


def model_differences(before: Config, now: Config, *, may_grow: bool = False) -> list[str]:
    """The keys on which the model depends and that differ, each with both values.

    Ranks, plan, transport, pipeline, tiers and device are free: every choice of them trains the same model.

    Args:
        before, now: the configurations.
        may_grow: whether dynamic tables may have more room than before. Where that is given in other units, or shards
            are given once alone, what is loaded tells.

    Example:
        >>> before = Config.model_validate({"data": {"folder": "clicks"}})
        >>> now = before.model_copy(update={"tables": before.tables.model_copy(update={"dim": 8})})
        >>> model_differences(before, now)
        ['tables.dim was 16, is 8']
    """
    names = sorted(before.tables.overridden.keys() | now.tables.overridden.keys())
    saved, own = _of_model(before, names), _of_model(now, names)
    if may_grow:
        _forget_growth(saved["tables"], own["tables"])
        for name in names:
            _forget_growth(saved["tables"][name], own["tables"][name])
    return differences(saved, own)


def _forget_growth(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Takes out how much dynamic tables hold, where that is not less than before."""
    rules = before["dynamic"], now["dynamic"]
    saved, own = ({key: each[key] for key in ("capacity", "capacity_bytes") if key in each} for each in rules)
    gone = [] if saved.keys() == own.keys() and any(own[key] < saved[key] for key in own) else [*saved, *own]
    gone += ["shards"] if ("shards" in rules[0]) != ("shards" in rules[1]) else []
    for each in rules:
        for key in gone:
            each.pop(key, None)


def _of_model(config: Config, tables: list[str]) -> dict[str, Any]:
    """The keys on which the model depends, with their values; None is left out, as in files."""
    values = config.model_dump(exclude=set(_FREE_SECTIONS), exclude_none=True)
    for section, keys in _FREE_KEYS.items():
        values[section] = {key: value for key, value in values[section].items() if key not in keys}
    averages = config.parallel.synchronization == "average"
    if not averages:
        del values["parallel"]["replicas"]
    if not config.train.patience:  # evaluations choose nothing
        del values["train"]["eval_every"], values["data"]["validation"]
    own = {name: config.tables.of(name).model_dump(exclude_none=True) for name in tables}
    values["tables"] = {key: value for key, value in values["tables"].items() if key not in own} | own
    for table in (values["tables"], *own.values()):
        del table["send"]
        for key in ("store", "store_retry_s"):  # checkpoints have the records, wherever they were
            table["dynamic"].pop(key, None)
        if not averages:
            table.pop("replicas", None)
        is_plain = table["storage"] == "auto" and "min_rows" not in table["tensor_train"]
        if is_plain or table["storage"] == "tiered":
            table["storage"] = "dense"
    return values

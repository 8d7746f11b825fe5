"""Which splits a run reads: checked before anything is started, on every rank alike."""

from __future__ import annotations

from rowmesh.data import Prepared
from rowmesh.errors import DataError
from rowmesh.suggest import hint
from rowmesh.train.config import Config, DataConfig


def check_split(data: Prepared, key: str, split: str) -> str:
    """The split itself.

    Args:
        data: where it should be.
        key: what names it, for the message.
        split: its name.

    Raises:
        DataError: the data have no such split, or it holds no samples.
    """
    if split not in data.splits:
        known = ", ".join(data.splits)
        raise DataError(f"{key}: {data.folder} has no split {split!r}, only: {known}{hint(split, data.splits)}")
    if not data.splits[split].samples:
        raise DataError(f"{key}: split {split!r} of {data.folder} has no samples; prepare the data with a larger share")
    return split


def check_training_splits(config: Config, data: Prepared) -> None:
    """Raises DataError where a split that the configuration names does not exist.

    Only the default names of the validation split and the test split may be absent, where nothing needs them:
    data prepared without them can be trained on.
    """
    check_split(data, "data.train", config.data.train)
    needed = {"validation": config.train.eval_every > 0, "test": False}
    for role, is_needed in needed.items():
        split = getattr(config.data, role)
        is_default = split == DataConfig.model_fields[role].default
        if is_needed or split in data.splits or not is_default:
            check_split(data, f"data.{role}", split)

"""Which splits a run reads: checked before anything is started, on every rank alike."""

from __future__ import annotations

from rowmesh.data import Prepared
from rowmesh.data.window import SplitFile
from rowmesh.errors import DataError
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import gather_objects
from rowmesh.suggest import hint
from rowmesh.train.checks import SETTING_UP
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
    """Raises DataError where a split that the configuration names does not exist, or its file is of no use.

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
    validated = {config.data.validation} if config.train.eval_every > 0 else set()
    for split in {config.data.train, config.data.test, *validated} & set(data.splits):
        check_file(data, split)  # now, not when a trained model waits for it


def check_file(data: Prepared, split: str) -> None:
    """Opens a split's file and reads its first and last record batch, however large it is.

    Raises:
        DataError: it is missing, cut or of other data.
        DamagedFileError: it is not what was written.
    """
    file = SplitFile(data, split)
    for number in {0, file.num_blocks - 1}:
        file.block(number)


def check_same_data(mesh: Mesh, data: Prepared) -> None:
    """Raises DataError, on all ranks alike, where ranks have opened different data. Collective and blocking."""
    identities = gather_objects(mesh, data.identity, SETTING_UP)
    others = [str(rank) for rank, each in enumerate(identities) if each != identities[0]]
    if others:
        raise DataError(
            f"{data.folder} holds other data on rank {', '.join(others)} than on rank 0: it was replaced while ranks "
            "started, or hosts have different copies; start again, with the same data everywhere"
        )

"""Which splits a run reads: checked before anything is started, on every rank alike."""

from __future__ import annotations

from dataclasses import dataclass

from rowmesh._support.suggest import hint
from rowmesh.data import Prepared
from rowmesh.data.window import SplitFile
from rowmesh.errors import DataError
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import gather_objects
from rowmesh.run.checks import SETTING_UP
from rowmesh.run.config import Config, DataConfig
from rowmesh.run.section import AUTO
from rowmesh.run.table_data import TableData


@dataclass(frozen=True)
class Part:
    """Some samples of a split, one after the other.

    Attributes:
        split: its name.
        span: their positions in it.
        is_cut: whether they are fewer than all.
    """

    split: str
    span: range
    is_cut: bool

    @property
    def samples(self) -> int:
        """How many."""
        return len(self.span)


def whole(data: Prepared, split: str) -> Part:
    """All samples of a split."""
    return Part(split, range(data.splits[split].samples), is_cut=False)


def validation_source(config: Config, data: Prepared) -> Part | None:
    """The samples to validate on: the validation split, or the last of the training split; None: nothing is left.

    Samples of a log are in order of time, so that the last are the most like those to come.
    """
    if config.data.validation in data.splits:
        return whole(data, config.data.validation)
    if config.data.train not in data.splits:
        return None
    total = data.splits[config.data.train].samples
    first = total - round(total * config.train.validation_fraction)
    return Part(config.data.train, range(first, total), is_cut=True) if 0 < first < total else None


def training_source(config: Config, data: Prepared, *, validates: bool) -> Part:
    """The samples to train on: the training split, without those that are cut off for validation."""
    held_out = validation_source(config, data) if validates else None
    if held_out is None or not held_out.is_cut:
        return whole(data, config.data.train)
    return Part(config.data.train, range(held_out.span.start), is_cut=True)


def num_training_samples(config: Config, data: Prepared, *, validates: bool) -> int:
    """How many samples an epoch has; 0 where there is no such split, which is refused later."""
    return training_source(config, data, validates=validates).samples if config.data.train in data.splits else 0


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
    validates = config.train.eval_every not in (0, AUTO)
    needed = {"validation": validates and validation_source(config, data) is None, "test": False}
    for role, is_needed in needed.items():
        split = getattr(config.data, role)
        is_default = split == DataConfig.model_fields[role].default
        if is_needed or split in data.splits or not is_default:
            check_split(data, f"data.{role}", split)
    validated = {config.data.validation} if validates else set()
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


def check_same_data(mesh: Mesh, data: TableData) -> None:
    """Raises DataError, on all ranks alike, where ranks have opened different data. Collective and blocking."""
    identities = gather_objects(mesh, data.identity, SETTING_UP)
    others = [str(rank) for rank, each in enumerate(identities) if each != identities[0]]
    if others:
        raise DataError(
            f"{data.place} holds other data on rank {', '.join(others)} than on rank 0: it was replaced while ranks "
            "started, or hosts have different copies; start again, with the same data everywhere"
        )

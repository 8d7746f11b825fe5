"""Where a run begins that goes on from the model of another: `train.start_from`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.run.config import Config
from rowmesh.run.fingerprint import Fingerprint, mismatch
from rowmesh.run.finished import FinishedRun
from rowmesh.run.report import model_text


def check_start(config: Config, meaning: Callable[[], Fingerprint]) -> FinishedRun | None:
    """The run whose model this one begins with; None: with rows and a network of its own.

    Args:
        config: of this run.
        meaning: gives what the ids of its data mean.

    Raises:
        RowmeshError: there is no such model, its ids mean something else, or its network has another optimizer.
    """
    if not config.train.start_from:
        return None
    path = Path(config.train.start_from)
    if path.absolute() == Path(config.run.folder).absolute():
        raise ConfigurationError(
            f"train.start_from={config.train.start_from!r} is the run's own folder; give another run.folder, "
            "or --resume"
        )
    finished = FinishedRun.open(path)
    if what := mismatch(finished.manifest.metadata, meaning, finished.folder.model):
        raise RowmeshError(
            f"train.start_from: the model in {path} was trained on {finished.manifest.metadata['data']}, and "
            f"{config.data.folder} differs from it in {what}: its rows would be those of other ids. Train on ids that "
            "mean the same in all data (raw rows; of sequences model.options.item_ids=raw), or on the same vocabularies"
        )
    before = finished.config.optimizer.name
    if before != config.optimizer.name:
        raise ConfigurationError(
            f"train.start_from: the network in {path} was trained by {before}, and optimizer.name is "
            f"{config.optimizer.name}, which cannot go on with its state; give optimizer.name={before}"
        )
    return finished


def start_text(finished: FinishedRun) -> str:
    """A line on the model that a run begins with."""
    return f"start     from the model in {finished.folder.path}, {model_text(finished.manifest.metadata)}"

"""Tasks: decides, once for a run, which data it reads and what it does with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rowmesh._support.files.manifest import Manifest
from rowmesh.data import Prepared
from rowmesh.data.events.sequences import SEQUENCES
from rowmesh.data.raw import RawData
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.models.sequence import KINDS
from rowmesh.run.click_task import ClickTask
from rowmesh.run.config import Config, Objective
from rowmesh.run.defaults import choose_defaults
from rowmesh.run.raw import open_raw
from rowmesh.run.raw_task import RawTask
from rowmesh.run.retrieval_task import RawRetrievalTask, RetrievalTask
from rowmesh.run.sequence.data import SequenceData
from rowmesh.run.sequence.defaults import choose_sequence_defaults
from rowmesh.run.sequence.task import SequenceTask
from rowmesh.run.table_data import TableData
from rowmesh.run.task import Task


class _Kind(NamedTuple):
    """How a kind of task is made, and what it takes where its configuration says auto."""

    make: Callable[[Config, Any], Task]
    choose_defaults: Callable[[Config, Any], tuple[Config, list[str]]] = choose_defaults


_KINDS: Mapping[tuple[type, Objective], _Kind] = {
    (Prepared, "clicks"): _Kind(ClickTask),
    (Prepared, "retrieval"): _Kind(RetrievalTask),
    (RawData, "clicks"): _Kind(RawTask),
    (RawData, "retrieval"): _Kind(RawRetrievalTask),
    (SequenceData, "next item"): _Kind(SequenceTask, choose_sequence_defaults),
}


def open_data(config: Config, *, verify: bool = True, trained: Mapping[str, Any] | None = None) -> TableData:
    """The data of a configuration: raw rows; or prepared ones, events for a sequence model, else samples with labels.

    Args:
        config: names them.
        verify: compare what is read with the checksums.
        trained: the metadata of the model that is to read them, which say how raw rows are read.

    Raises:
        DataError: they are not there, damaged, or of the other kind.
    """
    if config.data.is_raw:
        return open_raw(config, trained)
    if config.model.is_sequence:
        return SequenceData.open(config.data.folder, config.model.sequence, verify=verify)
    manifest = Manifest.read(Path(config.data.folder))
    if manifest is not None and manifest.kind == SEQUENCES:
        raise DataError(
            f"{config.data.folder} holds {SEQUENCES}, and {config.model.name} needs samples with labels; give "
            f"model.name={KINDS[0]} or another of {', '.join(KINDS)}, or other data"
        )
    return Prepared.open(config.data.folder, verify=verify)


def task_of(config: Config, data: TableData) -> tuple[Task, list[str]]:
    """Chooses what is done with the data; returns it, and lines on what was chosen where the configuration says auto.

    The task's configuration has a value in the place of every auto: all that follows takes the task, and asks neither
    the data nor the configuration again which one it is.

    Raises:
        ConfigurationError: the data are not what the model needs, or keys that were given cannot go together.
    """
    kind = _kind_of(config, data)
    config, choices = kind.choose_defaults(config, data)
    return kind.make(config, data), choices


def check_data(config: Config, data: TableData) -> None:
    """Raises ConfigurationError where the data are not what the model needs."""
    _kind_of(config, data)


def _kind_of(config: Config, data: TableData) -> _Kind:
    if (found := _KINDS.get((type(data), config.model.objective))) is not None:
        return found
    kind = "sequences of events" if config.model.is_sequence else "samples with labels"
    raise ConfigurationError(f"model.name = {config.model.name!r} needs {kind}, and {data.place} holds others")

"""Which task a configuration asks for, and the data that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rowmesh._support.files.manifest import Manifest
from rowmesh.data import Prepared
from rowmesh.data.events.sequences import SEQUENCES
from rowmesh.data.raw import RawData
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.models.sequence import KINDS
from rowmesh.run.click_task import ClickTask
from rowmesh.run.config import Config
from rowmesh.run.raw import open_raw
from rowmesh.run.raw_task import RawTask
from rowmesh.run.retrieval_task import RawRetrievalTask, RetrievalTask
from rowmesh.run.sequence.data import SequenceData
from rowmesh.run.sequence.task import SequenceTask
from rowmesh.run.table_data import TableData
from rowmesh.run.task import Task


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


def task_of(config: Config, data: TableData) -> Task:
    """What is to be done with the data.

    Raises:
        ConfigurationError: the data are not what the model needs.
    """
    if not config.model.is_sequence and isinstance(data, RawData):
        return (RawRetrievalTask if config.model.retrieves else RawTask)(config, data)
    if config.model.is_sequence and isinstance(data, SequenceData):
        return SequenceTask(config, data)
    if not config.model.is_sequence and isinstance(data, Prepared):
        return (RetrievalTask if config.model.retrieves else ClickTask)(config, data)
    kind = "sequences of events" if config.model.is_sequence else "samples with labels"
    raise ConfigurationError(f"model.name = {config.model.name!r} needs {kind}, and {data.place} holds others")

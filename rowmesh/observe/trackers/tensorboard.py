"""Scalars for TensorBoard, an extra: `pip install '.[tensorboard]'`."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rowmesh._support.records import RecordFile
from rowmesh.observe.trackers import TrackedRun, Tracker


class TensorBoard:
    """Writes the numbers of a record as scalars under their kind, into an event file of a folder.

    Events that cannot be written are counted and said, see `RecordFile`: the package's own writer ends a thread of its
    own there, and leaves a part of an event at which readers stop.

    Args:
        folder: made if need be.
        log: receives a message when events are lost; by default rowmesh's log.
        resumed_after: the step that the run goes on from: readers leave out events of later ones in files of before.
            0: it begins.
    """

    def __init__(self, folder: Path, log: Callable[[str], None] | None = None, resumed_after: int = 0) -> None:
        protocol = "tensorboard.compat.proto"  # classes that are made at run time, unknown to type checkers
        self._event = import_module(f"{protocol}.event_pb2").Event
        self._summary = import_module(f"{protocol}.summary_pb2").Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = RecordFile(folder / name, *([log] if log else []))
        self._append(file_version="brain.Event:2")
        if resumed_after:
            log_of_session = import_module(f"{protocol}.event_pb2").SessionLog
            self._append(step=resumed_after + 1, session_log=log_of_session(status=log_of_session.START))

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Writes every number of a record at a step."""
        for name, value in numbers.items():
            scalar = self._summary.Value(tag=f"{kind}/{name}", simple_value=value)
            self._append(step=step, summary=self._summary(value=[scalar]))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _append(self, **fields: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._file.append(record.getvalue())


def start(run: TrackedRun) -> Tracker:
    """Begins to write into the folder `tensorboard` of a run."""
    return TensorBoard(run.folder / "tensorboard", run.log, run.resumed_after)

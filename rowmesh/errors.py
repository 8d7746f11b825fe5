"""The errors a user can meet. Each message names the thing, gives the values and says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class RowmeshError(Exception):
    """Base of every error that rowmesh raises on purpose; the command line prints it without a traceback."""


class ConfigurationError(RowmeshError, ValueError):
    """A table, model or run was described in a way that cannot work."""


class DataError(RowmeshError, ValueError):
    """Input data is malformed: names the file and line, or the feature, and the values."""


class DamagedFileError(DataError):
    """A file does not hold what was written: names the file and the bytes."""


class IdRangeError(DataError):
    """Ids lie outside their table: names the features, how many ids, and the range."""


class NoRoomError(RowmeshError):
    """Rows of a tiered table do not fit into its fast memory: gives both, and the settings to raise."""


class PeerError(RowmeshError, RuntimeError):
    """Another rank died or stopped answering: names the rank.

    Attributes:
        is_common: whether all ranks raise it alike, before anything has changed.
    """

    def __init__(self, *text: str, is_common: bool = False) -> None:
        super().__init__(*text)
        self.is_common = is_common


class RefusedError(PeerError):
    """A batch that ranks look up together was refused on another rank, or is missing there: no rank has looked it up.

    Attributes:
        without: the ranks that have no further batch.
        refused: the ranks whose batch cannot be looked up.
        first: what the first of these met, as `rowmesh.mesh.plain.error_from_plain` reads it; None: there are none.
    """

    def __init__(
        self,
        message: str,
        without: Sequence[int] = (),
        refused: Sequence[int] = (),
        first: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.without, self.refused, self.first = tuple(without), tuple(refused), first


class StoreError(RowmeshError, RuntimeError):
    """A store outside this process (RocksDB, Redis, a folder) is away, has lost records, or was closed: names it."""


class Terminated(SystemExit):
    """SIGTERM or SIGHUP came: a command leaves through every `finally`, and ends with status 143 or 129."""

    def __init__(self, signal: int = 15) -> None:
        super().__init__(128 + signal)


class Preempted(SystemExit):
    """SIGTERM or SIGUSR1 came, and a checkpoint was written: a run that `--resume` goes on with; status 75."""

    def __init__(self) -> None:
        super().__init__(75)  # EX_TEMPFAIL of sysexits.h: to be tried again


class CheckpointError(RowmeshError, RuntimeError):
    """A checkpoint cannot be written, or what is read does not fit: names the table, rank or file."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint does not hold what was written, or lacks a part of it, which is proven: names the file.

    A checkpoint that is whole and does not fit what it is read into is another error: it may be of use elsewhere.
    """


class UnreadableError(CheckpointError):
    """The system refused to read a checkpoint now (too many open files, say), whatever is in it: try again."""


class CheckpointWriteError(CheckpointError):
    """The system refused to write a checkpoint (a full disk, say): another place, or another time, may do."""

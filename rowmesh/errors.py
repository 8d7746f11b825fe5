"""The errors a user can meet. Each message names the thing, gives the values and says what to do."""


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

    is_common = False


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


class UnreadableError(CheckpointError):
    """The system refused to read a checkpoint now (too many open files, say), whatever is in it: try again."""


class CheckpointWriteError(CheckpointError):
    """The system refused to write a checkpoint (a full disk, say): another place, or another time, may do."""

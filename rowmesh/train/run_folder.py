"""The folder of a run: what lies where, and whose it is while a run writes it."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rowmesh.errors import RowmeshError

CONFIG, ENVIRONMENT, LOCK = "config.toml", "environment.json", ".lock"
CONTENTS = (CONFIG, ENVIRONMENT, "metrics.jsonl", "counters.jsonl", "evaluation", "tensorboard", "model")


class RunFolder:
    """Names of the files of a run.

    Attributes:
        path: the folder.

    Example:
        >>> RunFolder(Path("runs/criteo")).metrics.name
        'metrics.jsonl'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG
        self.environment = path / ENVIRONMENT
        self.metrics = path / "metrics.jsonl"
        self.counters = path / "counters.jsonl"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"

    def evaluation(self, split: str) -> Path:
        """Where the metrics of a split go; makes the folder."""
        folder = self.path / "evaluation"
        folder.mkdir(exist_ok=True)
        return folder / f"{split}.json"


class Claim:
    """Takes a run's folder for the time of a `with` block; only rank 0 does this.

    The folder is removed again if the block fails before `keep` was called.

    Args:
        folder: the run's folder; made if need be.
        overwrite: whether a former run in it may be removed.

    Raises:
        RowmeshError: another process writes the folder, it holds a run and `overwrite` is False, it holds
            something else, or it cannot be made.
    """

    def __init__(self, folder: RunFolder, *, overwrite: bool) -> None:
        self._path, self._overwrite, self._keep = folder.path, overwrite, False
        self._is_held = False

    def __enter__(self) -> Self:
        self._made = not self._path.exists()
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock = (self._path / LOCK).open("a")
        except OSError as error:
            raise RowmeshError(f"cannot make the run folder {self._path}: {error.strerror}") from None
        try:
            self._take()
        except BaseException:
            self._lock.close()
            raise
        self._is_held = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed_early = error is not None and not self._keep
        if failed_early and self._made:
            _clear(self._path)
        (self._path / LOCK).unlink(missing_ok=True)
        if failed_early and self._made:
            self._path.rmdir()
        self._lock.close()

    def keep(self) -> None:
        """From here on the folder is this run's and stays, whatever happens; only now is an earlier run removed."""
        self._keep = True
        if self._is_held:  # only one rank holds the folder
            _clear(self._path)

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RowmeshError(
                f"another run is writing {self._path}; wait for it, or give this one run.folder=… of its own"
            ) from None
        found = {path.name for path in self._path.iterdir()} - {LOCK}
        if found and not self._overwrite:
            self._leave(f"{self._path} holds a run or other files; give another run.folder=…, or --overwrite")
        if found - set(CONTENTS):
            strangers = ", ".join(sorted(found - set(CONTENTS))[:3])
            self._leave(f"{self._path} holds what no run wrote ({strangers}); give another run.folder=…")

    def _leave(self, message: str) -> None:
        (self._path / LOCK).unlink(missing_ok=True)
        raise RowmeshError(message)


def write_json(path: Path, values: Any) -> None:
    """Writes indented JSON."""
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _clear(folder: Path) -> None:
    """Removes everything that a run writes, except the lock."""
    for path in (folder / name for name in CONTENTS):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

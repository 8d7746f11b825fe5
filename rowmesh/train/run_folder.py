"""The folder of a run: what lies where, and whose it is while a run writes it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rowmesh.errors import RowmeshError
from rowmesh.files.atomic import naming, write_text
from rowmesh.files.lock import exclusive
from rowmesh.files.manifest import MANIFEST, Manifest

CONFIG, ENVIRONMENT, LOCK, KIND = "config.toml", "environment.json", ".lock", "run"
PLAN, FIRST_PLAN = "plan.json", "first_plan.json"
TRACE = "trace.json"
_PARTIAL = r"\..*\.partial"
# What a run writes, and what it writes in there where that is a folder.
CONTENTS = {
    **dict.fromkeys((MANIFEST, CONFIG, ENVIRONMENT, PLAN, FIRST_PLAN, "metrics.jsonl", "counters.jsonl", TRACE), ""),
    "evaluation": rf".*\.json|{_PARTIAL}",
    "model": r"manifest\.json.*|[0-9a-f]{16}",
    "tensorboard": r"events\.out\..*",
}


class RunFolder:
    """Names of the files of a run.

    Attributes:
        path: the folder.
        plan: the plan that the model was trained with, in the end.
        trace: what every thread did in the last steps, where that was asked for.
        first_plan: where drift replaced it, the plan that the training began with.

    Example:
        >>> RunFolder(Path("runs/criteo")).metrics.name
        'metrics.jsonl'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG
        self.plan, self.first_plan = path / PLAN, path / FIRST_PLAN
        self.metrics = path / "metrics.jsonl"
        self.counters = path / "counters.jsonl"
        self.trace = path / TRACE
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"

    def evaluation(self, split: str) -> Path:
        """Where the metrics of a split go."""
        return self.path / "evaluation" / f"{split}.json"


class Claim:
    """Takes a run's folder for the time of a `with` block; only rank 0 does this.

    The folder is removed again, with those above it that had to be made, if the block fails before `begin`
    has written the first files.

    Args:
        folder: the run's folder; made if need be.
        overwrite: whether a former run in it may be removed.

    Raises:
        RowmeshError: another process writes the folder, it holds a run and `overwrite` is False, it holds
            something else, or it cannot be made.
    """

    def __init__(self, folder: RunFolder, *, overwrite: bool) -> None:
        self._path, self._overwrite, self._has_begun = folder.path, overwrite, False
        self._held = ExitStack()

    def __enter__(self) -> Self:
        self._made = [path for path in (self._path, *self._path.parents) if not path.exists()]
        refusal = f"another run is writing {self._path}; wait for it, or give this one run.folder=… of its own"
        with ExitStack() as stack:
            stack.callback(self._remove_made)
            try:
                self._path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(exclusive(self._path / LOCK, refusal))
            except OSError as error:
                raise RowmeshError(f"cannot write in the run folder {self._path}: {error.strerror}") from None
            _check_free(self._path, self._overwrite)
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            if error is None or self._has_begun:
                self._made = []
            elif self._made:
                _clear(self._path)

    def begin(self, request: Mapping[str, Any], files: Mapping[str, str]) -> None:
        """Removes an earlier run and writes the first files of this one; from here on the folder stays.

        Args:
            request: what was asked for, in the user's words, for the manifest that marks the folder as a run's.
            files: name → text.
        """
        _clear(self._path)
        with naming(self._path):
            Manifest(kind=KIND, request=request).write(self._path)
        for name, text in files.items():
            write_text(self._path / name, text)
        self._has_begun = True

    def _remove_made(self) -> None:
        """Removes the folders that were made here, from the innermost on, as far as they are empty."""
        with contextlib.suppress(OSError):
            for path in self._made:
                path.rmdir()


def write_json(path: Path, values: Any) -> None:
    """Writes indented JSON, whole or not at all."""
    write_text(path, json.dumps(values, indent=1) + "\n")


def _check_free(folder: Path, overwrite: bool) -> None:
    """Raises RowmeshError where something would be lost that no run wrote, or a run that may not be overwritten."""
    if not {path.name for path in folder.iterdir()} - {LOCK}:
        return
    if strangers := sorted(_strangers(folder)):
        raise RowmeshError(
            f"{folder} holds what no run wrote ({', '.join(strangers[:3])}); give another run.folder=…, or remove it"
        )
    manifest = Manifest.read(folder)
    if manifest is None or manifest.kind != KIND:
        what = "no run, though its files have such names" if manifest is None else manifest.kind
        raise RowmeshError(f"{folder} is {what}; give another run.folder=…, or remove it")
    if not overwrite:
        raise RowmeshError(f"{folder} holds a run; give another run.folder=…, or --overwrite to replace it")


def _strangers(folder: Path) -> Iterator[str]:
    """What lies in the folder, or in a folder of it, and was not written by a run. Links are not followed."""
    for path in folder.iterdir():
        if path.name not in CONTENTS:
            if not (path.name == LOCK or _is_partial(path)):
                yield path.name
        elif path.is_dir() and not path.is_symlink():
            pattern = CONTENTS[path.name]
            yield from (f"{path.name}/{each.name}" for each in path.iterdir() if not re.fullmatch(pattern, each.name))


def _clear(folder: Path) -> None:
    """Removes everything that a run writes, except the lock: of a link the link, not what it leads to."""
    for path in folder.iterdir():
        if path.name not in CONTENTS and not _is_partial(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _is_partial(path: Path) -> bool:
    """Whether a crash left it in the middle of a write."""
    return bool(re.fullmatch(_PARTIAL, path.name))

"""The folder of a run: what lies where, and whose it is while a run writes it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rowmesh._support.faults import reach
from rowmesh._support.files.atomic import naming, remove_partial_files, sync_folder, write_text
from rowmesh._support.files.lock import exclusive
from rowmesh._support.files.manifest import MANIFEST, Manifest
from rowmesh.checkpoint.series import CLAIM_PATTERN, STEP_PATTERN
from rowmesh.errors import RowmeshError

CONFIG, ENVIRONMENT, LOCK, KIND = "config.toml", "environment.json", ".lock", "run"
ABOUT, REPORT, COMPARED = "about.json", "report.html", "comparison.html"
PLAN, FIRST_PLAN = "plan.json", "first_plan.json"
BEST = "best"
"""The best model so far, while a run with early stopping trains."""
CHECKPOINTS = "checkpoints"
"""All that the next step depends on, after some of the steps."""
TRACE = "trace.json"
UNFINISHED = "unfinished"
"""Where a run is that replaces another, until its model is written: the folder has the same names in it."""
WHOLE, LEAVING, FORMER = "whole.json", ".former.partial", ".former"
"""In there, once the model is written: what of the run of before has to go, and where that is, amid its move and after
it. See [Note: the exchange]."""
_PARTIAL = r"\..*\.partial"
_BEGUN = rf"\.{re.escape(MANIFEST)}\..*\.partial"  # a crash came while the first file was written
_OF_CLAIM = (MANIFEST, CONFIG, ENVIRONMENT, ABOUT, PLAN, FIRST_PLAN, WHOLE)  # only a claim writes these
# Files and folders that a run writes, each folder with a pattern of the names in it.
CONTENTS = {
    **dict.fromkeys((MANIFEST, CONFIG, ENVIRONMENT, ABOUT, PLAN, FIRST_PLAN, TRACE, REPORT, COMPARED), ""),
    **dict.fromkeys(("metrics.jsonl", "counters.jsonl"), ""),
    "evaluation": rf".*\.json|{_PARTIAL}",
    **dict.fromkeys(("model", BEST), rf"manifest\.json.*|[0-9a-f]{{16}}|{_PARTIAL}"),
    CHECKPOINTS: f"{STEP_PATTERN}|{CLAIM_PATTERN}",
    "bad_rows": r"rank\d+_after_\d+\.jsonl",
    "tensorboard": r"events\.out\..*",
}

# [Note: the exchange]
# A run that replaces another takes its place in these steps. A crash may come between any two operations on files; the
# next claim of the folder does what is left:
#   1. `unfinished/model` is there: the new run is whole, and readers still find the former one.
#   2. `unfinished/whole.json` lists what the former run has in the folder. From here on readers find the new run alone,
#      and write into `unfinished/`: what the list names in the folder is the former run's.
#   3. The listed files and folders move to `unfinished/.former.partial`.
#   4. That becomes `.former`: the folder has nothing of the former run. Files that come into it from here on stay.
#   5. The files and folders of the new run in `unfinished/` move into the folder.
#   6. `whole.json` goes. `unfinished/` has nothing but `.former`, which is removed in any order.
# None of 3 to 6 takes room on the disk.


class RunFolder:
    """Names of the files of a run.

    Attributes:
        path: the folder.
        about: what the run is made of that follows from neither configuration nor plan.
        report: the page of the run.
        compared: the page of this run beside another.
        plan: the plan that the model was trained with, in the end.
        best: the best model so far, while a run with early stopping trains.
        checkpoints: all that the next step depends on, after some of the steps.
        trace: what every thread did in the last steps, where that was asked for.
        first_plan: where drift replaced it, the plan that the training began with.

    Example:
        >>> RunFolder(Path("runs/criteo")).metrics.name
        'metrics.jsonl'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.environment, self.about = self._at(CONFIG), self._at(ENVIRONMENT), self._at(ABOUT)
        self.plan, self.first_plan = self._at(PLAN), self._at(FIRST_PLAN)
        self.metrics, self.counters = self._at("metrics.jsonl"), self._at("counters.jsonl")
        self.trace = self._at(TRACE)
        self.report, self.compared = self._at(REPORT), self._at(COMPARED)
        self.model, self.best = self._at("model"), self._at(BEST)
        self.checkpoints = self._at(CHECKPOINTS)

    def to_plain(self) -> str:
        """The folder, to be sent to other ranks."""
        return str(self.path)

    @classmethod
    def from_plain(cls, values: str) -> Self:
        """From what another rank sent."""
        return cls(Path(values))

    @property
    def evaluations(self) -> Path:
        """The folder of the metrics of splits."""
        return self._at("evaluation")

    def evaluation(self, split: str) -> Path:
        """Where the metrics of a split go."""
        return self.evaluations / f"{split}.json"

    def bad_rows(self, rank: int, step: int) -> Path:
        """Where raw rows go that a rank cannot use after a step."""
        return self.path / "bad_rows" / f"rank{rank}_after_{step}.jsonl"

    @property
    def is_whole(self) -> bool:
        """Whether there is a model."""
        return (self.model / MANIFEST).exists()

    @property
    def started_in(self) -> str:
        """The folder in which the run was started; "" where that is not known."""
        return self._asked("from")

    @property
    def id(self) -> str:
        """The name of the run for trackers, which it keeps when it is resumed; "" where it has none."""
        return self._asked("id")

    @property
    def seal(self) -> str:
        """The seal that `rowmesh.run.trust` left here; "" where there is none."""
        return self._asked("seal")

    def _asked(self, key: str) -> str:
        manifest = Manifest.read(self._at(MANIFEST).parent)
        return "" if manifest is None else str(manifest.request.get(key, ""))

    def _at(self, name: str) -> Path:
        """Where it is, or is to be: also where a crash came amid the exchange with the run of before."""
        new = self.path / UNFINISHED
        is_there = (new / WHOLE).exists() and (os.path.lexists(new / name) or not os.path.lexists(new / FORMER))
        return (new if is_there else self.path) / name


@dataclass
class Description:
    """The files that say what a run is; a model cannot be loaded without some of them.

    Attributes:
        request: what was asked for, in the user's words, for the manifest that marks the folder as a run's.
        files: name → text.
    """

    request: Mapping[str, Any]
    files: dict[str, str]

    def write(self, folder: Path, *, anew: bool = True) -> list[str]:
        """Writes the files, or those alone that are missing; returns which."""
        written = []
        if anew or Manifest.read(folder) is None:
            with naming(folder):
                Manifest(kind=KIND, request=self.request).write(folder)
            written.append(MANIFEST)
        for name, text in self.files.items():
            if anew or not (folder / name).exists():
                write_text(folder / name, text)
                written.append(name)
        return written


class Claim:
    """Takes a run's folder for the time of a `with` block; only rank 0 does this.

    The folder is removed again, with those above it that had to be made, if the block fails before `begin`
    has written the first files, or the run is withdrawn. A former run with a model stays whole until `finish`.

    Args:
        folder: the run's folder; made if need be.
        overwrite: whether a former run in it may be removed.
        log: receives messages for the user.
        resumes: whether a run in it may go on.

    Attributes:
        has_completed: whether the run that is there was interrupted after it had written its model, and took the place
            of the one of before just now, when the folder was taken.

    Raises:
        RowmeshError: another process writes the folder, it holds a run and neither `overwrite` nor `resumes` is True,
            it holds something else, or it cannot be made.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        overwrite: bool,
        log: Callable[[str], None] = lambda text: None,
        resumes: bool = False,
    ) -> None:
        self._path, self._overwrite, self.log, self._has_begun = folder.path, overwrite, log, False
        self._resumes, self.has_completed = resumes, False
        self._held = ExitStack()
        self._target = folder.path
        self._known: dict[Path, os.stat_result] = {}
        self._elsewhere: Path | None = None
        self._description = Description({}, {})

    def __enter__(self) -> Self:
        self._made = [path for path in (self._path, *self._path.parents) if not path.exists()]
        with ExitStack() as stack:
            stack.callback(self._remove_made)
            try:
                self._path.mkdir(parents=True, exist_ok=True)
                self._lock(stack, self._path)
                self.has_completed = _complete(self._path)
            except OSError as error:
                raise RowmeshError(f"cannot write in the run folder {self._path}: {error.strerror}") from None
            if self.has_completed:
                self.log(f"former    gone from {self._path}: the run that replaces it had written its model")
            _check_free(self._path, self._overwrite or self._resumes)
            for each in (self._path, self._path / UNFINISHED):
                remove_partial_files(each, _OF_CLAIM)
            self._held = stack.pop_all()
        self._keep(self._path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            if self._elsewhere is not None and not RunFolder(self._elsewhere).is_whole:
                shutil.rmtree(self._elsewhere, ignore_errors=True)
            if error is None or self._has_begun:
                self._made = []
            elif self._made:
                _clear(self._path)

    def begin(self, request: Mapping[str, Any], files: Mapping[str, str]) -> RunFolder:
        """Writes the first files of the run and returns where it writes; from here on the folder stays.

        A former run that has a model stays as it is, and this one begins beside it; another is removed.

        Args:
            request: what was asked for, in the user's words, for the manifest that marks the folder as a run's.
            files: name → text.
        """
        self._description = Description(request, dict(files))
        if RunFolder(self._path).is_whole:
            self._target = self._path / UNFINISHED
            _remove(self._target)
        else:
            _clear(self._path)
        try:
            self._target.mkdir(exist_ok=True)
            self._description.write(self._target)
        except BaseException:
            if self._replaces:
                _remove(self._target)
            raise
        self._keep(self._target)
        self._has_begun = True
        if self._replaces:
            self.log(f"former    the run in {self._path} stays until the model of this one is written")
        return RunFolder(self._target)

    def withdraw(self) -> None:
        """Takes `begin` back, of a run that ends before its first step, unless bad rows are kept in its folder."""
        if not self._is_same(self._target) or any(self._target.glob("bad_rows/*")):
            return
        if self._replaces:
            _remove(self._target)
        else:
            _clear(self._path)
        self._has_begun = False

    @property
    def unfinished(self) -> RunFolder:
        """The run that may go on: the one that is to replace another, where there is one that has begun to."""
        new = self._path / UNFINISHED
        return RunFolder(new if Manifest.read(new) is not None else self._path)

    def resume(self, request: Mapping[str, Any], files: Mapping[str, str]) -> RunFolder:
        """As `begin`, of the run `unfinished`, which goes on: what it wrote stays."""
        self._target = self.unfinished.path
        self._description = Description(request, dict(files))
        self._description.write(self._target)
        self._keep(self._target)
        self._has_begun = True
        return RunFolder(self._target)

    def settle(self, changed: Mapping[str, str] | None = None) -> RunFolder:
        """Makes sure that the run's folder is there, with all that its model needs beside it; returns where it is.

        Somebody may have removed or renamed it while the run trained. It is made again where it was, or beside that
        where something else has its name by now.

        Args:
            changed: files that say something else now than at the beginning.
        """
        reach("run.settle", self._target)
        if self._replaces and (self._target / WHOLE).exists():  # a try before this one was refused amid the exchange
            self._exchange()
        if not self._is_same(self._target):
            self._make_again()
        elif lost := self._description.write(self._target, anew=False):
            self.log(f"{self._target} lacked {', '.join(lost)}; written again")
        for name, text in (changed or {}).items():
            write_text(self._target / name, text)
        self._description.files.update(changed or {})
        return RunFolder(self._target)

    def settle_elsewhere(self, folder: Path, changed: Mapping[str, str] | None = None) -> RunFolder:
        """A new folder of the run's name in another one, with all that its model needs beside it."""
        self._description.files.update(changed or {})
        folder.mkdir(parents=True, exist_ok=True)
        if self._elsewhere is None or not self._elsewhere.exists():
            self._elsewhere = _make_free(folder / self._path.name)
        self._description.write(self._elsewhere)
        return RunFolder(self._elsewhere)

    def finish(self) -> RunFolder:
        """Ends the run of before, now that the model of this one is written; returns where this one is.

        A crash amid it loses neither: a reader finds the new run, and the next run to be written here goes on with it.
        """
        if not self.settle().is_whole:
            raise FileNotFoundError(errno.ENOENT, "removed while it was written", str(self._target / "model"))
        if self._replaces:
            _begin_exchange(self._path)
            self._exchange()
        return RunFolder(self._target)

    def _exchange(self) -> None:
        _finish_exchange(self._path)
        self._target = self._path

    @property
    def _replaces(self) -> bool:
        return self._target == self._path / UNFINISHED

    def _keep(self, folder: Path) -> None:
        """Remembers which folder it is that has this name now."""
        if hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
            self._held.callback(os.close, os.open(folder, os.O_RDONLY | os.O_DIRECTORY))  # its number stays its own
        self._known[folder] = folder.stat()

    def _is_same(self, folder: Path) -> bool:
        """Whether a folder still has the name that it had."""
        try:
            return os.path.samestat(self._known[folder], folder.stat())
        except OSError:
            return False

    def _make_again(self) -> None:
        missed = self._target
        if not (self._replaces and self._is_same(self._path)):
            where = self._path
            if where.exists() and not (where.is_dir() and not any(where.iterdir())):
                where = _make_free(where)
            where.mkdir(parents=True, exist_ok=True)
            self._lock(self._held, where)
            self._path = self._target = where
        self._target.mkdir(exist_ok=True)
        self._description.write(self._target)
        self._keep(self._target)
        self.log(
            f"{missed} was removed or renamed while the run trained; its model goes to {self._target}, without the "
            "metrics and counters written before"
        )

    def _lock(self, stack: ExitStack, folder: Path) -> None:
        refusal = f"another run is writing {folder}; wait for it, or give this one run.folder=… of its own"
        stack.enter_context(exclusive(folder / LOCK, refusal))

    def _remove_made(self) -> None:
        """Removes the folders that were made here, from the innermost on, as far as they are empty."""
        with contextlib.suppress(OSError):
            for path in self._made:
                path.rmdir()


def _make_free(path: Path) -> Path:
    """Makes a folder of that name, or of the first of name-2, name-3, … that nothing has."""
    for number in itertools.count(1):
        place = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            place.mkdir()
            return place
    raise AssertionError


def _complete(folder: Path) -> bool:
    """Does what a crash left to do when a whole new run was to take the place of the one of before; whether it did."""
    new = folder / UNFINISHED
    if not (new / WHOLE).exists():
        if not (_is_run(new) and RunFolder(new).is_whole):
            _remove_former(folder)
            return False
        _refuse_strangers(folder)
        _begin_exchange(folder)
    _finish_exchange(folder)
    return True


def _begin_exchange(folder: Path) -> None:
    """Makes a whole new run the one that readers find. See [Note: the exchange]."""
    names = sorted(path.name for path in folder.iterdir() if path.name in CONTENTS)
    write_text(folder / UNFINISHED / WHOLE, json.dumps({"former": names}) + "\n")


def _finish_exchange(folder: Path) -> None:
    """Puts it in the place of the one of before; goes on where a crash interrupted that. See [Note: the exchange]."""
    new = folder / UNFINISHED
    former = _former_names(new / WHOLE)
    _refuse_strangers(folder)
    if not os.path.lexists(new / FORMER):
        (new / LEAVING).mkdir(exist_ok=True)
        for name in former:
            if os.path.lexists(folder / name) and not os.path.lexists(new / LEAVING / name):
                reach("run.exchange", folder / name)
                (folder / name).rename(new / LEAVING / name)
        sync_folder(new / LEAVING)
        sync_folder(folder)
        reach("run.vacated", folder)
        (new / LEAVING).rename(new / FORMER)
        sync_folder(new)
    names = sorted(path.name for path in new.iterdir() if path.name in CONTENTS)
    if taken := [name for name in names if os.path.lexists(folder / name)]:
        raise RowmeshError(
            f"{folder} holds {', '.join(taken[:3])}, which came there while a run took the place of the one before; "
            "move it elsewhere"
        )
    for name in names:
        reach("run.exchange", new / name)
        (new / name).rename(folder / name)
    sync_folder(folder)
    sync_folder(new)
    reach("run.exchanged", folder)
    (new / WHOLE).unlink()
    _remove_former(folder)


def _former_names(path: Path) -> list[str]:
    """Names of the files and folders that a replaced run has in its folder.

    Raises:
        RowmeshError: the list is damaged.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        values = None
    names = values.get("former") if isinstance(values, dict) else None
    if not (isinstance(names, list) and all(isinstance(name, str) and name in CONTENTS for name in names)):
        raise RowmeshError(f"{path} is damaged; move what you want to keep out of {path.parent.parent}")
    return names


def _refuse_strangers(folder: Path) -> None:
    if strangers := sorted(_strangers(folder)):
        raise RowmeshError(
            f"{folder} holds what no run wrote ({', '.join(strangers[:3])}), and a run that was interrupted while it "
            "took the place of the one before; move what is not the run's elsewhere"
        )


def _remove_former(folder: Path) -> None:
    """Removes a run that was replaced, as far as the disk lets it; the next claim removes what stays."""
    new = folder / UNFINISHED
    if _is_run(folder) and new.is_dir() and all(path.name == FORMER or _is_partial(path) for path in new.iterdir()):
        with contextlib.suppress(OSError):
            reach("run.former", new)
            sync_folder(new)  # with `whole.json` there again, and no `.former`, all would begin anew
            shutil.rmtree(new)


def _is_run(folder: Path) -> bool:
    manifest = Manifest.read(folder)
    return manifest is not None and manifest.kind == KIND


def write_json(path: Path, values: Any) -> None:
    """Writes indented JSON, whole or not at all."""
    write_text(path, json.dumps(values, indent=1) + "\n")


def _check_free(folder: Path, overwrite: bool) -> None:
    """Raises RowmeshError where something would be lost that no run wrote, or a run that may not be overwritten."""
    if all(path.name == LOCK or re.fullmatch(_BEGUN, path.name) for path in folder.iterdir()):
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
    """Names in the folder, or in a folder of it, that no run wrote. Links are not followed."""
    for path in folder.iterdir():
        is_folder = path.is_dir() and not path.is_symlink()
        if path.name == UNFINISHED and is_folder:
            yield from (f"{UNFINISHED}/{name}" for name in _strangers(path) if name not in (WHOLE, FORMER))
        elif path.name not in CONTENTS:
            if not (path.name == LOCK or _is_partial(path)):
                yield path.name
        elif is_folder:
            pattern = CONTENTS[path.name]
            yield from (f"{path.name}/{each.name}" for each in path.iterdir() if not re.fullmatch(pattern, each.name))


def _clear(folder: Path) -> None:
    """Removes everything that a run writes, except the lock. Links are removed, and what they lead to stays.

    The manifest, which marks the folder as a run's, goes last: after a crash the next run may remove the rest.
    """
    for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
        if path.name in CONTENTS or path.name == UNFINISHED or _is_partial(path):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_partial(path: Path) -> bool:
    """Whether a crash left it in the middle of a write."""
    return bool(re.fullmatch(_PARTIAL, path.name))

"""Trackers: where the numbers of a run go beside `metrics.jsonl`. One small interface, for those that come with rowmesh
and for your own.

A tracker is made by a callable that takes a `TrackedRun`; a class will do:

    class Printed:
        def __init__(self, run: TrackedRun) -> None: ...
        def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None: print(kind, step, numbers)
        def close(self) -> None: ...

`run.trackers=["my_module:Printed"]` uses it, where `my_module` can be imported. Trackers live on rank 0. A tracker that
fails ends no run: that is said once, and the run goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from rowmesh._support.suggest import nearest
from rowmesh.errors import ConfigurationError

BUILT_IN = ("tensorboard", "wandb", "mlflow")
"""Each an extra of rowmesh and a package of that name."""


@dataclass(frozen=True)
class TrackedRun:
    """The facts of a run for its trackers.

    Attributes:
        folder: where the run writes.
        name: of that folder.
        config: the resolved configuration, section by section.
        log: prints a line for the user.
        id: of the run, which it keeps when it is resumed; empty where it has none.
        resumed_after: the step that it goes on from; what was written of later ones counts no more. 0: it begins.
    """

    folder: Path
    name: str
    config: Mapping[str, object]
    log: Callable[[str], None]
    id: str = ""
    resumed_after: int = 0


class Tracker(Protocol):
    """Takes the numbers of a run."""

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of a record.

        Args:
            kind: "train", or the name of an evaluated split.
            step: after which.
            numbers: by name; finite.
        """
        ...

    def close(self) -> None:
        """Ends it, with the run."""
        ...


class Trackers:
    """Several trackers as one, which never fails.

    Args:
        run: what is tracked.
        names: as in `run.trackers`.
        more: makers of trackers that have no name there, by how they are called in messages.
    """

    def __init__(
        self, run: TrackedRun, names: Sequence[str], more: Mapping[str, Callable[[TrackedRun], Tracker]] | None = None
    ) -> None:
        self._log = run.log
        self._open: dict[str, Tracker] = {}
        for name, make in ({name: _maker(name) for name in names} | dict(more or {})).items():
            self._guard(name, lambda name=name, make=make: self._open.update({name: make(run)}))

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Gives a record to all of them."""
        for name, tracker in list(self._open.items()):
            self._guard(name, lambda tracker=tracker: tracker.write(kind, step, numbers))

    def close(self) -> None:
        """Ends all of them."""
        for name, tracker in list(self._open.items()):
            self._guard(name, tracker.close)
        self._open.clear()

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        """Does something; a tracker that fails is said and left out from then on."""
        try:
            action()
        except Exception as error:
            self._open.pop(name, None)
            self._log(f"tracker {name} failed ({type(error).__name__}: {error}); the run goes on without it")


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigurationError where a tracker is not known, or cannot be imported."""
    for name in names:
        if ":" in name:
            _maker(name)
        elif name not in BUILT_IN:
            near = nearest(name, BUILT_IN)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(BUILT_IN)}, and module:Class"
            raise ConfigurationError(f"run.trackers: no tracker {name!r}; {hint}")
        elif find_spec(name) is None:
            raise ConfigurationError(
                f"run.trackers: the package of {name!r} is not installed; in a checkout of rowmesh: pip "
                f"install '.[{name}]', or leave it out (metrics.jsonl holds the same numbers)"
            )


def _maker(name: str) -> Callable[[TrackedRun], Tracker]:
    place = name if ":" in name else f"rowmesh.observe.trackers.{name}:start"
    module, _, attribute = place.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"run.trackers: {name!r} cannot be imported: {error}") from None
    if not callable(found):
        raise ConfigurationError(f"run.trackers: {name!r} is no class, and cannot be called")
    return cast(Callable[[TrackedRun], Tracker], found)

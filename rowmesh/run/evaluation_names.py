"""Names of evaluations in a run's folder, so that an evaluation of other samples replaces none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from rowmesh.data.raw import RawData, is_server
from rowmesh.run.config import DataConfig
from rowmesh.run.run_folder import RunFolder
from rowmesh.run.table_data import TableData

TEST = "test"
_LONGEST = 120  # characters of a name that takes folders in


def place_of(data: TableData, split: str) -> str:
    """Where the samples of a split are, wherever a command is run: of raw rows the split is a place itself."""
    return replace(data, location=split).place if isinstance(data, RawData) else data.place


def evaluation_name(run: RunFolder, trained: DataConfig, data: TableData, split: str) -> str:
    """The name of an evaluation: its split, or for raw rows "test" or the name of their file or folder.

    Samples that are not of the run's own data have the name of their folder before the split. Where it is taken by
    others, more folders come before it, or a number behind it.

    Args:
        run: the folder, which has the files of former evaluations.
        trained: the data of the run.
        data: those of the evaluation.
        split: which of them; of raw rows a place.
    """
    if name := _own_name(trained, data, split):
        return name
    place = place_of(data, split)
    names = (name for name in _other_names(trained, data, split) if _place_in(run.evaluation(name)) in (place, None))
    return next(names)


def _own_name(trained: DataConfig, data: TableData, split: str) -> str:
    """The name of samples that the run's configuration names, whatever has been evaluated before; "" of others."""
    if isinstance(data, RawData):
        return TEST if trained.raw_test and _is_same_place(trained.raw_test, split) else ""
    return split if _is_same_place(trained.folder, str(data.folder)) else ""


def _other_names(trained: DataConfig, data: TableData, split: str) -> Iterator[str]:
    """Names for samples that the configuration does not name, the shortest first."""
    if not isinstance(data, RawData):
        path, name = data.folder.resolve(), f"{data.folder.resolve().name}-{split}"
    else:
        path = Path("redis", trained.stream) if is_server(split) else Path(split).resolve()
        name = path.name
    if name != TEST or not trained.raw_test:  # otherwise it is that of the run's own
        yield name
    longer = name
    for parent in path.parents:
        if parent.name and len(longer) < _LONGEST:
            yield (longer := f"{parent.name}-{longer}")
    yield from (f"{longer}-{number}" for number in count(2))


def _is_same_place(first: str, second: str) -> bool:
    if is_server(first) or is_server(second):
        return first == second
    return Path(first).resolve() == Path(second).resolve()


def _place_in(path: Path) -> str | None:
    """Where the samples of a file of metrics are; None where there is none that says so."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return values.get("data") if isinstance(values, dict) else None

"""The record of a run, read from its folder for its page. Missing and unreadable parts are named."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rowmesh._support.files.secrets import masked_values
from rowmesh.errors import RowmeshError
from rowmesh.observe.step_clock import STAGES
from rowmesh.report.timeline import Timeline, read_timeline
from rowmesh.report.traffic import Traffic, read_traffic
from rowmesh.run.run_folder import RunFolder
from rowmesh.run.score_bins import ScoreBins

Record = Mapping[str, Any]
"""A JSON object that a run wrote."""
Points = list[tuple[float, float]]
WARM_UP_SHARE = 0.1
DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that values which no run writes lead to."""
_MOST_STEPS = 1 << 62
RANKING = "ndcg@10"
"""The number by which sequence models are compared."""


@dataclass(frozen=True)
class Result:
    """The metrics of a split at the end.

    Attributes:
        split: its name, and that of the label where there are several.
        numbers: by name.
        optimum: the best that can be reached, where the data were planted.
        score_bins: of labels that are 0 or 1.
        floor: of sequences, what a ranking by popularity reaches.
        intervals: of sequences, 95 % intervals of the numbers.
    """

    split: str
    numbers: Mapping[str, float]
    optimum: Mapping[str, float]
    score_bins: ScoreBins | None
    floor: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def is_click(self) -> bool:
        """Whether the label is 0 or 1; one of several has its name behind that of the split."""
        return "rmse" not in self.numbers and not self.is_ranking

    @property
    def is_ranking(self) -> bool:
        """Whether items were ranked after sequences of events."""
        return RANKING in self.numbers


@dataclass(frozen=True)
class RunRecord:
    """A run.

    Attributes:
        name: of its folder.
        folder: where it is.
        config: the resolved configuration.
        environment: of its start.
        about: what it is made of.
        train: lines of `metrics.jsonl` about training, in order.
        evaluations: split → lines about it.
        results: of the evaluated splits, the test split first.
        traffic: what the counters add up to.
        timeline: what threads did in the last steps; None where that was not asked for.
        missing: what is missing and why, in sentences.
    """

    name: str
    folder: RunFolder
    config: Record = field(default_factory=dict)
    environment: Record = field(default_factory=dict)
    about: Record = field(default_factory=dict)
    train: Sequence[Record] = ()
    evaluations: Mapping[str, Sequence[Record]] = field(default_factory=dict)
    results: Sequence[Result] = ()
    traffic: Traffic = field(default_factory=Traffic)
    timeline: Timeline | None = None
    missing: Sequence[str] = ()

    def setting(self, key: str, default: Any = None) -> Any:
        """A key of the configuration, as in `train.epochs`."""
        values: Any = self.config
        for part in key.split("."):
            if not isinstance(values, Mapping) or part not in values:
                return default
            values = values[part]
        return values

    def series(self, name: str, split: str | None = None) -> Points:
        """(step, value) of a number, of training or of a split; lines without it are left out."""
        lines = self.train if split is None else self.evaluations.get(split, ())
        return [(line["step"], line[name]) for line in lines if _is_number(line.get(name))]

    def names(self, name: str, split: str) -> list[str]:
        """The series of a number of a split: itself, or one for each of several labels, as in `auc/click`."""
        keys = dict.fromkeys(key for line in self.evaluations.get(split, ()) for key in line)
        return [key for key in keys if key.partition("/")[0] == name]

    @property
    def steady(self) -> Sequence[Record]:
        """Lines of training without the first tenth, in which kernels are compiled and buffers grow."""
        skipped = int(len(self.train) * WARM_UP_SHARE + 0.999) if len(self.train) > 2 else 0
        return self.train[skipped:]

    def mean(self, name: str) -> float | None:
        """The mean of a number over the steady lines of training, weighted by steps; None where it was not recorded."""
        before = {line["step"]: previous["step"] for previous, line in pairwise(self.train)}
        weighed = [
            (line[name], line["step"] - before.get(line["step"], 0))
            for line in self.steady
            if _is_number(line.get(name))
        ]
        total = sum(weight for _, weight in weighed)
        return sum(value * weight for value, weight in weighed) / total if total else None

    @property
    def step_ms(self) -> dict[str, float]:
        """Milliseconds of a step by stage; empty where they were not recorded."""
        means = {stage: self.mean(f"step_ms/{stage}") for stage in STAGES}
        return {stage: value for stage, value in means.items() if value is not None}

    @property
    def steps(self) -> int:
        """Steps done."""
        return max((line["step"] for line in self.train), default=0)

    @property
    def ranks(self) -> int | None:
        """How many trained it."""
        found = self.about.get("ranks")
        return found if isinstance(found, int) else None

    @property
    def elapsed_s(self) -> float | None:
        """From the first record to the last; None where lines have no time."""
        stamps = [line["time"] for line in self.train if isinstance(line.get("time"), str)]
        start = self.about.get("started", stamps[0] if stamps else None)
        return (_moment(stamps[-1]) - _moment(start)).total_seconds() if stamps and start else None

    @property
    def memory_by_rank(self) -> list[float]:
        """Bytes that each rank used at last; empty where that was not recorded."""
        found = [line["memory_bytes_by_rank"] for line in self.train if line.get("memory_bytes_by_rank")]
        return list(found[-1]) if found else []


def read_run(folder: Path) -> RunRecord:
    """Reads what there is of a run, finished or not.

    Raises:
        RowmeshError: it is no run.
    """
    run, missing = RunFolder(folder), list[str]()
    if not run.config.exists() and not run.metrics.exists():
        raise RowmeshError(f"{folder} is no run: it has neither config.toml nor metrics.jsonl; give a run's folder")
    lines = list(_lines(run.metrics, missing))
    train = [line for line in lines if line.get("kind") == "train"]
    config = masked_values(_read(run.config, tomllib.loads, missing))
    evaluations: dict[str, list[Record]] = {}
    for line in lines:
        if line.get("kind") != "train":
            evaluations.setdefault(str(line.get("kind")), []).append(line)
    results = _results(run, _tested(config), missing)
    try:
        traffic = read_traffic(_lines(run.counters, missing))
    except DAMAGED as error:
        missing.append(f"{run.counters.name} {damaged_text(error)}")
        traffic = Traffic()
    record = RunRecord(
        name=folder.resolve().name,
        folder=run,
        config=config,
        environment=_read(run.environment, json.loads, missing),
        about=_read(run.about, json.loads, missing),
        train=train,
        evaluations=evaluations,
        results=results,
        traffic=traffic,
        timeline=read_timeline(run.trace, missing),
        missing=missing,
    )
    missing += _absent(record)
    return record


def damaged_text(error: Exception) -> str:
    """Why something cannot be shown.

    >>> damaged_text(KeyError("loss"))
    "holds what no run writes (KeyError: 'loss')"
    """
    return f"holds what no run writes ({type(error).__name__}: {str(error)[:200]})"


def _absent(record: RunRecord) -> Iterator[str]:
    """Yields a sentence on each part of the page that was not recorded."""
    if not record.train:
        yield "metrics.jsonl has no line about training: the run ended before train.log_every steps, or has just begun"
    if not record.results:
        yield "there is no evaluation: rowmesh evaluate makes one, and curves of it"


def _tested(config: Record) -> str:
    """The name of the test split in the metrics. For raw rows it is "test": there `data.test` is a place."""
    if not isinstance(data := config.get("data"), dict):
        return "test"
    return "test" if data.get("source") == "raw" else str(data.get("test", "test"))


def _results(run: RunFolder, first: str, missing: list[str]) -> list[Result]:
    paths = sorted(run.evaluations.glob("*.json"), key=lambda path: (path.stem != first, path.stem))
    found = []
    for path in paths:
        values = _read(path, json.loads, missing)
        try:
            found += _results_of(path, values, missing)
        except DAMAGED as error:
            missing.append(f"{path.name} {damaged_text(error)}")
    return found


def _results_of(path: Path, values: Record, missing: list[str]) -> list[Result]:
    """The results in a file: one, or one a label."""
    labels = values.get("labels")
    if isinstance(labels, dict):
        return [_of_label(path, str(name), each, missing) for name, each in labels.items()]
    numbers = {name: value for name, value in values.items() if _is_number(value)}
    if not numbers:
        return []
    bins, optimum = _score_bins(path, values, missing), _numbers(values.get("planted_optimum"))
    floor, intervals = _numbers(values.get("popularity")), _intervals(values.get("intervals"))
    return [Result(path.stem, numbers, optimum, bins, floor, intervals)]


def _numbers(values: object) -> dict[str, float]:
    """The numbers of a part of a file; not every task writes the part."""
    return {name: value for name, value in values.items() if _is_number(value)} if isinstance(values, dict) else {}


def _intervals(values: object) -> dict[str, list[float]]:
    found = values.items() if isinstance(values, dict) else ()
    pairs = {name: each for name, each in found if isinstance(each, list) and len(each) == 2}
    return {name: pair for name, pair in pairs.items() if all(map(_is_number, pair))}


def _of_label(path: Path, label: str, values: Record, missing: list[str]) -> Result:
    """The metrics of one of several labels."""
    numbers = {name: value for name, value in values.items() if _is_number(value)}
    return Result(f"{path.stem}, {label}", numbers, {}, _score_bins(path, values, missing))


def _score_bins(path: Path, values: Record, missing: list[str]) -> ScoreBins | None:
    try:
        return ScoreBins.from_plain(values["score_bins"]) if values.get("score_bins") else None
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        missing.append(f"{path.name}: score bins that cannot be read ({error}); evaluate the run again")
        return None


def _read(path: Path, parse: Any, missing: list[str]) -> dict[str, Any]:
    """A file that is one object; empty where it is not."""
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing.append(f"{path.name} is not there")
    except (OSError, ValueError, RecursionError) as error:
        missing.append(f"{path.name} cannot be read: {error}")
    else:
        if isinstance(values, dict):
            return values
        missing.append(f"{path.name} cannot be read: it is no object")
    return {}


def _lines(path: Path, missing: list[str]) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines, one after the other; what is no record is counted."""
    bad = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError):
                    record = None
                step = record.get("step") if isinstance(record, dict) else None
                if isinstance(record, dict) and isinstance(step, int) and 0 <= step < _MOST_STEPS:
                    yield record
                else:
                    bad += 1
    except FileNotFoundError:
        missing.append(f"{path.name} is not there")
    except OSError as error:
        missing.append(f"{path.name} cannot be read: {error}")
    if bad:
        missing.append(f"{path.name}: {bad:,} line(s) are no records and were left out")


def thinned(points: Points, most: int = 240) -> Points:
    """At most so many points: means of neighbours.

    >>> thinned([(1, 2.0), (2, 4.0), (3, 6.0), (4, 8.0)], most=2)
    [(1.5, 3.0), (3.5, 7.0)]
    """
    if len(points) <= most:
        return points
    bounds = [len(points) * i // most for i in range(most + 1)]
    parts = [points[low:high] for low, high in pairwise(bounds)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


def _is_number(value: object) -> bool:
    """Whether it is one that can be computed with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)

"""The grid of durability: runs of 30 steps, killed at every step, in every mode, on 1, 2 and 4 ranks, and resumed.

    python -m tests.durability --out grid.jsonl             # all; goes on where it was stopped
    python -m tests.durability --mode plain --ranks 2       # some
    python -m tests.durability --points --out points.jsonl  # killed while it starts, saves, takes another's place

In each case one rank is killed with SIGKILL at a point, the others are ended as by torchrun, and the run is resumed.
Its model must be that of a run which nothing disturbed, to the bit, and so must its logs. Each case is a line of JSON;
the exit status is 1 where one failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rowmesh.checkpoint.series import Series, verify
from tests.support.killed_runs import lines_of, model_of
from tests.support.lives import Lives
from tests.support.modes import MODES, NEED_RANKS, TRANSPORTS, counts_depend_on_life, options_of, prepare_job

NUM_STEPS = 30
EVERY = "checkpoint.every_steps=3"
LOGS = ("metrics.jsonl", "counters.jsonl")
Logs = Literal["numbers", "steps of counters", "steps"]
_PLACES = ("kind", "step", "group")
POINTS = [
    "mesh.connect",
    "data.open",
    "train.plan",
    "train.build",
    "train.built",
    "data.window",
    "engine.fetched@8",
    "engine.push@8",
    "evaluate.batch@2",
    *(f"checkpoint.{name}@2" for name in ("begin", "prepare", "write_rows", "write_dense", "sync", "publish")),
    "checkpoint.published@2",
    "checkpoint.prune",
    "run.saving",
    "run.settle",
    "evaluate.batch@9",
    "files.write@9",
]
RANK_0_ALONE = (
    *("begin", "prepare", "write_dense", "publish", "prune", "settle", "files.write", "resume.cut", "open"),
    *("exchange", "vacated", "former"),
)
RESUMING = ["resume.loaded", "resume.cut@1", "resume.cut@2"]
REPLACING = ["run.settle@2", "run.exchange@3", "run.vacated", "run.exchange@9", "run.exchanged", "run.former"]
"""While the run takes the place of another one."""


class Case(NamedTuple):
    """A run, and where it is killed."""

    mode: str
    ranks: int
    transport: str
    point: str
    victim: int

    @property
    def name(self) -> str:
        return f"{self.mode}/{self.ranks}/{self.transport}/{self.point},rank{self.victim}"

    @property
    def kind(self) -> str:
        """Of all cases with the same untouched run."""
        return f"{self.mode}-{self.ranks}-{self.transport}".replace(" ", "_").replace(",", "")


def cases(asked: argparse.Namespace) -> Iterator[Case]:
    """All that are asked for: of all modes some first, so that what is not run is a part of each.

    Every point is tried with one transport, in turns, before any is tried with the other.
    """
    points = list(enumerate([*POINTS, *RESUMING, *REPLACING] if asked.points else _spread(asked.steps)))
    for again in range(len(TRANSPORTS)):
        for number, point in points:
            for ranks, mode in itertools.product(asked.ranks, asked.mode or MODES):
                if ranks == 1 and (again or mode in NEED_RANKS):
                    continue
                transport = TRANSPORTS[(number + again) % len(TRANSPORTS)] if ranks > 1 else ""
                yield Case(mode, ranks, transport, *_point(point, number, _writers(mode, ranks, point)))


def _writers(mode: str, ranks: int, point: int | str) -> int:
    """Of how many ranks, the first ones, each comes to a point: of dynamic tables one replica group writes the rows."""
    is_of_first_group = str(point).startswith("checkpoint.write_rows") and "dynamic" in mode and "replicas" in mode
    return ranks // 2 if is_of_first_group else ranks


def _point(point: int | str, number: int, ranks: int) -> tuple[str, int]:
    """Where a run is killed, and which rank: each in turn."""
    if isinstance(point, int):
        return f"loop.step@{point}", point % ranks
    is_of_first = any(name in point for name in RANK_0_ALONE)
    return point, 0 if is_of_first else number % ranks


def _spread(steps: list[int]) -> list[int]:
    """Far ones first.

    >>> _spread([1, 2, 3, 4, 5, 6])
    [3, 6, 1, 4, 2, 5]
    """
    return sorted(steps, key=lambda step: step * 12 % 31)


class Grid:
    """Runs cases, several at a time.

    Args:
        folder: where runs are.
        evaluates: whether runs evaluate now and then.
    """

    def __init__(self, folder: Path, *, evaluates: bool) -> None:
        self._folder, self._lives = folder, Lives(prepare_job(folder))
        self._more = [EVERY, *(["train.eval_every=7"] if evaluates else [])]
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def run(self, case: Case) -> dict[str, Any]:
        """What came of a case: "problem" is empty where all is as it should be."""
        began_s, run = time.monotonic(), self._folder / f"run-{threading.get_ident()}"
        try:
            problem = self._problem(case, run)
        finally:
            for path in self._folder.glob(f"{run.name}*"):
                shutil.rmtree(path)
        return {"case": case.name, "problem": problem, "elapsed_s": round(time.monotonic() - began_s, 2)}

    def _problem(self, case: Case, run: Path) -> str:
        untouched = self._untouched(case)
        if untouched is None:
            return "the run that nothing disturbs fails"
        options = [*options_of(case.mode, case.ranks, run, case.transport), *self._more]
        first = f"{case.point},rank{case.victim}=kill"
        if case.point in REPLACING:
            if any((life := self._lives.train([*options, "train.seed=1"], ranks=case.ranks)).statuses):
                return f"the run that is to be replaced fails: {life}"
            options.append("--overwrite")
        if case.point in RESUMING:
            life = self._lives.train(options, f"loop.step@8,rank{case.victim}=kill", ranks=case.ranks)
        else:
            life = self._lives.train(options, first, ranks=case.ranks)
        if life.statuses[case.victim] != -9:
            return f"was not killed: {life}"
        if case.point in RESUMING:
            life = self._lives.train([*options, "--resume"], first, ranks=case.ranks)
            if life.statuses[case.victim] != -9:
                return f"was not killed while it resumed: {life}"
        series = Series(run / "checkpoints")
        for step in series.steps():
            verify(series.at(step))
        life = self._lives.train([*options, "--resume", "auto"], ranks=case.ranks)
        if any(life.statuses):
            return f"does not go on: {life}"
        logs = "numbers" if not counts_depend_on_life(case.mode) else "steps of counters"
        return differences(run, untouched, logs="steps" if case.mode == "exact replicas" else logs)

    def _untouched(self, case: Case) -> Path | None:
        with self._lock:
            lock = self._locks.setdefault(case.kind, threading.Lock())
        run = self._folder / f"untouched-{case.kind}"
        with lock:
            if not run.exists():
                options = [*options_of(case.mode, case.ranks, run, case.transport), *self._more]
                self._lives.train(options, ranks=case.ranks)
        return run if (run / "model").exists() else None


def differences(run: Path, untouched: Path, *, logs: Logs) -> str:
    """How the model and the logs of two finished runs differ; "" where they do not.

    Of logs `numbers` are compared; or of the counters the steps alone, where fast memory began empty; or of the metrics
    too, and no counters, where the ranks that were left went on.
    """
    found, expected = model_of(run), model_of(untouched)
    if found != expected:
        names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        return f"another model: {names[:5]}"
    for name in LOGS[: 1 if logs == "steps" else 2]:
        ours, theirs = lines_of(run, name), lines_of(untouched, name)
        if name == "metrics.jsonl" and logs == "steps of counters":  # it counts batches that were opened ahead
            for line in (*ours, *theirs):
                line.pop("hit_rate", None)
        if logs == "steps" or (name == "counters.jsonl" and logs == "steps of counters"):
            ours, theirs = ([{key: line.get(key) for key in _PLACES} for line in lines] for lines in (ours, theirs))
        if ours != theirs:
            pair = next((pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), "other lengths")
            return f"other lines of {name}: {pair}"
    left = sorted(path.name for path in {*run.iterdir()} if path.name not in {p.name for p in untouched.iterdir()})
    return f"left behind: {left}" if left else ""


def options() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", action="append", choices=list(MODES), help="of training; all by default")
    parser.add_argument("--ranks", type=int, action="append", help="1, 2 and 4 by default")
    parser.add_argument("--steps", type=int, nargs="*", default=list(range(1, NUM_STEPS + 1)), help="to be killed at")
    parser.add_argument("--points", action="store_true", help="kill at named points instead of steps")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--out", type=Path, help="a file of lines, to which a later call adds what is not there yet")
    asked = parser.parse_args()
    asked.ranks = asked.ranks or [1, 2, 4]
    return asked


def main() -> int:
    """Runs the grid."""
    asked, done = options(), dict[str, str]()
    if asked.out and asked.out.exists():
        lines = [json.loads(line) for line in asked.out.read_text().splitlines()]
        done = {line["case"]: line["problem"] for line in lines}
    todo = [case for case in cases(asked) if case.name not in done]
    num_failed = sum(map(bool, done.values()))
    with tempfile.TemporaryDirectory(prefix="rowmesh-grid-") as folder, ThreadPoolExecutor(asked.jobs) as pool:
        grid = Grid(Path(folder), evaluates=asked.points)
        for line in pool.map(grid.run, todo):
            num_failed += bool(line["problem"])
            write(line, asked.out)
    write({"cases": len(done) + len(todo), "failed": num_failed}, None)
    return int(num_failed > 0)


def write(line: dict[str, Any], out: Path | None) -> None:
    """Prints a line, and adds it to a file."""
    text = json.dumps(line) + "\n"
    sys.stdout.write(text)
    sys.stdout.flush()
    if out is not None:
        with out.open("a") as file:
            file.write(text)


if __name__ == "__main__":
    sys.exit(main())

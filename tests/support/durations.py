"""How long cases take, and which of them `make test` leaves to `make test-listed`.

    make durations    # runs both, and writes what it measured into tests/durations.txt

A line of that file is a case and how many seconds it took, on idle cores and with kernels that were compiled before. It
holds the cases that take over LIMIT_S. These are listed: they run in `make test-listed`. But the fastest case of a test
function runs in `make test`, unless that takes over ALONE_S. A case that was not measured yet takes `inf`, so it is
listed.

Where each case compiles kernels, in a fresh clone that is what takes long. Such a test function is marked `compiles`:
in `make test` run as many of its cases as have each value of each parameter once, and the others are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "durations.txt"
COLLECTED = pytest.StashKey[frozenset[str]]()
"""The cases of a session before some are chosen by their marks."""
LIMIT_S = 0.3
ALONE_S = 1.5


@cache
def measured() -> Mapping[str, float]:
    """Case, as pytest writes it → seconds."""
    return read(FILE.read_text())


def read(text: str) -> dict[str, float]:
    """What `written` made a text of."""
    lines = (line.split(" ", 1) for line in text.splitlines())
    return {case: float(seconds) for seconds, case in lines}


def written(durations: Mapping[str, float]) -> str:
    """A line a case that takes over LIMIT_S, in the order of their names."""
    rounded = {case: round(seconds, 1) for case, seconds in sorted(durations.items())}
    return "".join(f"{seconds} {case}\n" for case, seconds in rounded.items() if seconds > LIMIT_S)


def listed(cases: Iterable[str], durations: Mapping[str, float]) -> set[str]:
    """Which of all cases `make test` leaves out."""
    found: set[str] = set()
    for _, group in groupby(sorted(cases, key=function_of), key=function_of):
        of_function = list(group)
        fastest = min(of_function, key=lambda case: (durations.get(case, 0.0), case))
        for case in of_function:
            if durations.get(case, 0.0) > (ALONE_S if case == fastest else LIMIT_S):
                found.add(case)
    return found


def function_of(case: str) -> str:
    """The test function of a case."""
    return case.partition("[")[0]


def surplus(values: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Cases without which each value of each parameter still occurs.

    Args:
        values: of the cases of one test function: parameter → value.
    """
    left = {case: {(name, repr(value)) for name, value in values[case].items()} for case in values}
    while left:
        best = max(left, key=lambda case: len(left[case]))  # the first of equals
        new = left.pop(best)
        if not new:
            return {best, *left}
        left = {case: others - new for case, others in left.items()}
    return set()


def gone(collected: Iterable[str], durations: Mapping[str, float]) -> list[str]:
    """Cases that are in no test file any more; of those that were not collected it is known where the file is gone."""
    cases = set(collected)
    files = {file_of(case) for case in cases}
    return [
        case
        for case in sorted(durations)
        if (file_of(case) in files and case not in cases) or not (ROOT / file_of(case)).exists()
    ]


def file_of(case: str) -> str:
    """The file of a case, below ROOT."""
    return case.partition("::")[0]


class Stopwatch:
    """A plugin that adds up how long each case takes, with its fixtures.

    Args:
        writes: whether they replace what the file has of the test files that ran; else the end of the session names
            cases that take long and are not in it.
    """

    def __init__(self, writes: bool) -> None:
        self._writes, self._seconds, self._unknown = writes, dict[str, float](), set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a phase of a case: those of other processes arrive here, too."""
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed or "slow" in report.keywords:
            self._unknown.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Writes the file, or says what it lacks."""
        new = {case: seconds for case, seconds in self._seconds.items() if case not in self._unknown}
        if self._writes:
            replaced = {file_of(case) for case in self._seconds} | {file_of(case) for case in gone((), measured())}
            kept = {
                case: seconds
                for case, seconds in measured().items()
                if case in self._unknown or file_of(case) not in replaced
            }
            FILE.write_text(written(kept | new))
            terminalreporter.write_line(f"{FILE} has {len(read(FILE.read_text()))} cases")
            return
        for case, seconds in sorted(new.items()):
            if seconds > ALONE_S and case not in measured():
                terminalreporter.write_line(f"{seconds:.1f} s, not in {FILE.name} (`make durations`): {case}")

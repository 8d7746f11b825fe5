"""Which cases are listed, what is written of them, and that the file names cases that there are."""

from types import SimpleNamespace

import pytest

from tests.support import durations
from tests.support.durations import (
    ALONE_S,
    COLLECTED,
    FILE,
    LIMIT_S,
    Stopwatch,
    gone,
    listed,
    measured,
    read,
    surplus,
    written,
)

LITTLE, MUCH, TOO_MUCH = LIMIT_S / 2, LIMIT_S * 2, ALONE_S * 2


def test_the_file_names_cases_that_there_are(request):
    """Of the files that this session has collected: all of them in `make test`."""
    config = request.config
    if config.getoption("measure") or any("::" in argument for argument in config.args):
        pytest.skip("the file is about to be written, or cases were asked for by name")
    missing = gone(config.stash[COLLECTED], measured())
    message = f"{FILE.name} names cases that are gone; give them their new names, or remove their lines:"
    assert not missing, "\n".join([message, *missing])


def test_the_file_is_as_it_is_written():
    assert FILE.read_text() == written(measured())


@pytest.mark.parametrize(
    "seconds, expected",
    [
        ({"a": TOO_MUCH}, {"a"}),
        ({"a": MUCH}, set()),
        ({"a[1]": MUCH, "a[2]": MUCH + 1}, {"a[2]"}),
        ({"a[1]": MUCH, "a[2]": LITTLE, "a[3]": LITTLE}, {"a[1]"}),
        ({"a[1]": MUCH, "a[2]": MUCH}, {"a[2]"}),
        ({"a[1]": TOO_MUCH, "a[2]": TOO_MUCH, "b[1]": MUCH}, {"a[1]", "a[2]"}),
    ],
)
def test_a_function_keeps_its_fastest_case(seconds, expected):
    assert listed([*seconds, "c"], seconds) == expected


def test_each_value_is_in_a_case():
    values = {f"a[{dim}-{dtype}]": {"dim": dim, "dtype": dtype} for dim in (1, 2, 3) for dtype in ("x", "y")}
    left_out = surplus(values)
    assert left_out == {"a[1-y]", "a[2-x]", "a[3-y]"}
    assert surplus({case: values[case] for case in values if case not in left_out}) == set()


def test_cases_that_are_gone_are_named_where_their_file_was_collected():
    here, other = "tests/support/test_durations.py", "tests/conftest.py"
    known = dict.fromkeys([f"{here}::a", f"{here}::b[2]", f"{other}::c", "tests/none.py::d"], 1.0)
    assert gone([f"{here}::a", f"{here}::b[1]"], known) == ["tests/none.py::d", f"{here}::b[2]"]


def report_of(case, seconds, passed=True, keywords=()):
    return SimpleNamespace(nodeid=case, duration=seconds, passed=passed, keywords=keywords)


RAN, OTHER = "tests/support/test_durations.py", "tests/conftest.py"
FORMER = {f"{RAN}::gone": 9.0, f"{RAN}::is skipped": 8.0, f"{RAN}::was slower": 7.0, f"{OTHER}::c": 6.0}


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "durations.txt"
    path.write_text(written(FORMER))
    monkeypatch.setattr(durations, "FILE", path)
    monkeypatch.setattr(durations, "measured", lambda: read(path.read_text()))
    return path


REPORTS = [
    report_of(f"{RAN}::a b[1 2]", LIMIT_S),
    report_of(f"{RAN}::a b[1 2]", ALONE_S),
    report_of(f"{RAN}::was slower", LIMIT_S / 2),
    report_of(f"{RAN}::is skipped", 0.0, passed=False),
    report_of(f"{RAN}::is slow", 50.0, keywords=("slow",)),
]


def summary_of(writes):
    watch, lines = Stopwatch(writes), []
    for report in REPORTS:
        watch.pytest_runtest_logreport(report)
    watch.pytest_terminal_summary(SimpleNamespace(write_line=lines.append))
    return lines


def test_what_ran_is_written(file):
    """What was skipped keeps its time, what is gone leaves, and so does what is fast."""
    file.write_text(written(FORMER | {"tests/none.py::d": 5.0}))
    assert summary_of(writes=True) == [f"{file} has 3 cases"]
    expected = {f"{RAN}::a b[1 2]": LIMIT_S + ALONE_S, f"{RAN}::is skipped": 8.0, f"{OTHER}::c": 6.0}
    assert read(file.read_text()) == expected


def test_a_slow_case_that_is_not_in_the_file_is_named(file):
    (line,) = summary_of(writes=False)
    assert line.endswith(f"{RAN}::a b[1 2]")
    assert read(file.read_text()) == FORMER

"""Mutations find their lines; `python -m tests.mutations` runs them, which takes long."""

import pytest

from tests import mutations
from tests.mutations import MUTATIONS, ROOT, Mutation, outcome


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_breaks_one_line_of_python(mutation):
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, f"{mutation.file} has changed: move the mutation along with it"
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    assert all((ROOT / name).exists() for name in mutation.tests.split())


def test_names_differ():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize(
    "statuses, expected",
    [
        ([1], "killed"),
        ([0, 1], "killed"),  # by what is run before a change lands alone
        ([0, 0], "survived"),
        ([0, 5], "survived"),  # no such cases
        ([5, 5], "survived"),
        ([2], "error: pytest ended with 2"),
    ],
)
def test_a_mutation_is_killed_by_tests_and_else_by_listed_cases(tmp_path, monkeypatch, statuses, expected):
    (tmp_path / "sum.py").write_text("a + b")
    seen = []

    def run(marks, tests, folder):
        seen.append((marks, (folder / "sum.py").read_text()))
        return statuses[len(seen) - 1]

    monkeypatch.setattr(mutations, "_run", run)
    assert outcome(Mutation("sum", "sum.py", "+", "-", "tests"), tmp_path) == expected
    assert seen == [("not slow", "a - b"), ("listed", "a - b")][: len(statuses)]
    assert (tmp_path / "sum.py").read_text() == "a + b"


def test_a_line_that_is_gone_is_an_error(tmp_path):
    (tmp_path / "sum.py").write_text("a + b + c")
    assert outcome(Mutation("sum", "sum.py", "+", "-", "tests"), tmp_path) == "error: sum.py has the line 2 times"

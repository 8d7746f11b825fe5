import io
import re

import pytest
from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.text import Text

from rowmesh.placement.comparison import compare
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology
from rowmesh.report.plan_text import Printer
from rowmesh.report.printing import show, table_of_numbers
from tests.placement.problems import mlperf, problem

HEADS = ("memory (balance)", "look-ups (balance)", "bytes a step", "accesses", "cost")


def shown(width, is_terminal=True, count=3):
    stream = io.StringIO()
    table = table_of_numbers("strategy", *HEADS * count, box=HEAVY_HEAD if is_terminal else None)
    for name in ("partitioned", "[dealt]"):
        table.add_row(Text(name), *("26.2 kB (0.987)", "1,281 (0.984)", "1.19 MB", "100 %", "9 µs") * count)
    show(Console(file=stream, width=width, force_terminal=is_terminal, color_system=None), table)
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_too_wide_for_a_terminal_comes_in_parts_without_broken_words(width):
    text = shown(width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    assert text.count("accesses") == 3
    parts = text.count("strategy")
    assert parts > 1
    assert text.count("partitioned") == text.count("[dealt]") == parts
    assert text.count("1,281") == 6


def test_a_table_that_fits_stays_whole():
    assert shown(120, count=1).count("strategy") == 1


def test_where_there_is_no_terminal_a_table_is_as_wide_as_it_must_be():
    text = shown(40, is_terminal=False)
    assert text.count("strategy") == 1
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_a_plan_fits_a_terminal(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    Printer().print(compare(problem(Topology.load("2x4"), mode="infer", extra_memory=0.1)), "clicks")
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    tables = [line for line in text.splitlines() if line[:1] in "┏┃┡│└"]
    assert tables
    assert max(map(len, tables)) <= width
    assert "…" not in text


def test_a_plan_says_which_tables_send_sums(capsys):
    comparison = compare(Problem(mlperf("auto"), Topology.uniform(8), Request(batch_size=512)), "cyclic")
    Printer().print(comparison, "clicks")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("12 of 26 tables send sums: the busiest rank has 8.53 MB a step") for line in lines)
    assert any(line.endswith("for copies; beside tables that send sums") for line in lines)
    sends = {line.split()[0]: line.split()[-1] for line in lines if re.match(r" *t\d+ ", line)}
    assert sends == {table.name: table.send for table in comparison.plan.tables}
    Printer().print(compare(problem(), "cyclic"), "clicks")
    assert "sends" not in capsys.readouterr().out

"""What comes from data and names reaches a terminal as text."""

import ast
import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

import rowmesh
from rowmesh._support.files.printable import PrintableFormatter, printable, say
from rowmesh.cli.__main__ import main
from rowmesh.observe.progress import PartsProgress
from rowmesh.report.printing import show, table_of_numbers, write

HOSTILE = "\x1b]0;owned\x07\r\nrowmesh: error: all is lost\x9b31m\u202e\x7f[/b][red]"
ROOT = Path(rowmesh.__file__).parent


def is_clean(text):
    return not any(each in text for each in "\x1b\x07\r\x9b\x7f\u202e") and "\nrowmesh: error: all" not in text


@pytest.mark.parametrize("text", ["plain", "ü × → 日本", "a\u200db"])
def test_text_stays(text):
    assert printable(text) == text


def test_every_way_to_print_is_clean(capsys):
    out = io.StringIO()
    console = Console(file=out, width=200)
    write(console, HOSTILE)
    table = table_of_numbers("name " + HOSTILE, "x")
    table.add_row(HOSTILE, "1")
    show(console, table)
    with PartsProgress(console) as progress:
        progress(HOSTILE, 1.0)
    assert is_clean(out.getvalue())
    assert out.getvalue().count("[/b][red]") >= 3, "brackets are text"
    say(HOSTILE)
    assert printable(HOSTILE, lines=True).count("\n  rowmesh") == 1
    record = logging.LogRecord("rowmesh", 30, "", 0, "%s", (HOSTILE,), None)
    assert is_clean(PrintableFormatter().format(record))
    assert is_clean(capsys.readouterr().out)


def test_an_error_of_a_command_is_clean(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / HOSTILE)])
    err = capsys.readouterr().err
    assert "rowmesh: error:" in err
    assert is_clean(err)


def test_nothing_is_printed_elsewhere():
    """`print` and `Console.print` are called in the places that escape."""
    allowed = {"_support/files/printable.py", "observe/progress.py", "report/printing.py", "cli/__main__.py"}
    for path in ROOT.rglob("*.py"):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if "print(" not in text and ".write(" not in text:
            continue
        calls = [
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("print", "stdout.write", "stderr.write"))
        ]
        printing = [
            call
            for call in calls
            if call in ("print", "console.print", "self._console.print", "sys.stdout.write", "sys.stderr.write")
        ]
        assert not printing or name in allowed, (name, printing)

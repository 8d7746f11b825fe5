import io
import re

import pytest
from rich.console import Console

from rowmesh.observe.progress import PartsProgress, Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    with Progress(3, stream=stream, interval_s=0.0) as progress:
        progress.write("transport: [collective]")
        for step in (1, 2, 3):
            progress.update(step, loss=0.5 / step, samples_per_s=12345.6, memory_bytes=3.21e9)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "transport: [collective]"
    assert len(lines) == 4
    expected = r"train step 2/3, loss 0.2500, 12,346 samples/s, 3\.21 GB, \d+ s left"
    assert re.fullmatch(expected, lines[2])


def test_the_time_left_is_that_of_steps_since_the_first(monkeypatch):
    """Of a resumed run, whose set-up took as long as ten steps."""
    stream, now_s = io.StringIO(), [100.0]
    monkeypatch.setattr("rowmesh.observe.progress.time.perf_counter", lambda: now_s[0])
    with Progress(1000, stream=stream, interval_s=0.0) as progress:
        now_s[0] += 20.0
        for step in (901, 902, 911):
            now_s[0] = 120.0 + 2.0 * (step - 901)
            progress.advance(step)
    assert stream.getvalue().splitlines() == [
        "train step 901/1000",
        "train step 902/1000, 196 s left",
        "train step 911/1000, 178 s left",
    ]


def test_plain_lines_come_once_an_interval_and_at_the_end():
    stream = io.StringIO()
    with Progress(50, stream=stream, interval_s=1000.0) as progress:
        for step in range(1, 51):
            progress.advance(step)
            progress.update(step, loss=0.5, samples_per_s=1.0, memory_bytes=1e9)
    assert len(stream.getvalue().splitlines()) == 1


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    with Progress(2, stream=stream) as progress:
        progress.update(2, loss=0.25, samples_per_s=1000.0, memory_bytes=1e9)
    assert "2/2" in stream.getvalue()
    assert "loss 0.2500, 1,000 samples/s" in stream.getvalue()


@pytest.mark.parametrize("columns, facts", [(60, 1), (80, 3), (120, 4)])
def test_step_and_time_left_are_whole_however_narrow_the_terminal(monkeypatch, columns, facts):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("rowmesh.observe.progress.BAR_INTERVAL_S", 1000.0)
    stream = Terminal()
    with Progress(20_000, stream=stream) as progress:
        progress.update(12_345, loss=0.45123, samples_per_s=91_234.0, memory_bytes=2.31e9, exposed_share=0.12)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    last = [line for line in re.split(r"[\r\n]+", shown) if line.strip()][-1]
    assert len(last) <= columns
    names = ["loss 0.4512", "91,234 samples/s", "2.31 GB", "12% exposed"]
    assert re.fullmatch(rf"train \S+ 12345/20000 {', '.join(names[:facts])} +\S+ left *", last)


def test_every_step_moves_it(monkeypatch):
    stream = io.StringIO()
    with Progress(9, stream=stream, interval_s=0.0) as progress:
        progress.advance(1)
        progress.update(2, loss=0.25, samples_per_s=1000.0, memory_bytes=1e9)
        progress.advance(3)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "train step 1/9", "one step says nothing of those to come"
    assert re.fullmatch(r"train step 3/9, loss 0.2500, 1,000 samples/s, 1.00 GB, \d+ s left", lines[2])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("rowmesh.observe.progress.BAR_INTERVAL_S", 0.0)
    stream = Terminal()
    with Progress(9, stream=stream) as progress:
        progress.advance(4)
        monkeypatch.setattr("rowmesh.observe.progress.BAR_INTERVAL_S", 1000.0)
    assert "4/9" in stream.getvalue()
    stream = Terminal()
    with Progress(9, stream=stream) as progress:
        progress.advance(8)
        progress.advance(9)
    assert "8/9" not in stream.getvalue(), "too soon"
    assert "9/9" in stream.getvalue(), "the end is always shown"


def test_other_ranks_are_silent():
    stream = io.StringIO()
    with Progress(1, stream=stream, enabled=False) as progress:
        progress.write("hello")
        progress.advance(1)
        progress.update(1, loss=0.5, samples_per_s=1.0, memory_bytes=1e9)
    assert stream.getvalue() == ""


def test_parts_say_how_much_is_done_now_and_then():
    stream = io.StringIO()
    with PartsProgress(Console(file=stream), interval_s=0.0) as show:
        show("reading", 0.254)
        show("[writing]", 1.0)
    assert stream.getvalue() == "reading: 25%\n[writing]: 100%\n"
    stream = io.StringIO()
    with PartsProgress(Console(file=stream), interval_s=1000.0) as show:
        show("reading", 1.0)
    assert stream.getvalue() == ""


def test_parts_have_a_bar_each_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("rowmesh.observe.progress.BAR_INTERVAL_S", 1000.0)
    stream = Terminal()
    with PartsProgress(Console(file=stream)) as show:
        for what in ("reading", "writing"):
            show(what, 0.5)
            show(what, 1.0)
    assert "50%" not in stream.getvalue(), "too soon"
    assert re.search(r"reading .*100%[^\n]*\n.*writing .*100%", stream.getvalue())

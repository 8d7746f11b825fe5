import io
import re

from rowmesh.observe import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    with Progress(3, stream=stream, interval_s=0.0) as progress:
        progress.say("transport: [collective]")
        for step in (1, 2, 3):
            progress.update(step, loss=0.5 / step, samples_per_s=12345.6)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "transport: [collective]"
    assert len(lines) == 4
    expected = r"train step 2/3, loss 0.2500, 12,346 samples/s, \d+\.\d\d GB on rank 0, \d+ s left"
    assert re.fullmatch(expected, lines[2])


def test_plain_lines_come_once_an_interval_and_at_the_end():
    stream = io.StringIO()
    with Progress(50, stream=stream, interval_s=1000.0) as progress:
        for step in range(1, 51):
            progress.update(step, loss=0.5, samples_per_s=1.0)
    assert len(stream.getvalue().splitlines()) == 1


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    with Progress(2, stream=stream) as progress:
        progress.update(2, loss=0.25, samples_per_s=1000.0)
    assert "2/2" in stream.getvalue()
    assert "loss 0.2500, 1,000 samples/s" in stream.getvalue()


def test_other_ranks_are_silent():
    stream = io.StringIO()
    with Progress(1, stream=stream, enabled=False) as progress:
        progress.say("hello")
        progress.update(1, loss=0.5, samples_per_s=1.0)
    assert stream.getvalue() == ""

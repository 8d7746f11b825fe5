import contextlib
import json
import math
import os
import resource
import signal
from pathlib import Path

import pytest

from rowmesh._support.json_lines import JsonLines, cut_after


def test_lines_are_on_disk_at_once_and_are_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write(step=1, loss=0.5)
        lines.write(step=2, loss=math.nan, lr=math.inf)
        records = [json.loads(line, parse_constant=None) for line in path.read_text().splitlines()]
    assert records == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None, "lr": None}]


@contextlib.contextmanager
def room(num_bytes):
    """Lets no file of this process be longer: what goes beyond is written in part, then refused, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_lines_without_room_are_counted_and_never_there_in_part(tmp_path):
    path, said = tmp_path / "metrics.jsonl", []
    with JsonLines(path, said.append) as lines:
        with room(100):
            for step in range(10):
                lines.write(step=step, loss=0.25)
            assert len(said) == 1
            assert path.read_text().endswith("}\n"), "no half line"
        lines.write(step=10, loss=0.25)
        with room(100):
            lines.write(step=11, loss=0.25)
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [0, 1, 2, 10]
    assert [text.replace(str(path), "FILE") for text in said] == [
        "cannot write FILE: File too large; training goes on without, until it can be",
        "FILE can be written again; 7 records before are lost",
        "cannot write FILE: File too large; training goes on without, until it can be",
        "FILE: the last 1 records could not be written and are lost",
    ]


def test_a_part_that_cannot_be_removed_is_overwritten(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path, lambda text: None) as lines:
        lines.write(step=1)
        with room(15), monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
            lines.write(step=2)
        lines.write(step=3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_what_is_lost_is_logged_where_nobody_else_is_told(caplog):
    with JsonLines(Path("/dev/full")) as lines:
        lines.write(step=1)
    assert "cannot write /dev/full: No space left on device" in caplog.messages[0]


def test_without_a_path_nothing_is_written():
    with JsonLines(None) as lines:
        lines.write(step=1)


def test_lines_after_a_step_are_cut_off_and_others_follow(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        for step in (1, 2, 2, 3, 5):
            lines.write(step=step)
    with path.open("a") as file:
        file.write('{"step": 7')  # the process ended here
    cut_after(path, 2)
    with JsonLines(path, goes_on=True) as lines:
        lines.write(step=4)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 2, 4]
    cut_after(path, 9)
    assert len(path.read_text().splitlines()) == 4
    cut_after(path, 0)
    assert path.read_text() == ""
    cut_after(path, 0)
    cut_after(tmp_path / "none.jsonl", 3)

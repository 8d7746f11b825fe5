"""Waiting that signals interrupt, and standing still does not count in."""

import signal
import threading

import pytest

from rowmesh.mesh import interruptible
from rowmesh.mesh.interruptible import Stopwatch, run_interruptibly


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(interruptible, "time", clock)
    return clock


def test_what_a_process_could_not_use_does_not_count(clock):
    watch = Stopwatch(look_s=1.0)
    clock.now += 1.5
    assert watch.read() == 1.5
    clock.now += 26.0  # stopped and continued
    assert watch.read() == 2.5
    clock.now += 0.5
    assert watch.read() == 3.0
    assert str(watch) == "3.0 s, and stood still (stopped or asleep) for 25 s"


def test_results_and_errors_of_a_call():
    assert run_interruptibly(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        run_interruptibly(lambda: 1 // 0)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_a_signal_ends_the_waiting():
    """As SIGTERM does, which a command answers by an exception."""
    started, never = threading.Event(), threading.Event()

    def block():
        started.set()
        never.wait()

    def interrupt():
        if started.is_set():
            signal.raise_signal(signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            run_interruptibly(block, interrupt)
    finally:
        never.set()


def test_what_waits_where_the_system_has_no_thread_left(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert run_interruptibly(lambda: 5) == 5

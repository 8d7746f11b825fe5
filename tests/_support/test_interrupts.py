"""Ctrl-C waits until an act has ended, and a loop that catches it goes on with whole steps."""

import json
import signal
import subprocess
import sys
import threading

import pytest
import torch

from rowmesh import SGD, EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh._support import interrupts
from rowmesh._support.faults import arm
from rowmesh._support.gate import Gate

pytestmark = pytest.mark.usefixtures("heeds_ctrl_c")  # in a shell's background job too


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_raised_when_the_act_ends():
    handler, done = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        interrupts.hold()
        interrupts.hold()
        interrupt()
        done.append("inner")
        interrupts.release()
        done.append("outer")
        interrupts.release()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_without_ctrl_c_nothing_is_left():
    handler = signal.getsignal(signal.SIGINT)
    interrupts.hold()
    interrupts.release()
    interrupts.release()  # of what did not begin
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_second_ctrl_c_interrupts_at_once(monkeypatch):
    monkeypatch.setattr(interrupts, "_IMPATIENT_S", 0.0)
    interrupts.hold()
    try:
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    finally:
        with pytest.raises(KeyboardInterrupt):
            interrupts.release()


def test_other_threads_hold_nothing():
    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupts.hold)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("kind", ["reading", "writing"])
def test_a_gate_is_left_whatever_comes(kind):
    gate = Gate()
    with pytest.raises(KeyboardInterrupt), getattr(gate, kind):
        interrupt()
    with gate.writing:
        pass


@pytest.mark.parametrize("storage", ["dense", "tiered"])
def test_a_plain_loop_that_catches_ctrl_c_goes_on_with_whole_steps(storage):
    command = [sys.executable, "-m", "tests.support.floods", storage]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["interrupts"] > 5
    assert found["steps"] > 5
    assert found["difference"] < 1e-3 * found["steps"]


def test_rates_count_and_completion_of_a_step_are_one_act():
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=5, dim=4, optimizer=SGD(lr=1.0))])
    optimizer = EmbeddingOptimizer(embeddings)
    batch = SparseBatch.from_bags({"item": [[1]]})
    before = embeddings(batch).values.detach().clone()
    embeddings(batch).values.sum().backward()
    with pytest.raises(KeyboardInterrupt), arm(point="engine.push", action=interrupt):
        optimizer.step()
    assert embeddings.step_count == 1
    optimizer.step()  # has no gradients left
    torch.testing.assert_close(embeddings(batch).values, before - 1.0)

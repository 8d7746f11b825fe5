"""Ctrl-C while something is waited for that is written beside training: it is written on, and waited for again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

import rowmesh
from rowmesh import Checkpoints, EmbeddingCollection, TableSpec
from rowmesh._support.faults import arm
from rowmesh._support.worker import Worker
from rowmesh.checkpoint import save
from rowmesh.checkpoint.series import Series
from tests.support.interrupts import interrupted

pytestmark = pytest.mark.usefixtures("heeds_ctrl_c")  # in a shell's background job too

PATIENCE_S = 60.0


def filled(value):
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=50, dim=4)])
    for piece in embeddings.held_rows("item"):
        piece.values.fill_(value)
    return embeddings


def rows_of(embeddings):
    return torch.cat([piece.values.clone() for piece in embeddings.held_rows("item")])


@contextmanager
def held_writer():
    """The thread that writes stands still until the event that this gives is set."""
    goes_on = threading.Event()

    def hold():
        assert goes_on.wait(PATIENCE_S)

    with arm(point="snapshot.read", action=hold):
        try:
            yield goes_on
        finally:
            goes_on.set()


def test_a_model_that_is_still_written_is_not_said_to_be_done(tmp_path):
    folder = tmp_path / "model"
    with held_writer() as goes_on:
        saving = rowmesh.async_save(folder, {"embeddings": filled(1.0)})
        with interrupted():
            saving.wait()
        assert not saving.is_done
        assert not saving.wait(0.01)
        assert not (folder / "manifest.json").exists()
        goes_on.set()
        assert saving.wait()
    assert (folder / "manifest.json").exists()


@pytest.mark.parametrize("kind", ["async_save", "Checkpoints"])
def test_rows_are_not_set_while_they_are_written(tmp_path, kind):
    embeddings, other = filled(1.0), filled(3.0)
    save(tmp_path / "other", other, {})
    series = Series(tmp_path / "series")
    with held_writer() as goes_on, Checkpoints(series.folder, {"embeddings": embeddings}, asynchronous=True) as loop:
        if kind == "Checkpoints":
            loop.write(1)
        else:
            rowmesh.async_save(series.at(1), {"embeddings": embeddings})
        for _ in range(2):
            with interrupted():
                rowmesh.load(tmp_path / "other", {"embeddings": embeddings})
        assert rows_of(embeddings).eq(1.0).all()
        timer = threading.Timer(0.2, goes_on.set)
        timer.start()
        rowmesh.load(tmp_path / "other", {"embeddings": embeddings})
        timer.join()
    assert rows_of(embeddings).eq(3.0).all()
    rowmesh.load(series.at(1), {"embeddings": embeddings})
    assert rows_of(embeddings).eq(1.0).all()


def test_a_loop_that_goes_on_waits_for_its_checkpoint(tmp_path):
    with held_writer() as goes_on, Checkpoints(tmp_path, {"embeddings": filled(1.0)}, asynchronous=True) as checkpoints:
        checkpoints.write(1)
        for call in (checkpoints.wait, lambda: checkpoints.write(2)):
            with interrupted():
                call()
        timer = threading.Timer(0.2, goes_on.set)
        timer.start()
        checkpoints.write(3)
        timer.join()
    assert Series(tmp_path).steps() == [1, 3]


@pytest.mark.parametrize("name", ["rowmesh checkpoint", "rowmesh checkpoint, reading"])
def test_a_save_that_is_interrupted_while_it_begins_writes_nothing(tmp_path, monkeypatch, name):
    embeddings, start, begun = filled(1.0), Worker.start, []

    def interrupt(worker):
        start(worker)
        if worker.name == name:
            begun.append(worker)
            raise KeyboardInterrupt

    with arm(point="snapshot.read", action=lambda: time.sleep(0.2)), monkeypatch.context() as patch:
        patch.setattr(Worker, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rowmesh.async_save(tmp_path / "model", {"embeddings": embeddings})
    begun[0].join()
    assert not (tmp_path / "model").exists()
    assert rowmesh.async_save(tmp_path / "model", {"embeddings": embeddings}).wait()


INTERRUPTED = """
import signal, threading, time
import rowmesh
from rowmesh._support.faults import arm
embeddings = rowmesh.EmbeddingCollection([rowmesh.TableSpec(name="item", num_rows=50, dim=4)])
with arm(point="snapshot.read", action=lambda: time.sleep(1.5)):
    saving = rowmesh.async_save({folder!r}, {{"embeddings": embeddings}})
    threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
    try:
        saving.wait()
    except KeyboardInterrupt:
        print("interrupted", saving.is_done)
"""


def test_a_program_that_ends_after_ctrl_c_waits_for_what_it_began_to_save(tmp_path):
    script = INTERRUPTED.format(folder=str(tmp_path / "model"))
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "interrupted False\n"
    rowmesh.load(tmp_path / "model", {"embeddings": filled(2.0)})

"""What a checkpoint costs the steps beside which it is written, and how fast it is written.

    python -m benchmarks.checkpoint --stall --megabytes 4000 --dim 64 --folder /tmp
    python -m benchmarks.checkpoint --stall --megabytes 4000 --dim 64 --folder /tmp --skewed --layers 512,512,256

Steps of one table with row-wise AdaGrad and a network of two layers; ids are uniform, which is the worst for
pre-images. With `--skewed` they have the frequencies of `--zipf`, and `--layers` makes the network larger, so that a
step is one of a model. In turns, each after steps alone: with a checkpoint in the background, with one that has no
memory for copies ahead of the disk, with torch.distributed.checkpoint's `async_save` of the same rows and states, whose
copy of all of them the first step waits for, and with a thread that does no more than write a file of as many bytes,
which no way to write beside steps can be cheaper than, but for one that passes the page cache. `stall` is the time in
which no step runs, before the writing thread has all it needs; `lost` is all that a checkpoint costs the steps beside
it, by the clock and of the processor: a slow one costs each step less, and more of them. Rates are beside such a file,
synced in the same round. Memory for copies is new to the process in the first round, which counts for itself.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from benchmarks.command import Options, Report
from benchmarks.workload import Zipf
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, TableSpec, checkpoint
from rowmesh.checkpoint.background import BackgroundSave
from rowmesh.checkpoint.room import Room
from rowmesh.observe.allocator import keep_memory
from rowmesh.sparse import SparseBatch

IDS = 20
CHUNK_BYTES = 4 << 20


class Training:
    """Steps on uniform ids, or on those of a law."""

    def __init__(
        self,
        num_rows: int,
        dim: int,
        batch_size: int,
        seed: int,
        layers: Sequence[int] = (256,),
        law: Zipf | None = None,
    ) -> None:
        self.embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=num_rows, dim=dim)])
        self._optimizer = EmbeddingOptimizer(self.embeddings)
        # Kept from one checkpoint to the next, as `rowmesh train` does.
        self.room, self.room_without_copies = Room(), Room(copy_bytes=0)
        widths = [dim, *layers]
        hidden = [torch.nn.Sequential(torch.nn.Linear(*pair), torch.nn.ReLU()) for pair in pairwise(widths)]
        self._network = torch.nn.Sequential(*hidden, torch.nn.Linear(widths[-1], 1))
        self._law = law
        self._draw, self._num_rows, self._batch_size = np.random.default_rng(seed), num_rows, batch_size

    def step(self) -> tuple[float, float]:
        """Seconds of one step: by the clock, and of this thread on a processor, which other work disturbs less."""
        size = IDS * self._batch_size
        drawn = self._law.sample(self._draw, (size,)) if self._law else self._draw.integers(self._num_rows, size=size)
        ids = torch.from_numpy(drawn)
        batch = SparseBatch(features=("item",), ids=ids, batch_size=self._batch_size, bag_size=IDS)
        started_s, began_s = time.perf_counter(), time.thread_time()
        self._optimizer.zero_grad()
        self._network(self.embeddings(batch).values).square().mean().backward()
        self._optimizer.step()
        return time.perf_counter() - started_s, time.thread_time() - began_s

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Rows and states."""
        (piece,) = self.embeddings.local_rows("item")
        return {"values": piece.values, **piece.state}


@contextmanager
def _in_background(training: Training, folder: Path) -> Iterator[Callable[[], bool]]:
    save = BackgroundSave(folder / "rowmesh", training.embeddings, {}, room=training.room)
    yield lambda: save.is_done
    save.wait()


@contextmanager
def _without_copies(training: Training, folder: Path) -> Iterator[Callable[[], bool]]:
    save = BackgroundSave(folder / "without", training.embeddings, {}, room=training.room_without_copies)
    yield lambda: save.is_done
    save.wait()


@contextmanager
def _by_torch(training: Training, folder: Path) -> Iterator[Callable[[], bool]]:
    done: Any = async_save(training.tensors, checkpoint_id=folder / "torch")
    assert isinstance(done, Future)
    yield done.done
    done.result()


@contextmanager
def _plainly(training: Training, folder: Path) -> Iterator[Callable[[], bool]]:
    num_bytes = sum(tensor.nbytes for tensor in training.tensors.values())
    thread = Thread(target=_write_in_order, args=(folder / "plain", num_bytes))
    thread.start()
    yield lambda: not thread.is_alive()
    thread.join()


def _timed(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def _write_in_order(path: Path, num_bytes: int) -> None:
    block = os.urandom(CHUNK_BYTES)
    with path.open("wb") as file:
        for _ in range(num_bytes // CHUNK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _beside(training: Training, folder: Path, how: Any) -> dict[str, Any]:
    """Trains until what is written in the background is on disk."""
    began_s, steps = time.perf_counter(), []
    with how(training, folder) as is_done:
        stall_s = time.perf_counter() - began_s
        while not is_done():
            steps.append(training.step())
    return {"stall_s": stall_s, "steps": steps or [(0.0, 0.0)], "write_s": time.perf_counter() - began_s}


def measure(options: Options, report: Report, folder: Path) -> None:
    """Emits a line for each way to write, and the ratios that the targets are of."""
    workload, quick = options.workloads[0], options.quick
    megabytes = 50 if quick else options.extra["megabytes"]
    keep_memory()  # as `rowmesh train` does: else steps pay for fresh pages, with and without a checkpoint
    num_rows = megabytes * 10**6 // (4 * workload.dim + 4)
    law = Zipf(num_rows, workload.zipf) if options.extra["skewed"] else None
    layers = [int(width) for width in options.extra["layers"].split(",")]
    training = Training(num_rows, workload.dim, workload.global_batch, workload.seed, layers, law)
    num_bytes = sum(tensor.nbytes for tensor in training.tensors.values())
    ways = {"rowmesh": _in_background, "rowmesh without copies": _without_copies, "torch": _by_torch, "plain": _plainly}
    found: dict[str, list[Any]] = {name: [] for name in ("disk", "sync", "torch_sync", *ways)}
    for number in range(1 if quick else options.extra["rounds"]):
        for _ in range(workload.warmup):
            training.step()
        found["disk"].append(_timed(partial(_write_in_order, folder / "disk", num_bytes)))
        found["sync"].append(_timed(partial(checkpoint.save, folder / "sync", training.embeddings, {})))
        with warnings.catch_warnings(action="ignore"):  # of torch: there is one process
            place = folder / "torch-sync"
            found["torch_sync"].append(_timed(partial(torch_save, training.tensors, checkpoint_id=place)))
            turns = deque(ways)
            turns.rotate(-number)  # what one leaves for the disk to do not always falls to the same other
            for name in turns:
                alone = [training.step() for _ in range(workload.steps)]
                found[name].append({"alone": alone, **_beside(training, folder, ways[name])})
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    _report(report, found, ways, num_bytes)


def _report(report: Report, found: dict[str, list[Any]], ways: Any, num_bytes: int) -> None:
    disk = num_bytes / statistics.median(found["disk"])
    common = {"bytes": num_bytes, "disk_mb_per_s": round(disk / 1e6)}
    for name in ("sync", "torch_sync"):
        rate = num_bytes / statistics.median(found[name])
        report.line(case=f"write {name}", **common, mb_per_s=round(rate / 1e6))
        report.ratio(f"write {name} / disk", round(rate / disk, 3))
    for name, rounds in found.items():
        if name in ways:
            _report_steps(report, name, rounds[1:] or rounds, disk, common)
    if len(found["rowmesh"]) > 1:
        _report_steps(report, "rowmesh, first", found["rowmesh"][:1], disk, common)
    report.finish()


def _report_steps(report: Report, name: str, rounds: list[dict[str, Any]], disk: float, common: dict[str, int]) -> None:
    steps, cpu = np.array([step for each in rounds for step in each["steps"]]).T
    alone = np.median(np.array([step for each in rounds for step in each["alone"]]), 0)
    alone_s, alone_cpu_s = alone.tolist()
    stall_s = statistics.median(each["stall_s"] for each in rounds)
    rate = common["bytes"] / statistics.median(each["write_s"] for each in rounds)
    lost_s, lost_cpu_s = (np.array([steps.sum(), cpu.sum()]) - alone * len(steps)) / len(rounds)
    report.line(
        case=f"stall {name}",
        **common,
        step_alone_ms=round(alone_s * 1e3, 3),
        stall_ms=round(stall_s * 1e3, 3),
        mean_step_ms=round(float(steps.mean()) * 1e3, 3),
        mean_step_cpu_ms=round(float(cpu.mean()) * 1e3, 3),
        p99_step_ms=round(float(np.quantile(steps, 0.99)) * 1e3, 3),
        steps_beside=len(steps),
        lost_ms=round(stall_s * 1e3 + float(lost_s) * 1e3, 1),
        lost_cpu_ms=round(float(lost_cpu_s) * 1e3, 1),
        mb_per_s=round(rate / 1e6),
    )
    report.ratio(f"{name}: stall / step", round(stall_s / alone_s, 3))
    report.ratio(f"{name}: mean step / alone", round(float(steps.mean()) / alone_s, 3))
    report.ratio(f"{name}: mean step / alone, of the processor", round(float(cpu.mean()) / alone_cpu_s, 3))
    report.ratio(f"{name}: p99 step / alone", round(float(np.quantile(steps, 0.99)) / alone_s, 3))
    report.ratio(f"{name}: write / disk", round(rate / disk, 3))

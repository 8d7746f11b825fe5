"""Reading a checkpoint on other numbers of ranks than wrote it, and beside the disk and torch.distributed.checkpoint.

    python -m benchmarks.checkpoint --layouts --megabytes 1000 --folder /tmp

Two ranks write; one to four read, in turns, each the rows that it then holds, verified. Before every reading the files
are dropped from the page cache, as far as the system does that. The disk is a file of as many bytes that is read in
order; torch.distributed.checkpoint reads the same rows and states in one process.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from benchmarks.checkpoint_stall import CHUNK_BYTES
from benchmarks.command import Options, Report
from benchmarks.contestant import Contestant, ContestantError, connect_all

MODULE = "benchmarks.ranks.checkpoint_layouts"
WRITERS, READERS = 2, (1, 2, 3, 4)


def measure(options: Options, report: Report, folder: Path) -> None:
    """Emits a line for each number of ranks, and the ratios.

    Raises:
        ContestantError: ranks did not start, or failed.
    """
    workload = options.workloads[0]
    megabytes = 20 if options.quick else options.extra["megabytes"]
    readers = READERS[:2] if options.quick else READERS
    row_bytes = 4 * workload.dim + 4
    num_rows = megabytes * 10**6 // row_bytes
    place, seconds = folder / "model", dict[str, list[float]]()
    tensors = {"values": torch.randn(num_rows, workload.dim), "sum": torch.rand(num_rows)}
    _write_in_order(folder / "disk", num_rows * row_bytes)
    with warnings.catch_warnings(action="ignore"):  # of torch: there is one process
        torch_save(tensors, checkpoint_id=folder / "torch")
    with ExitStack() as stack:
        made = {
            count: stack.enter_context(
                Contestant(f"{count} ranks", MODULE, workload, ranks=count, num_rows=num_rows, folder=str(place))
            )
            for count in readers
        }
        _, absent = connect_all([*made.values()], options.deadline_s + 60.0)
        if absent:
            raise ContestantError("; ".join(absent.values()))
        made[WRITERS].ask("write")
        for number in range((1 if options.quick else options.extra["rounds"]) + 1):
            actions = {f"ranks {count}": _asking(contestant) for count, contestant in made.items()}
            actions["disk"] = lambda: _timed(lambda: _read_in_order(folder / "disk"))
            actions["torch"] = lambda: _timed(lambda: _read_by_torch(tensors, folder / "torch"))
            for name, action in actions.items():
                _forget(folder)
                found = action()
                if number:  # the first warms up
                    seconds.setdefault(name, []).append(found)
    shutil.rmtree(place)
    _report(report, seconds, num_rows * row_bytes)


def _report(report: Report, seconds: dict[str, list[float]], num_bytes: int) -> None:
    median = {name: statistics.median(each) for name, each in seconds.items()}
    for name, each in median.items():
        report.line(
            case=f"read {name}", bytes=num_bytes, seconds=round(each, 4), mb_per_s=round(num_bytes / each / 1e6)
        )
    same = median[f"ranks {WRITERS}"]
    for name, each in median.items():
        if name.startswith("ranks"):
            report.ratio(f"read, {name} / ranks {WRITERS}", round(each / same, 3))
    report.ratio("read rate, ranks 1 / disk", round(median["disk"] / median["ranks 1"], 3))
    report.ratio("read rate, ranks 1 / torch.distributed.checkpoint", round(median["torch"] / median["ranks 1"], 3))
    report.finish()


def _asking(contestant: Contestant) -> Callable[[], float]:
    return lambda: max(answer["seconds"] for answer in contestant.ask("read"))


def _timed(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def _read_by_torch(tensors: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch_load(tensors, checkpoint_id=folder)


def _write_in_order(path: Path, num_bytes: int) -> None:
    with path.open("wb") as file:
        for begin in range(0, num_bytes, CHUNK_BYTES):
            file.write(os.urandom(min(CHUNK_BYTES, num_bytes - begin)))
        file.flush()
        os.fsync(file.fileno())


def _read_in_order(path: Path) -> None:
    room = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(room):
            pass


def _forget(folder: Path) -> None:
    """Drops files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

"""What checksums cost: a model written and read with them and without, in turns, in one process.

    python -m benchmarks.checkpoint --megabytes 1000 --folder /tmp
    python -m benchmarks.checkpoint --stall --megabytes 4000   # another case: see checkpoint_stall.py
    python -m benchmarks.checkpoint --increments               # see checkpoint_increments.py
    python -m benchmarks.checkpoint --layouts                  # see checkpoint_layouts.py
    python -m benchmarks.checkpoint --recover                  # see recovery.py, which has options of its own

One table of rows and row-wise AdaGrad state. `write` includes waiting for the disk (`fsync`), as every model
does; `sum` is the same with nothing waited for. `read` is from the page cache, which nothing but verifying slows down.
These two are time of the processor (`--wall`: of the clock), which other work on the machine disturbs less.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import checkpoint_increments, checkpoint_layouts, checkpoint_stall, recovery
from benchmarks.command import Options, Report, parse
from benchmarks.measure import summarize
from rowmesh import EmbeddingCollection, TableSpec, checkpoint
from rowmesh._support.files.checksums import Checksums
from rowmesh.checkpoint import new_files

DIM = 64


class _Unsummed(new_files.Output):
    """Writes without looking at the bytes."""

    def write(self, data: Any) -> int:
        """Passes them on."""
        return self._file.write(memoryview(data).cast("B"))

    def checksums(self) -> Checksums:
        """None."""
        return Checksums(0, ())


@contextmanager
def _as(is_summed: bool, is_synced: bool) -> Iterator[None]:
    with mock.patch.object(new_files, "Output", new_files.Output if is_summed else _Unsummed):
        if is_synced:
            yield
        else:
            with mock.patch.object(os, "fsync", return_value=None):
                yield


def _timed(action: Callable[[], object], clock: Callable[[], float]) -> float:
    started_s = clock()
    action()
    return clock() - started_s


def measure(options: Options, report: Report, folder: Path) -> None:
    """Writes and reads in turns; emits milliseconds of each and the ratios."""
    megabytes = 20 if options.quick else options.extra["megabytes"]
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=megabytes * 10**6 // (4 * DIM + 4), dim=DIM)])
    seconds: dict[str, list[float]] = {}
    clock = time.perf_counter if options.extra["wall"] else time.process_time
    for number in range((2 if options.quick else options.extra["rounds"]) + 1):
        for is_summed in (True, False) if number % 2 else (False, True):
            how = "with" if is_summed else "without"
            save = partial(checkpoint.save, folder / how, embeddings, {})
            with _as(is_summed, True):
                times = {f"write_{how}": _timed(save, time.perf_counter)}
            with _as(is_summed, False):
                times[f"sum_{how}"] = _timed(save, clock)
            if is_summed:  # the same files are read
                for verify, name in ((True, "read_with"), (False, "read_without")):
                    times[name] = _timed(partial(checkpoint.load, folder / "with", embeddings, verify=verify), clock)
            if number:  # the first warms up
                for name, value in times.items():
                    seconds.setdefault(name, []).append(value)
    for what in ("write", "sum", "read"):
        line: dict[str, Any] = {"case": what, "megabytes": megabytes}
        for how in ("with", "without"):
            line |= summarize(seconds[f"{what}_{how}"], how)
        report.line(**line)
        report.ratio(f"{what}: with / without", round(line["with_ms"] / line["without_ms"], 3))
    report.finish()


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    given = sys.argv[1:] if arguments is None else arguments
    if "--recover" in given:
        recovery.main([each for each in given if each != "--recover"])
        return
    options = parse(
        (__doc__ or "").splitlines()[0],
        given,
        megabytes=1000,
        rounds=6,
        wall=False,
        folder="",
        stall=False,
        skewed=False,
        layers="256",
        increments=False,
        layouts=False,
    )
    folder = Path(tempfile.mkdtemp(prefix="rowmesh-checkpoint-", dir=options.extra["folder"] or None))
    try:
        run = checkpoint_stall.measure if options.extra["stall"] else measure
        run = checkpoint_increments.measure if options.extra["increments"] else run
        run = checkpoint_layouts.measure if options.extra["layouts"] else run
        run(options, Report("checkpoint", options.output), folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""What an increment has on disk, beside the records that steps touched, and what noting them costs a step.

    python -m benchmarks.checkpoint --increments --megabytes 1000 --dim 64 --folder /tmp

One table with row-wise AdaGrad; ids are uniform. A full checkpoint, then in each round `--steps` steps, an increment,
and the same steps without notes. `bytes` are all files of it, the manifest among them; a record is a row with its
state. Steps are processor time of their thread.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks.checkpoint_stall import Training
from benchmarks.command import Options, Report
from rowmesh import checkpoint
from rowmesh.checkpoint.background import Base, save_increment
from rowmesh.checkpoint.changes import ChangedSlots
from rowmesh.checkpoint.manifest import Parent
from rowmesh.checkpoint.series import Series


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(options: Options, report: Report, folder: Path) -> None:
    """Emits a line, and the ratio that the target is of."""
    workload, quick = options.workloads[0], options.quick
    num_rows = (50 if quick else options.extra["megabytes"]) * 10**6 // (4 * workload.dim + 4)
    training = Training(num_rows, workload.dim, workload.global_batch, workload.seed)
    changes, series = ChangedSlots(training.embeddings), Series(folder)
    touched, record_bytes = 0, sum(tensor.nbytes for tensor in training.tensors.values()) // num_rows
    changes.take()
    began_s = time.perf_counter()
    checkpoint.save(series.at(0), training.embeddings, {})
    full_s, shares, times, steps = time.perf_counter() - began_s, [], [], {"noted": [], "alone": []}
    for number in range(1, 3 if quick else options.extra["rounds"] + 1):
        steps["noted"] += [training.step()[1] for _ in range(workload.steps)]
        changed = changes.take()
        assert changed is not None
        touched = sum(int(marks.sum()) for marks in changed.marks.values())
        before = checkpoint.read_manifest(series.at(number - 1))
        base = Base(Parent(number - 1, before.identity, before.depth), changed)
        began_s = time.perf_counter()
        save_increment(series.at(number), training.embeddings, {}, base)
        times.append(time.perf_counter() - began_s)
        shares.append(_bytes_of(series.at(number)) / (touched * record_bytes))
        changes.close()
        steps["alone"] += [training.step()[1] for _ in range(workload.steps)]
        changes.take()  # notes anew: increments lack what the steps between changed, and are not read
    report.line(
        case="increment",
        rows=num_rows,
        record_bytes=record_bytes,
        touched=touched,
        full_write_s=round(full_s, 3),
        write_s=round(statistics.median(times), 3),
        step_noted_cpu_ms=round(statistics.median(steps["noted"]) * 1e3, 3),
        step_alone_cpu_ms=round(statistics.median(steps["alone"]) * 1e3, 3),
    )
    report.ratio("bytes of an increment / records touched", round(statistics.median(shares), 4))
    report.ratio(
        "step: noted / alone, of the processor",
        round(statistics.median(steps["noted"]) / statistics.median(steps["alone"]), 3),
    )
    report.finish()

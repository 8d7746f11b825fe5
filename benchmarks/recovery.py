"""How long a run stands still when a rank is killed: seconds from SIGKILL to the end of the next step, by parts.

    python -m benchmarks.recovery
    python -m benchmarks.recovery --rows 1000000 --rounds 5 --ranks 4

Rank 1 is killed after a step, between two checkpoints. `restart` is torchrun --max-restarts, which starts all ranks
anew; `resume` the same command, started again with --resume when it has failed. The parts:

    noticed_s     until torchrun has ended the other rank and starts a process (resume: until the command has failed)
    started_s     until rowmesh runs in the last rank: processes, imports
    made_s        until data are open, ranks connected, tables made
    read_s        until the checkpoint is read
    step_s        until the first step is done; `lost_steps` are then to be done once more
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.command import Options, Report, parse
from rowmesh.data import PlantedConfig, prepare
from rowmesh.data.inputs import DataSource
from rowmesh.data.synthetic import synthesize

BATCH_SIZE, EVERY, KILLED_AT, NUM_STEPS = 256, 10, 33, 45
LOST_STEPS = KILLED_AT % EVERY
PARTS = ("noticed_s", "started_s", "made_s", "read_s", "step_s")
KILL, POINTS = "loop.step", ("cli.command", "train.built", "resume.loaded", "loop.step")


def measure(options: Options, report: Report, folder: Path) -> None:
    """Kills and restarts in turns; emits the median of each part."""
    config = _prepare(folder, 20_000 if options.quick else options.extra["rows"])
    ways = ["restart"] if options.quick else ["restart", "resume"]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(1 if options.quick else options.extra["rounds"]):
        for way, times in found.items():
            times.append(_recover(config, folder / f"{way}{number}", options.ranks, is_restart=way == "restart"))
    for way, times in found.items():
        parts = {name: round(statistics.median(each[name] for each in times), 3) for name in (*PARTS, "total_s")}
        report.line(case=way, ranks=options.ranks, **parts, lost_steps=LOST_STEPS, rounds=len(times))
        report.ratio(f"{way}: seconds to the next step", parts["total_s"])
    report.finish()


def _prepare(folder: Path, num_rows: int) -> Path:
    """A small network on two tables, in all of about so many rows; returns its configuration."""
    planted = PlantedConfig(num_rows=(num_rows, 1000))
    synthesize(folder / "raw", {"train": max(num_rows, NUM_STEPS * BATCH_SIZE), "test": 1000}, planted)
    source = DataSource.find([folder / "raw"], None, validation=(), test=())
    prepare(source.files, folder / "prepared", source.schema, optimum=source.optimum)
    config = folder / "clicks.toml"
    lines = [f'[data]\nfolder = "{folder}/prepared"\nbatch_size = {BATCH_SIZE}', "[model]\nbottom = [64]\ntop = [64]"]
    lines += ["[tables]\ndim = 64", f"[train]\nsteps = {NUM_STEPS}", f"[checkpoint]\nevery_steps = {EVERY}"]
    config.write_text("\n".join(lines) + "\n")
    return config


def _recover(config: Path, run: Path, ranks: int, *, is_restart: bool) -> dict[str, float]:
    """Trains, kills, goes on; returns the parts."""
    notes = run.with_suffix(".notes")
    faults = [f"{point}=note:{notes}" for point in POINTS] + [f"{KILL}@{KILLED_AT},rank1=kill"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=1" if is_restart else "--max-restarts=0", "-m", "rowmesh.cli", "train", str(config)]
    command += [f"run.folder={run}", "--resume", "auto"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(run.parent), "ROWMESH_FAULTS": "; ".join(faults)}
    first = _end(command, environment)
    failed_s = time.time()
    if is_restart != (first.returncode == 0):
        raise RuntimeError(first.stdout + first.stderr)
    if not is_restart and (again := _end(command, environment)).returncode:
        raise RuntimeError(again.stdout + again.stderr)
    return _parts([json.loads(line) for line in notes.read_text().splitlines()], None if is_restart else failed_s)


def _end(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _parts(notes: list[dict[str, Any]], failed_s: float | None) -> dict[str, float]:
    """The parts, from what points noted: the first life ends with the last step of rank 1, whose process is then new.

    >>> def note(point, pid, time_s):
    ...     return {"point": point, "rank": "1", "pid": pid, "time_s": time_s}
    >>> life = [note("cli.command", 8, 3.0), note("train.built", 8, 4.0), note("resume.loaded", 8, 4.5)]
    >>> parts = _parts([note("loop.step", 7, 1.0), *life, note("loop.step", 8, 4.75)], failed_s=1.5)
    >>> [parts[name] for name in PARTS], parts["total_s"]
    ([0.5, 1.5, 1.0, 0.5, 0.25], 3.75)
    """
    first_pid = next(note["pid"] for note in notes if note["rank"] == "1")
    killed_s = max(note["time_s"] for note in notes if note["pid"] == first_pid)
    after = [note for note in notes if note["time_s"] > killed_s]
    reached = {}
    for point in POINTS:
        by_process: dict[int, float] = {}
        for note in after:
            if note["point"] == point:
                by_process.setdefault(note["pid"], note["time_s"])
        reached[point] = max(by_process.values())
    begun_s = failed_s or _created_s(after)
    moments = [killed_s, begun_s, *(reached[point] for point in POINTS)]
    parts = {name: end - start for name, start, end in zip(PARTS, moments[:-1], moments[1:], strict=True)}
    return parts | {"total_s": moments[-1] - killed_s}


def _created_s(notes: list[dict[str, Any]]) -> float:
    """When the first of the new processes was made."""
    return min(note["created_s"] for note in notes if note["point"] == "cli.command")


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    options = parse((__doc__ or "").splitlines()[0], arguments, rows=100_000, rounds=3, folder="")
    with tempfile.TemporaryDirectory(prefix="rowmesh-recovery-", dir=options.extra["folder"] or None) as name:
        measure(options, Report("recovery", options.output), Path(name))


if __name__ == "__main__":
    main()

"""One model, trained in twelve ways: what each system of rowmesh changes of time, traffic and memory, and what stays.

python examples/demo.py            # `make demo`: data that `make train` draws too, four ranks, minutes
python examples/demo.py --quick    # small data and tables, two ranks
python examples/demo.py --only tiers tiers_pipeline --memory 32

docs/demo.md shows its output and says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rowmesh.checkpoint import read_manifest
from rowmesh.checkpoint.manifest import Manifest
from rowmesh.observe.lines import NAME_COLUMNS, fitted

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "demo.toml"
Promise = Literal["bits", "rounding", "another"]
SHOWN: dict[Promise, str] = {"bits": "equal", "rounding": "rounded", "another": "another"}
LEGEND = (
    "step     time of a step, and of that until its rows are there",
    "ranks    bytes that ranks get from each other: ids, rows, gradients",
    "tables   rows, optimizer state and buffers in memory, over all ranks",
    "memory   of all processes, with Python, torch and kernels, at the end",
    "model    equal: rows, states, network and losses are the plain ones to the bit",
    "         rounded: the same sums in another order; another: as the paper has it",
)
ROUNDING = 0.002
"""By how much AUC may differ where only the order of additions does: far less than another model would."""
NAME_WIDTH, WIDTHS = 21, (7, 7, 9, 9, 9, 9, 9)
WIDTH = NAME_WIDTH + sum(WIDTHS)


@dataclass(frozen=True)
class Run:
    """One way to train the model.

    Attributes:
        name: in the table.
        system: the paper it is from.
        what: what it changes beside the plain run.
        keys: of the configuration. What stands in braces is from `Settings.training`.
        promise: of the model beside that of the plain run.
    """

    name: str
    system: str
    what: str
    keys: tuple[str, ...] = ()
    promise: Promise = "bits"

    @property
    def folder(self) -> str:
        """Its name as a folder's."""
        return "_".join("".join(each if each.isalnum() else " " for each in self.name).split())


COPIES = ("placement.strategy=auto", "placement.fetch_weight=2.0")
TIERS = (
    "tables.storage=tiered",
    "tiers.fast_share=0.0001",
    "tiers.fast_rows={rows}",
    "tiers.folder={folder}",
    "tiers.direct={direct}",
)
AHEAD = ("pipeline.depth=2",)
PARTS = ("pipeline.micro_batches=4",)
CORES = (
    "tables.tensor_train.min_rows={min_rows}",
    "tables.tensor_train.rank={rank}",
    "tables.tensor_train.optimizer.name=adagrad",
    "tables.tensor_train.optimizer.lr=0.02",
)
RUNS = (
    Run("plain", "FusedRec", "each row on one rank; ids fused and deduplicated, rows sent"),
    Run("hot rows copied", "OPER", "a plan gives the rows that are read most a copy on every rank", COPIES),
    Run("one-sided reads", "OPER", "ranks read each other's memory: no messages", ("parallel.transport=one_sided",)),
    Run(
        "micro-batches, naive",
        "NestPipe",
        "4 parts of a batch; a row is sent with each part that has it",
        (*PARTS, "pipeline.exchange=naive"),
        "rounding",
    ),
    Run(
        "micro-batches, once",
        "NestPipe",
        "4 parts of a batch; a row is sent once for all of them",
        PARTS,
        "rounding",
    ),
    Run("pipeline", "NestPipe", "two batches ahead are read, routed and requested", AHEAD),
    Run("tiers", "EL-Rec", "rows in files, those in use in the memory that is given", TIERS),
    Run("tiers + pipeline", "EL-Rec", "files are read ahead, while the batches before are computed", (*TIERS, *AHEAD)),
    Run(
        "replicas, exact",
        "2D",
        "two groups of ranks, each with all rows; gradients are summed",
        ("parallel.replicas=2",),
        "rounding",
    ),
    Run(
        "replicas, averaged",
        "2D",
        "two groups of ranks; rows are averaged every 4 steps",
        ("parallel.replicas=2", "parallel.synchronization=average", "parallel.sync_every=4"),
        "another",
    ),
    Run("tensor-train", "EL-Rec", "large tables as products of small cores, on every rank", CORES, "another"),
    Run("copies + pipeline", "OPER, NestPipe", "both: copied rows, and batches ahead", (*COPIES, *AHEAD)),
)


@dataclass(frozen=True)
class Settings:
    """How big everything is.

    Attributes:
        samples: of the training split that is drawn.
        max_rows: of a table; None: as Criteo has them.
        ranks: processes.
        steps: of each run.
        batch_size: samples of a step over all ranks.
        dim: of a row.
        memory_mb: MB of rows in memory, over all ranks, where rows are in tiers.
        cored_rows: rows from which on a table is a tensor-train table, in the run that has some.
        cored_rank: of its cores.
        data: the folder of drawn and of prepared data.
        out: the folder of the runs.
    """

    samples: int = 1_000_000
    max_rows: int | None = None
    ranks: int = 4
    steps: int = 120
    batch_size: int = 4096
    dim: int = 64
    memory_mb: float = 64.0
    cored_rows: int = 10_000
    cored_rank: int = 16
    data: Path = Path("data/generated")
    out: Path = Path("runs/demo")

    @property
    def prepared(self) -> Path:
        """The folder of prepared data."""
        return self.data / "criteo"

    @property
    def tiers(self) -> Path:
        """Where files of rows are, while a run needs them."""
        return self.out / "rows"

    def preparation(self) -> list[list[str]]:
        """Commands that draw and prepare the data, or keep what is there: what `make train` uses."""
        cap = ["--max-rows", str(self.max_rows)] if self.max_rows else []
        raw, held_out = str(self.data / "raw"), str(min(self.samples // 10, 100_000))
        return [
            ["data", "synthesize", raw, "--samples", str(self.samples), "--held-out", held_out, *cap, "--reuse"],
            ["data", "prepare", raw, "--out", str(self.prepared), "--min-count", "1", "--reuse"],
        ]

    def training(self, run: Run) -> list[str]:
        """The command that trains one run."""
        row_bytes = 4 * self.dim + 4  # float32, and the state of row-wise AdaGrad
        given = {
            "rows": max(1, int(self.memory_mb * 1e6 / row_bytes / self.ranks)),
            "folder": self.tiers.absolute(),
            "direct": str(reads_directly(self.tiers)).lower(),
            "min_rows": self.cored_rows,
            "rank": self.cored_rank,
        }
        size = [f"train.steps={self.steps}", f"data.batch_size={self.batch_size}", f"tables.dim={self.dim}"]
        where = [f"data.folder={self.prepared}", f"run.folder={self.out / run.folder}"]
        keys = [key.format(**given) for key in run.keys]
        return ["train", str(CONFIG), *where, *size, *keys, "--overwrite"]


QUICK = Settings(
    samples=20_000,
    max_rows=3_000,
    ranks=2,
    steps=12,
    batch_size=512,
    dim=8,
    memory_mb=0.4,
    cored_rows=1_000,
    cored_rank=4,
    data=Path("data/generated/quick"),
    out=Path("runs/demo_quick"),
)


@dataclass(frozen=True)
class Measured:
    """What a finished run left in its folder.

    Attributes:
        step_ms: median of the logged intervals but the first.
        rows_ms: of that, until the rows of the step are there.
        sent_bytes: between ranks, a step, mean.
        table_bytes: rows, optimizer state and buffers in memory, over all ranks.
        memory_bytes: of the processes, over all ranks, at the end; pages that they share counted once.
        auc: on the test split.
        best_auc: of the planted model.
        ids, unique_ids: a step, over all ranks.
    """

    step_ms: float
    rows_ms: float
    sent_bytes: float
    table_bytes: int
    memory_bytes: int
    auc: float
    best_auc: float
    ids: float
    unique_ids: float

    @classmethod
    def of(cls, folder: Path, batch_size: int) -> Measured:
        """From a run's files."""
        train = [line for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "train"]
        counters = list(read_lines(folder / "counters.jsonl"))
        about, test = (json.loads((folder / name).read_text()) for name in ("about.json", "evaluation/test.json"))
        steps = counters[-1]["step"]
        totals = {name: sum(line.get(name, 0) for line in counters) for name in ("bytes_received", "ids", "unique_ids")}
        kept = [size for sizes in about["memory_bytes"] for use, size in sizes.items() if use != "network"]
        later = train[1:] or train
        return cls(
            step_ms=1e3 * batch_size / statistics.median(line["samples_per_s"] for line in later),
            rows_ms=statistics.median(line["step_ms/rows"] for line in later),
            sent_bytes=totals["bytes_received"] / steps,
            table_bytes=sum(kept),
            memory_bytes=train[-1]["memory_bytes"],
            auc=test["auc"],
            best_auc=test["planted_optimum"]["auc"],
            ids=totals["ids"] / steps,
            unique_ids=totals["unique_ids"] / steps,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains all runs and prints the table; returns the exit status."""
    settings, runs = parse(arguments)
    settings.out.mkdir(parents=True, exist_ok=True)
    started_s = time.perf_counter()
    for command in settings.preparation():
        say("data", f"rowmesh {command[0]} {command[1]}")
        execute([sys.executable, "-m", "rowmesh.cli", *command], settings.out / "data.log")
    plain, results = runs[0], list[tuple[Run, Measured]]()
    for number, run in enumerate(runs, 1):
        say(f"{number}/{len(runs)}", f"{run.name} ({run.system}): {run.what}")
        measured = train(run, settings)
        results.append((run, measured))
        verdict = check(run, measured, results[0][1], settings)
        say("", f"{measured.step_ms:.0f} ms a step, AUC {measured.auc:.5f}{verdict}")
        for note in copies(settings.out / run.folder):
            say("", note)
        if run is not plain:  # whose model stays until all others are compared with it
            shutil.rmtree(model_of(run, settings))
    shutil.rmtree(model_of(plain, settings))
    say("done", f"after {time.perf_counter() - started_s:.0f} s: {settings.ranks} ranks, {settings.steps} steps a run")
    print("", *draw(results, settings), sep="\n")
    return 0


def parse(arguments: Sequence[str] | None) -> tuple[Settings, tuple[Run, ...]]:
    """The settings and the runs that are asked for; the plain one is always among them."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small data and tables, two ranks, few steps")
    parser.add_argument("--ranks", type=int, help="processes, an even number for the replicas (4; quick 2)")
    parser.add_argument("--steps", type=int, help="of each run (120; quick 12)")
    parser.add_argument("--memory", type=float, dest="memory_mb", metavar="MB", help="for rows in tiers, on all ranks")
    parser.add_argument("--data", type=Path, help="folder of the drawn data (data/generated)")
    parser.add_argument("--out", type=Path, help="folder of the runs (runs/demo)")
    names = [run.folder for run in RUNS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="RUN", help=f"beside plain: {', '.join(names[1:])}")
    options = vars(parser.parse_args(arguments))
    settings, only = QUICK if options.pop("quick") else Settings(), options.pop("only") or names
    settings = replace(settings, **{name: value for name, value in options.items() if value is not None})
    return settings, tuple(run for run in RUNS if run is RUNS[0] or run.folder in only)


def train(run: Run, settings: Settings) -> Measured:
    """Trains under torchrun, and reads what the run left."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings.ranks}"]
    folder = settings.out / run.folder
    settings.tiers.mkdir(exist_ok=True)
    try:
        execute([sys.executable, *launcher, "-m", "rowmesh.cli", *settings.training(run)], folder.with_suffix(".log"))
    finally:
        shutil.rmtree(settings.tiers)
    return Measured.of(folder, settings.batch_size)


def execute(command: Sequence[str], log: Path) -> None:
    """Runs a command; its output goes to a file, and its progress here too. Ends the program where it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (
        log.open("w", encoding="utf-8") as file,
        tempfile.TemporaryDirectory() as scratch,  # torchrun leaves a folder there
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | {"TMPDIR": scratch},
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if line.startswith(("train step", "reused", "drawing", "reading", "prepared", "drawn")):
                say("", line.strip())
    if process.returncode:
        end = log.read_text(encoding="utf-8").splitlines()
        errors = [line for line in end if "error" in line.lower()] or end[-5:]
        sys.exit("\n".join([*errors[:5], f"failed, status {process.returncode}; all that it printed is in {log}"]))


def say(name: str, text: str) -> None:
    """Prints a name and a text, on a terminal in lines that fit."""
    print(*fitted([f"{name:<{NAME_COLUMNS}}{text}"], sys.stdout), sep="\n", flush=True)


def check(run: Run, measured: Measured, plain: Measured, settings: Settings) -> str:
    """What became of the promise of a run; ends the program where it is broken."""
    if run is RUNS[0]:
        return ""
    others = [] if run.promise == "another" else differences(RUNS[0], run, settings)
    if run.promise == "bits" and (others or measured.auc != plain.auc):
        sys.exit(f"{run.name} was to train the plain model to the bit and differs in {', '.join(others) or 'AUC'}")
    if run.promise == "rounding" and not abs(measured.auc - plain.auc) <= ROUNDING:
        sys.exit(f"{run.name} was to train the plain model to rounding: AUC {measured.auc:.5f}, not {plain.auc:.5f}")
    return {
        "bits": ", the plain model to the bit: rows, optimizer states, network, losses",
        "rounding": f", {measured.auc - plain.auc:+.5f}: other sums, the plain model to rounding",
        "another": f", {measured.auc - plain.auc:+.5f}: another model, as its paper has it",
    }[run.promise]


def differences(plain: Run, other: Run, settings: Settings) -> list[str]:
    """What of the models and losses of two runs is not the same to the bit; nothing where all is."""
    folders = [model_of(run, settings) for run in (plain, other)]
    manifests = [read_manifest(folder) for folder in folders]
    found = []
    for name in manifests[0].tables:
        first, second = (arrays(folder, manifest, name) for folder, manifest in zip(folders, manifests, strict=True))
        if first.keys() != second.keys() or any(not np.array_equal(first[kind], second[kind]) for kind in first):
            found.append(f"table {name}")
    networks = [network(folder, manifest) for folder, manifest in zip(folders, manifests, strict=True)]
    if any(not torch.equal(value, networks[1][name]) for name, value in networks[0].items()):
        found.append("the network")
    losses = [[line.get("loss") for line in read_lines(folder.parent / "metrics.jsonl")] for folder in folders]
    return [*found, *(["losses"] if losses[0] != losses[1] else [])]


def arrays(folder: Path, manifest: Manifest, name: str) -> dict[str, np.ndarray]:
    """The rows and states of a table, in order of its rows, whichever rank wrote them; the cores of another."""
    entry, files = manifest.tables[name], folder / manifest.folder
    if entry.cores is not None:
        return {kind: np.load(files / file) for kind, file in entry.cores.files.items()}
    whole: dict[str, np.ndarray] = {}
    for part in entry.parts:
        for kind, file in part.files.items():
            rows, first = np.load(files / file, mmap_mode="r"), 0
            target = whole.setdefault(kind, np.zeros((entry.num_rows, *rows.shape[1:]), rows.dtype))
            for each in part.ranges:
                target[each.start : each.stop : each.stride] = rows[first : first + each.count]
                first += each.count
    return whole


def network(folder: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The weights of the dense network."""
    return torch.load(folder / manifest.folder / "dense.pt", weights_only=True)["network"]


def draw(results: Sequence[tuple[Run, Measured]], settings: Settings) -> Iterator[str]:
    """The table, what it means, and where the reports are; the table has at most `WIDTH` columns."""
    plain = results[0][1]
    head, units = ("step", "rows", "ranks", "tables", "memory", "AUC", "model"), ("ms", "ms", "MB/step", "MB", "MB")
    yield columns("", head)
    yield columns("", units).rstrip()
    yield "─" * WIDTH
    for run, each in results:
        times = (f"{each.step_ms:,.0f}", f"{each.rows_ms:,.0f}")
        sizes = (megabytes(size) for size in (each.sent_bytes, each.table_bytes, each.memory_bytes))
        yield columns(
            run.name, (*times, *sizes, f"{each.auc:.5f}", SHOWN[run.promise] if run is not RUNS[0] else "")
        ).rstrip()
    yield columns("planted optimum", ("", "", "", "", "", f"{plain.best_auc:.5f}")).rstrip()
    yield "─" * WIDTH
    yield from LEGEND
    alone = megabytes(plain.sent_bytes * plain.ids / plain.unique_ids)
    yield f"ids      {plain.ids:,.0f} a step, {plain.unique_ids:,.0f} of them distinct on their rank: those are sent;"
    yield f"         with every id sent by itself ranks would exchange about {alone} MB a step"
    yield f"given    {settings.memory_mb:g} MB for rows in tiers, of {megabytes(plain.table_bytes)} MB in all"
    yield ""
    for run, _ in results:
        yield f"report   {settings.out / run.folder / 'report.html'}"


def copies(folder: Path) -> list[str]:
    """What the plan of a run says of its copies; nothing where it makes none."""
    notes = json.loads((folder / "plan.json").read_text())["notes"]
    return [notes["copies"]] if "copies" in notes else []


def columns(name: str, texts: Sequence[str]) -> str:
    """A line of the table."""
    return f"{name:<{NAME_WIDTH}}" + "".join(f"{text:>{width}}" for text, width in zip(texts, WIDTHS, strict=False))


def megabytes(num_bytes: float) -> str:
    """Three digits or all before the point.

    >>> megabytes(10_764_792), megabytes(345_000_000), megabytes(512)
    ('10.8', '345', '0.00')
    """
    value = num_bytes / 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def model_of(run: Run, settings: Settings) -> Path:
    """Where the model of a run is."""
    return settings.out / run.folder / "model"


def reads_directly(folder: Path) -> bool:
    """Whether files in a folder can be read past the system's page cache, which would take more memory than given."""
    if not hasattr(os, "O_DIRECT"):
        return False
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
        except OSError:
            return False
    return True


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


if __name__ == "__main__":
    sys.exit(main())

"""What averaging replicas costs in accuracy: the gap of normalized entropy (NE) to one replica, by M and by c.

The same data, first values and order of samples train a DLRM with one replica of its tables, with M groups that take
steps of their own and average rows and moments after each (c = 1, and c towards M), and with M groups in exact
synchronization. A gap is how many percent the NE of held-out samples lies above that with one replica and the same
seed; quoted is the mean over seeds with Student's 95 % interval. Learning rates are the best of a grid for one replica,
on seeds of their own (`benchmarks.click_sets`). Two questions beside the paper's: how far a smaller learning
rate explains the gap (one replica at lr / √M), and what happens where the learning rate is too high to begin with.

Groups are simulated in one process (`benchmarks.replica_simulation`); for one seed, real ranks must end with the same
NE. Source: two-dimensional sparse parallelism §4.1, Fig. 4.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.click_sets import Criteo, Synthetic, read, table_specs
from benchmarks.command import Report
from benchmarks.contestant import Contestant, ContestantError
from benchmarks.paired import Interval, relative_gaps
from benchmarks.replica_simulation import DIM, Network, ReplicatedTables, normalized_entropy, train
from benchmarks.workload import Workload
from rowmesh.data import Batch, Prepared
from rowmesh.mesh.synchronization import Mode
from rowmesh.tables.update_rules import RowWiseAdaGrad

LRS = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
DENSE_LRS = (0.0005, 0.001, 0.002, 0.004)
TOO_HIGH = 8.0  # times the tuned lr of the tables
SIGNIFICANT_PERCENT = 0.02  # in the paper
ROWS = (100_000, 30_000, 10_000, 10_000, 3_000, 3_000, 1_000, 1_000, 300, 100)
JUDGED_AT_ONCE = 8192
RANKS = 4
MAX_ERROR = 1e-6
RANKS_MODULE = "benchmarks.ranks.replica_accuracy"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train.

    Attributes:
        groups: M.
        scale: c.
        mode: how replicas are kept together; of no effect with one.
        lr_factor: times the tuned lr of the tables.
        base_factor: that of the run with one replica that it is compared with.
    """

    groups: int = 1
    scale: float = 1.0
    mode: Mode = "average"
    lr_factor: float = 1.0
    base_factor: float = 1.0

    @property
    def base(self) -> Setting:
        """One replica."""
        return Setting(lr_factor=self.base_factor, base_factor=self.base_factor)

    def __str__(self) -> str:
        how = f"c = {self.scale:g}" if self.mode == "average" and self.groups > 1 else self.mode * (self.groups > 1)
        lr = f"lr x {self.lr_factor:g}" if self.lr_factor != 1 else ""
        return ", ".join(part for part in (f"M = {self.groups}", how, lr) if part)


def settings(groups: tuple[int, ...]) -> list[Setting]:
    """All that are compared; with one replica first.

    >>> [str(setting) for setting in settings((2, 4))][:5]
    ['M = 1', 'M = 2, c = 1', 'M = 2, c = 2', 'M = 4, c = 1', 'M = 4, c = 2']
    """
    most = groups[-1]
    averaged = [Setting(groups=m, scale=2.0**power) for m in groups for power in range(int(math.log2(m)) + 1)]
    exact = [Setting(groups=m, mode="exact") for m in groups]
    slower = [Setting(lr_factor=m**-0.5) for m in groups]
    high = Setting(lr_factor=TOO_HIGH, base_factor=TOO_HIGH)
    averaged_high = [replace(high, groups=most, scale=float(scale)) for scale in (1, most)]
    return [Setting(), *averaged, *exact, *slower, high, *averaged_high]


def rows_of_figure_4(groups: tuple[int, ...]) -> tuple[list[Setting], list[Setting]]:
    """More and more groups without scaling (a); c from 1 to M for most groups (b).

    >>> [[str(setting) for setting in row] for row in rows_of_figure_4((2, 4))]
    [['M = 2, c = 1', 'M = 4, c = 1'], ['M = 4, c = 1', 'M = 4, c = 2', 'M = 4, c = 4']]
    """
    averaged = [setting for setting in settings(groups) if setting.mode == "average" and setting.lr_factor == 1]
    growing = [setting for setting in averaged if setting.groups > 1 and setting.scale == 1]
    return growing, [setting for setting in averaged if setting.groups == groups[-1]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A data set and how it is trained on.

    Attributes:
        name: as it stands in reports.
        data: what makes it.
        batch_size: samples of all groups together.
        epochs: passes over it.
        seeds, tuning_seeds: how many runs are reported, and how many choose the learning rates.
        groups: the Ms, powers of two, ascending.
        ranks: real ranks of the comparison with them; 0 for none.
    """

    name: str
    data: Synthetic | Criteo
    batch_size: int
    epochs: int = 1
    seeds: int
    tuning_seeds: int
    groups: tuple[int, ...] = (2, 4, 8, 16)
    ranks: int = 0


def cases(options: argparse.Namespace) -> list[Case]:
    """What is run."""
    criteo = Criteo(source=options.accuracy_criteo)
    if options.quick:
        small = Synthetic(samples=16_384, held_out=8_192, rows=(1_000, 300, 100), head=100)
        few: dict[str, Any] = {"seeds": 2, "tuning_seeds": 1, "groups": (2, 8)}
        return [
            Case(name="synthetic", data=small, batch_size=256, ranks=2, **few),
            Case(name="Criteo, 1 epoch", data=criteo, batch_size=64, **few),
        ]
    drawn = Synthetic(samples=options.accuracy_samples, held_out=65_536, rows=ROWS, head=1_000)
    many: dict[str, Any] = {"batch_size": 64, "seeds": 2 * options.accuracy_seeds, "tuning_seeds": 6}
    return [
        Case(name="synthetic", data=drawn, batch_size=1024, seeds=options.accuracy_seeds, tuning_seeds=2, ranks=RANKS),
        Case(name="Criteo, 1 epoch", data=criteo, **many),
        Case(name="Criteo, 2 epochs", data=criteo, epochs=2, **many),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this case."""
    add = parser.add_argument
    add("--accuracy", action="store_true", help="gap of normalized entropy to one replica (Fig. 4)")
    add("--accuracy-samples", type=int, default=524_288, help="synthetic samples to train on")
    add("--accuracy-seeds", type=int, default=10, help="seeds on synthetic samples; on Criteo twice as many")
    add("--accuracy-criteo", type=Path, default=Path("../shared/data/criteo_kaggle"), help="train, dev, test.tsv.gz")


def run(report: Report, options: argparse.Namespace) -> None:
    """Every case; a data set that is not there is said to be unavailable."""
    torch.set_num_threads(1)
    for case in cases(options):
        if isinstance(case.data, Criteo) and case.data.missing:
            reason = f"{case.data.source} lacks {', '.join(case.data.missing)}"
            report.line(accuracy="case", case=case.name, unavailable=reason)
            report.ratio(f"accuracy {case.name}", None)
            continue
        lrs = (LRS[::2], DENSE_LRS[1:2]) if options.quick else (LRS, DENSE_LRS)
        _run_case(report, case, *_tuned(report, case, *lrs))


def _run_case(report: Report, case: Case, lr: float, dense_lr: float) -> None:
    found: dict[Setting, list[float]] = {setting: [] for setting in settings(case.groups)}
    for seed in range(case.seeds):
        began = time.process_time()
        with _trial(case, seed, tuning=False) as trial:
            for setting, entropies in found.items():
                entropies.append(trial.run(setting, lr, dense_lr))
        entropies = {str(setting): round(values[-1], 7) for setting, values in found.items()}
        cpu_s = round(time.process_time() - began, 1)
        report.line(accuracy="seed", case=case.name, seed=seed, normalized_entropy=entropies, cpu_s=cpu_s)
    for setting, entropies in found.items():
        _gap(report, case, setting, entropies, found[setting.base])
    for fewer, more in itertools.chain(*map(itertools.pairwise, rows_of_figure_4(case.groups))):
        interval = Interval.of(relative_gaps(found[more], found[fewer]))
        line = {"setting": str(more), "against": str(fewer), "difference_percent": interval.as_record()}
        report.line(accuracy="trend", case=case.name, **line)
    if case.ranks:
        _compare_with_ranks(report, case, lr, dense_lr)


def _gap(report: Report, case: Case, setting: Setting, entropies: list[float], base: list[float]) -> None:
    line: dict[str, Any] = {"accuracy": "gap", "case": case.name, "setting": str(setting), **asdict(setting)}
    mean = round(float(np.mean(entropies)), 6)
    if setting == setting.base:
        report.line(**line, normalized_entropy=mean, gap_percent=None)
        return
    interval = Interval.of(relative_gaps(entropies, base))
    report.line(**line, normalized_entropy=mean, against=str(setting.base), gap_percent=interval.as_record())
    report.ratio(f"accuracy {case.name}: NE gap in % of {setting} to {setting.base}", round(interval.mean, 4) + 0.0)


def _tuned(report: Report, case: Case, lrs: tuple[float, ...], dense_lrs: tuple[float, ...]) -> tuple[float, float]:
    """The learning rates of tables and network with which one replica does best, and whether the grid bounds them."""
    grid = list(itertools.product(lrs, dense_lrs))
    entropies = {rates: [] for rates in grid}
    for seed in range(case.tuning_seeds):
        with _trial(case, seed, tuning=True) as trial:
            for rates in grid:
                entropies[rates].append(trial.run(Setting(), *rates))
    means = {rates: float(np.mean(values)) for rates, values in entropies.items()}
    lr, dense_lr = min(grid, key=lambda rates: means[rates])
    report.line(
        accuracy="tuning",
        case=case.name,
        lr=lr,
        dense_lr=dense_lr,
        seeds=case.tuning_seeds,
        at_edge=[
            name
            for name, rate, rates in (("lr", lr, lrs), ("dense_lr", dense_lr, dense_lrs))
            if rate in (rates[0], rates[-1])
        ],
        grid=[{"lr": a, "dense_lr": b, "normalized_entropy": round(means[a, b], 6)} for a, b in grid],
    )
    return lr, dense_lr


@dataclass(frozen=True)
class _Trial:
    """The data of one seed, and runs on it."""

    prepared: Prepared
    batches: list[Batch]
    held_out: list[Batch]
    seed: int

    def run(self, setting: Setting, lr: float, dense_lr: float, dtype: torch.dtype = torch.float32) -> float:
        """Trains from the start; returns the normalized entropy."""
        rule = RowWiseAdaGrad(lr=lr * setting.lr_factor, moment_scale=setting.scale)
        specs = table_specs(self.prepared, DIM, rule, dtype)
        tables = ReplicatedTables(specs, setting.groups, setting.mode, self.seed)
        network = train(tables, Network(lr=dense_lr, seed=self.seed), self.batches)
        return normalized_entropy(tables, network, self.held_out)


@contextmanager
def _trial(case: Case, seed: int, *, tuning: bool) -> Iterator[_Trial]:
    with tempfile.TemporaryDirectory() as folder:
        prepared = case.data.prepared(Path(folder), seed, tuning)
        batches = read(prepared, "train", case.batch_size, epochs=case.epochs, seed=seed)
        yield _Trial(prepared, batches, read(prepared, "test", JUDGED_AT_ONCE), seed)


def _compare_with_ranks(report: Report, case: Case, lr: float, dense_lr: float) -> None:
    """Real ranks on the first seed, in float64, where the simulation is in float64 too.

    Raises:
        ContestantError: the ranks fail, or end with another normalized entropy.
    """
    compared = [Setting(groups=1), Setting(groups=case.ranks, mode="exact")]
    for groups in (2, 4)[: case.ranks // 2]:
        compared += [Setting(groups=groups, scale=scale) for scale in (1.0, float(groups))]
    rates: dict[str, Any] = {"lr": lr, "dense_lr": dense_lr, "seed": 0}
    with (
        _trial(case, 0, tuning=False) as trial,
        Contestant(
            f"{case.ranks} ranks",
            RANKS_MODULE,
            Workload(),
            ranks=case.ranks,
            folder=str(trial.prepared.folder),
            batch_size=case.batch_size,
            epochs=case.epochs,
            **rates,
        ) as ranks,
    ):
        ranks.connect(time.monotonic() + 120.0)
        for setting in compared:
            mode = "exact" if setting.groups == 1 else setting.mode
            found = ranks.ask("train", groups=setting.groups, scale=setting.scale, mode=mode)[0]["normalized_entropy"]
            simulated = trial.run(setting, lr, dense_lr, torch.float64)
            error = abs(found - simulated)
            report.line(
                accuracy="ranks",
                case=case.name,
                setting=str(setting),
                ranks=case.ranks,
                steps=len(trial.batches),
                normalized_entropy=found,
                simulated=simulated,
                error=float(f"{error:.2g}"),
            )
            if error > MAX_ERROR:
                raise ContestantError(f"{setting}: ranks end with NE {found}, the simulation with {simulated}")

"""What the defaults are worth on data that nobody tuned them for, against a small grid of rates and batch sizes.

    python -m benchmarks.own_data --data FOLDER

Every run is `rowmesh train` in this process, on one rank: a configuration that names the data and a seed, and nothing
else; or one of a grid that sets batch size and both learning rates too. All stop early by the same rule. Tuned is the
configuration of the grid whose AUC on the validation split is highest in the mean over seeds; the summary is its AUC on
the test split less that of the defaults, over the same seeds. Above 0.01 the defaults miss their aim.
`gap_to_best_on_test` is an upper bound that nobody can tune to: the best of the grid on the test split itself.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.command import Report
from benchmarks.own_data_sets import SETS, OwnSet
from rowmesh.data import Prepared
from rowmesh.run.commands import run_training
from rowmesh.run.metrics import Metrics
from rowmesh.run.resolve import validate
from rowmesh.run.run_folder import RunFolder

AIM = 0.01
GRID = {"batch_size": (64, 512), "lr": (0.0003, 0.001), "table_lr": (0.01, 0.1)}
QUICK_GRID = {"batch_size": (256,), "lr": (0.001,), "table_lr": (0.01, 0.1)}
Setting = Mapping[str, float]


class Trained(NamedTuple):
    """What came of one run: the AUC of both splits, and what it took."""

    validation_auc: float
    test: Metrics
    steps: int
    elapsed_s: float


def train(prepared: Prepared, setting: Setting, seed: int) -> Trained:
    """One run; `setting` is empty for the defaults."""
    values: dict[str, dict[str, Any]] = {"data": {"folder": str(prepared.folder)}, "train": {"seed": seed}}
    if setting:
        values["data"]["batch_size"] = int(setting["batch_size"])
        values["optimizer"] = {"lr": setting["lr"]}
        values["tables"] = {"optimizer": {"lr": setting["table_lr"]}}
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        values["run"] = {"folder": f"{folder}/run"}
        metrics = run_training(validate(values, "benchmark"))
        assert metrics is not None
        lines = [json.loads(line) for line in RunFolder(Path(folder) / "run").metrics.read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "validation"]
    best = min(evaluations, key=lambda line: line["log_loss"])
    return Trained(best["auc"], metrics.first, lines[-1]["step"], time.perf_counter() - started_s)


def compare(own: OwnSet, data: Path, report: Report, seeds: int, share: float, grid: Mapping[str, Sequence]) -> None:
    """Runs the defaults and the whole grid on every seed."""
    settings = [dict(zip(grid, each, strict=True)) for each in itertools.product(*grid.values())]
    by_setting: list[list[Trained]] = [[] for _ in settings]
    default: list[Trained] = []
    samples: dict[str, int] = {}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            prepared = own.make(data, Path(folder), seed, share)
            samples = {name: split.samples for name, split in prepared.splits.items()}
            default.append(train(prepared, {}, seed))
            for setting, runs in zip(settings, by_setting, strict=True):
                runs.append(train(prepared, setting, seed))
    chosen = max(range(len(settings)), key=lambda i: statistics.mean(run.validation_auc for run in by_setting[i]))
    tests = [statistics.mean(run.test.auc for run in runs) for runs in by_setting]
    default_auc = statistics.mean(run.test.auc for run in default)
    gap = tests[chosen] - default_auc
    pairs = zip(default, by_setting[chosen], strict=True)
    report.line(
        set=own.name,
        samples=samples,
        tuned_setting=settings[chosen],
        default_auc=round(default_auc, 5),
        tuned_auc=round(tests[chosen], 5),
        gap=round(gap, 5),
        gap_of_seeds=[round(tuned.test.auc - own_run.test.auc, 5) for own_run, tuned in pairs],
        misses_by=round(max(gap - AIM, 0.0), 5),
        gap_to_best_on_test=round(max(tests) - default_auc, 5),
        grid_test_auc=[round(auc, 5) for auc in tests],
        default_normalized_entropy=round(statistics.mean(run.test.normalized_entropy for run in default), 4),
        default_steps=[run.steps for run in default],
        default_s=round(statistics.mean(run.elapsed_s for run in default), 1),
    )
    report.ratio(own.name, round(gap, 5))


def main(arguments: list[str] | None = None) -> None:
    """Runs the sets whose files are there; a line names the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the public data sets; without it only drawn ones run")
    parser.add_argument("--sets", help="some of them, by the beginning of their names, separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="over which AUCs are averaged")
    parser.add_argument("--quick", action="store_true", help="all in small, one seed, two points of the grid")
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report = Report("own_data", options.output)
    wanted = tuple((options.sets or "").split(","))
    for own in (own for own in SETS if own.name.startswith(wanted)):
        if missing := own.missing(options.data):
            report.line(set=own.name, unavailable=f"--data has no {', '.join(missing)}")
            report.ratio(own.name, None)
        elif options.quick:
            compare(own, options.data or Path(), report, 1, 0.1, QUICK_GRID)
        else:
            compare(own, options.data or Path(), report, options.seeds, 1.0, GRID)
    report.finish()


if __name__ == "__main__":
    main()

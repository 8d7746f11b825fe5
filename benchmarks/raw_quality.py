"""What raw rows with dynamic tables cost or gain beside prepared data: AUC, normalized entropy, calibration.

    python -m benchmarks.raw_quality --data-folder DATA     rows of criteo_kaggle and avazu below DATA
    python -m benchmarks.raw_quality --quick                drawn rows, one seed, no tuning

Every seed cuts the rows at random, four fifths to train on, and all contestants read them in one order, once but where
that is said. DLRM, rates of the network and of rows are tuned for each family on other cuts. Prepared data have a
vocabulary that has seen all training rows, and ids seen once share a row; raw rows have none.

Progressive validation: each batch is predicted before it is trained on; metrics of windows of `--window` steps, means
over seeds. Differences are those to `prepared, dense` on the same cut, with Student's 95 % interval over seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.click_sets import HELD_OUT, Avazu, Criteo
from benchmarks.command import Report
from benchmarks.paired import Interval
from rowmesh.data import Schema, prepare
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve

BATCH_SIZE, MIN_COUNT, TUNING_SEEDS = 64, 2, 2
BASE = "prepared, dense"
METRICS = ("auc", "normalized_entropy", "calibration")
COMMON = ("tables.dim=16", "tables.initializer.bound=0.02", "train.linear=torch", f"data.batch_size={BATCH_SIZE}")
DYNAMIC = ("data.source=raw", "tables.storage=dynamic", "tables.dynamic.capacity=100000", "tables.dynamic.shards=8")
PREPARED = ("data.shuffle=false", "train.patience=0")
CONTESTANTS = {
    BASE: (*PREPARED, "train.epochs=1"),
    "prepared, dense, three passes": (*PREPARED, "train.epochs=3"),
    "raw, dynamic": DYNAMIC,
    "raw, dynamic, admitted when seen twice": (*DYNAMIC, "tables.dynamic.admit_after=2"),
    "raw, dynamic, at most 500 ids": (*DYNAMIC, "tables.dynamic.capacity=500", "tables.dynamic.shards=1"),
}
FAMILIES = {name: name if name.startswith("prepared") else "raw, dynamic" for name in CONTESTANTS}
"""Whose rates each contestant takes."""
QUICK_RATES = ("tables.optimizer.lr=0.02", "optimizer.lr=0.0003")


@dataclass(frozen=True)
class Cut:
    """Rows of one seed: raw in `raw/train` and `raw/test`, and prepared."""

    folder: Path
    schema: str

    def train(self, contestant: str, rates: Sequence[str], window: int, seed: int) -> dict[str, Any]:
        """The metrics of the test rows, and of each window."""
        is_raw = contestant.startswith("raw")
        data = [f"data.folder={self.folder / 'prepared'}"]
        if is_raw:
            test = f"data.test={self.folder / 'raw' / 'test'}"
            data = [f"data.folder={self.folder / 'raw' / 'train'}", test, f"data.raw_schema={self.schema}"]
        with tempfile.TemporaryDirectory(dir=self.folder) as folder, contextlib.redirect_stdout(io.StringIO()):
            own = [f"run.folder={folder}/run", f"train.progressive_every={window}", f"train.seed={seed}"]
            empty = Path(folder) / "run.toml"
            empty.touch()
            found = run_training(resolve(empty, [*COMMON, *CONTESTANTS[contestant], *data, *own, *rates]))
            lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        assert found is not None, "there are test rows"
        windows = [_picked(line) for line in lines if line["kind"] == "progressive"]
        return {"test": _picked(found.as_record()), "log_loss": found.loss, "windows": windows}


def _picked(record: dict[str, Any]) -> dict[str, float]:
    return {name: float(record[name]) for name in METRICS}


def cut(lines: Sequence[bytes], header: bytes, schema: str, folder: Path, seed: int) -> Cut:
    """Deals rows of a text file to training and test at random, in one order, and prepares them."""
    order = np.random.default_rng(seed).permutation(len(lines))
    bound = round(len(lines) * (1 - HELD_OUT))
    files = {}
    for split, picked in {"train": order[:bound], "test": order[bound:]}.items():
        files[split] = [folder / "raw" / split / "rows.txt"]
        files[split][0].parent.mkdir(parents=True)
        files[split][0].write_bytes(header + b"".join(lines[number] for number in picked))
    prepare(files, folder / "prepared", Schema.load(schema), min_count=MIN_COUNT)
    return Cut(folder, schema)


def rows_of(kind: type[Criteo | Avazu], folder: Path) -> tuple[list[bytes], bytes]:
    """The lines of all files of a data set, and their header."""
    lines: list[bytes] = []
    header = b""
    for name in kind.files:
        with gzip.open(folder / kind.folder / name) as file:
            if kind is Avazu:
                header = file.readline()
            lines += file.readlines()
    return lines, header


def drawn_rows(count: int) -> list[bytes]:
    """Rows in Criteo's format; two columns decide on the clicks."""
    draw = np.random.default_rng(0)
    ids = np.minimum(draw.zipf(1.2, (count, 26)), 5000)
    clicks = draw.random(count) < np.where(ids[:, 0] % 3 == 0, 0.5, 0.1) + 0.2 * (ids[:, 1] % 2)
    lines = []
    for click, row in zip(clicks, ids, strict=True):
        dense = "\t".join(map(str, draw.integers(0, 50, 13)))
        lines.append(f"{int(click)}\t{dense}\t{'	'.join(f'{each:08x}' for each in row)}\n".encode())
    return lines


def tuned(cuts: Sequence[Cut], family: str, grid: Sequence[Sequence[str]], window: int) -> Sequence[str]:
    """The rates with the least log-loss on the test rows of some cuts."""

    def loss(rates: Sequence[str]) -> float:
        return sum(each.train(family, rates, window, number)["log_loss"] for number, each in enumerate(cuts))

    return min(grid, key=loss)


def compare(cuts: Sequence[Cut], rates: dict[str, Sequence[str]], window: int, data: str, report: Report) -> None:
    """Trains all contestants on all cuts, and writes means and differences."""
    found = {
        name: [each.train(name, rates[FAMILIES[name]], window, seed) for seed, each in enumerate(cuts)]
        for name in CONTESTANTS
    }
    for name, runs in found.items():
        windows = [_mean(of_seeds) for of_seeds in zip(*(run["windows"] for run in runs), strict=True)]
        test = _mean([run["test"] for run in runs])
        report.line(
            data=data, contestant=name, rates=rates[FAMILIES[name]], seeds=len(cuts), test=test, windows=windows
        )
    for name, runs in found.items():
        if name != BASE:
            gaps = {f"test_{metric}": _gaps(runs, found[BASE], metric, _test) for metric in METRICS}
            if "passes" not in name:
                gaps |= {f"progressive_{metric}": _gaps(runs, found[BASE], metric, _windows) for metric in METRICS}
            report.line(data=data, contestant=name, minus=BASE, differences=gaps)
            report.ratio(f"{data}, {name}: test AUC minus that of {BASE}", gaps["test_auc"]["mean"])


def _test(run: dict[str, Any], metric: str) -> float:
    return run["test"][metric]


def _windows(run: dict[str, Any], metric: str) -> float:
    return float(np.mean([window[metric] for window in run["windows"]]))


def _gaps(runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], metric: str, of: Any) -> dict[str, Any]:
    differences = [of(own, metric) - of(other, metric) for own, other in zip(runs, base, strict=True)]
    return Interval.of(differences).as_record()


def _mean(records: Sequence[dict[str, float]]) -> dict[str, float]:
    return {metric: round(float(np.mean([record[metric] for record in records])), 4) for metric in METRICS}


def data_sets(folder: Path | None) -> Iterator[tuple[str, str, list[bytes], bytes]]:
    """Name, schema, rows and header; drawn ones without a folder."""
    if folder is None:
        yield "drawn", "criteo", drawn_rows(2000), b""
        return
    for kind in (Criteo, Avazu):
        if missing := kind(source=folder / kind.folder).missing:
            raise SystemExit(f"{folder / kind.folder} lacks {', '.join(missing)}")
        yield kind.folder, kind.schema, *rows_of(kind, folder)


def main(arguments: list[str] | None = None) -> None:
    """Compares the contestants on every data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-folder", type=Path, help="folder of criteo_kaggle and avazu, in their raw formats")
    parser.add_argument("--seeds", type=int, default=5, help="cuts of each data set")
    parser.add_argument("--window", type=int, default=20, help="steps of a window of progressive validation")
    parser.add_argument("--table-lrs", default="0.005,0.02,0.06", help="rates of rows to tune, with commas between")
    parser.add_argument("--network-lrs", default="0.0001,0.0003,0.001", help="of the network")
    parser.add_argument("--quick", action="store_true", help="drawn rows, one seed, no tuning")
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    options = parser.parse_args(arguments)
    if not options.quick and options.data_folder is None:
        parser.error("--data-folder: name the folder of criteo_kaggle and avazu, or give --quick")
    torch.set_num_threads(1)
    table_lrs, network_lrs = (values.split(",") for values in (options.table_lrs, options.network_lrs))
    grid = [(f"tables.optimizer.lr={rows}", f"optimizer.lr={of}") for rows in table_lrs for of in network_lrs]
    report, num_seeds = Report("raw_quality", options.output), 1 if options.quick else options.seeds
    num_tuning = 0 if options.quick else TUNING_SEEDS
    for name, schema, lines, header in data_sets(None if options.quick else options.data_folder):
        with tempfile.TemporaryDirectory() as folder:
            places = (Path(folder) / str(number) for number in itertools.count())
            cuts = [cut(lines, header, schema, next(places), seed) for seed in range(num_seeds + num_tuning)]
            families: dict[str, Sequence[str]] = dict.fromkeys(FAMILIES.values(), QUICK_RATES)
            if num_tuning:
                families = {family: tuned(cuts[num_seeds:], family, grid, options.window) for family in families}
            compare(cuts[:num_seeds], families, options.window, name, report)
    report.finish()


if __name__ == "__main__":
    main()

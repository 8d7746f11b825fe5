"""What computing the dense network in bfloat16 costs in AUC and log-loss, beside float32.

    python -m benchmarks.precision_quality --data-folder DATA     planted data, and Criteo and Avazu below DATA
    python -m benchmarks.precision_quality --quick                planted data alone, less of them

The same data, first values and order of samples train the same DLRM in both precisions, as `train.precision` does;
rows, parameters and optimizer state are float32 in both. Quoted are the differences on held-out samples, the mean over
seeds with Student's 95 % interval: of AUC in hundredths, of log-loss in percent. Every seed has data of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.click_sets import Avazu, Criteo, RealRows, Synthetic, table_specs
from benchmarks.click_training import Clicks, Point, train
from benchmarks.command import Report
from benchmarks.paired import Interval, relative_gaps
from rowmesh.tables.update_rules import RowWiseAdaGrad

PLANTED = Synthetic(samples=60_000, held_out=20_000, rows=(2000, 500, 5000, 40, 300, 1000, 100, 3000), head=50)
QUICK = Synthetic(samples=8000, held_out=4000, rows=(500, 40, 300), head=20)
BATCH_SIZE, DIM, TABLE_LR, NETWORK_LR = 128, 16, 0.03, 0.001
REAL_EPOCHS = 2


def data_sets(folder: Path | None, quick: bool) -> Iterator[tuple[str, Synthetic | RealRows, int]]:
    """Name, data and passes over them; real ones that are not in the folder are left out."""
    yield "planted", QUICK if quick else PLANTED, 1
    if quick or folder is None:
        return
    for kind in (Criteo, Avazu):
        data = kind(source=folder / kind.folder)
        if not data.missing:
            yield kind.folder, data, REAL_EPOCHS


def compare(data: Synthetic | RealRows, seed: int, epochs: int) -> tuple[Point, Point]:
    """The end of two trainings, in float32 and in bfloat16."""
    with Clicks.of(data, seed, tuning=False, batch_size=BATCH_SIZE, epochs=epochs) as clicks:
        specs = table_specs(clicks.prepared, DIM, RowWiseAdaGrad(lr=TABLE_LR), torch.float32)
        (single,) = train(specs, clicks, NETWORK_LR, seed, 1)
        (half,) = train(specs, clicks, NETWORK_LR, seed, 1, "bfloat16")
    return single, half


def main(arguments: list[str] | None = None) -> None:
    """Compares the precisions on every data set that there is."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    report = Report("precision_quality", options.output)
    for name, data, epochs in data_sets(options.data_folder, options.quick):
        pairs = []
        for seed in range(2 if options.quick else options.seeds):
            pairs.append(compare(data, seed, epochs))
            single, half = pairs[-1]
            report.line(data=name, seed=seed, float32=single.as_record(), bfloat16=half.as_record())
        auc = Interval.of([100 * (half.auc - single.auc) for single, half in pairs])
        losses = ([point.log_loss for point in points] for points in zip(*pairs, strict=True))
        log_loss = Interval.of(relative_gaps(*reversed(list(losses))))
        report.line(data=name, auc_difference_x100=auc.as_record(), log_loss_difference_percent=log_loss.as_record())
        report.ratio(f"{name}_auc_difference_x100", round(auc.mean, 4))
    report.finish()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-folder", type=Path, help="folder of criteo_kaggle and avazu, in their raw formats")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each precision")
    parser.add_argument("--quick", action="store_true", help="little planted data, two seeds; ends within 30 s")
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()

"""What reordering gives in `benchmarks.tensor_train --ablation`: every arrangement, on ids in three orders.

The ids of the same samples are looked up as they are before preparation (*scattered*), by frequency as preparation
numbers them (*frequency*: the paper's global information), and with ids that occur together on neighbouring rows
(*communities*: reordered, the local information too). Batches are those of a split that the order was not made of; of
other sizes than one planted batch they are parts of it, or several together. Times are beside those of the whole on
reordered ids, so that a ratio says what it costs to leave something out.

Real rows are so few that only their prefixes are of interest: such tables need no compression.

Source: EL-Rec (SC'22) §IV, Fig. 14, 17, 18.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import reordering
from benchmarks.click_sets import Avazu, Criteo
from benchmarks.command import Report
from benchmarks.measure import summarize
from benchmarks.tensor_train_ablation import LEVELS, lookups, trainers
from rowmesh.data import Prepared, ReorderOptions, reorder
from rowmesh.data.reorder.groups import count_prefixes

REAL_MIN_ROWS, REAL_BATCH = 300, 64
WHOLE = "communities"

Batches = list[NDArray[np.int32]]
MakeCase = Callable[[int, int, int, int], Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    add = parser.add_argument
    add(
        "--planted-rows",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[100_000, 1_000_000],
        help="of --ablation: ids of planted communities, to be reordered",
    )
    add("--planted-batches", type=int, default=2000, help="of 4,096 samples each, that the order is made of")
    add("--real-data", type=Path, default=Path("../shared/data"), help="folder of criteo_kaggle and avazu")


def run(report: Report, options: argparse.Namespace, make_case: MakeCase, measure: Callable[..., Any]) -> None:
    """Planted communities by number of rows, batch size, dim and rank; then real rows."""
    for num_rows in options.planted_rows:
        orders = planted(num_rows, options)
        for batch in options.batch:
            cut = {name: regrouped(batches, batch) for name, batches in orders.items()}
            for dim in options.dim:
                for rank in options.rank:
                    case = make_case(num_rows + 1, dim, rank, batch)
                    run_case(report, case, cut, options, measure)
    for kind in (Criteo, Avazu):
        count_real(report, kind(source=options.real_data / kind.folder))


def run_case(
    report: Report, case: Any, orders: Mapping[str, Batches], options: argparse.Namespace, measure: Callable[..., Any]
) -> None:
    """Forward and training by order and arrangement, all in turns."""
    grad = torch.randn(case.batch, case.dim, generator=torch.Generator().manual_seed(0))
    kinds = {"forward": lookups(case), "train": {name: step for name, (_, step) in trainers(case, grad).items()}}
    numbers = list(range(min(map(len, orders.values()))))
    for kind, functions in kinds.items():
        arrangements = list(functions)
        whole = next(name for name in arrangements if name.startswith(list(LEVELS)[-1]))
        every: dict[tuple[str, str], Any] = {
            (order, name): _on(batches, function)
            for order, batches in orders.items()
            for name, function in functions.items()
        }
        timings = {key: summarize(seconds) for key, seconds in measure(every, numbers, options).items()}
        for (order, name), timing in timings.items():
            ratio = round(timing["step_ms"] / timings[WHOLE, whole]["step_ms"], 2)
            report.line(
                case=case.name,
                kind=kind,
                order=order,
                arrangement=name,
                **timing,
                ratio=ratio,
                **counts(orders[order], case),
            )
            if order == WHOLE or name == whole:
                report.ratio(f"planted {case.name} {kind}: {order}, {name} / all", ratio)


def _on(batches: Batches, function: Callable[[Tensor], Any]) -> Callable[[int], Any]:
    ids = [torch.from_numpy(batch.astype(np.int64)) for batch in batches]
    return lambda number: function(ids[number])


def counts(batches: Batches, case: Any) -> dict[str, float]:
    """Distinct ids and prefixes of a batch."""
    sizes = {"unique_ids": 1, "unique_prefixes": case.row_factors[2]}
    return {name: round(count_prefixes(batches, rows).mean(), 1) for name, rows in sizes.items()}


def planted(num_rows: int, options: argparse.Namespace) -> dict[str, Batches]:
    """Batches of the validation split in three orders."""
    arguments = ["--zipf", str(options.zipf), "--seed", str(options.seed)]
    how = reordering.parse([*arguments, *(["--quick"] if options.quick else [])])
    with tempfile.TemporaryDirectory() as folder:
        batches = how.batches if options.quick else options.planted_batches
        data = reordering.write_planted(Path(folder) / "planted", num_rows, batches, how)
        new = reorder(data, Path(folder) / "out", tables=("item",))
        return in_orders(data, new, "validation", "item", reordering.BATCH)


def in_orders(data: Prepared, new: Prepared, split: str, table: str, size: int) -> dict[str, Batches]:
    """The ids of a table, batch by batch: scattered, by frequency, and as reordered."""
    by_frequency, reordered = (list(reordering.batches_of(part, split, table, size)) for part in (data, new))
    scattered = np.random.default_rng(0).permutation(data.table(table).num_rows).astype(np.int32)
    return {"scattered": [scattered[ids] for ids in by_frequency], "frequency": by_frequency, WHOLE: reordered}


def regrouped(batches: Batches, size: int) -> Batches:
    """The same ids in batches of another size, in their order.

    >>> [part.tolist() for part in regrouped([np.arange(4), np.arange(4, 8)], 3)]
    [[0, 1, 2], [3, 4, 5]]
    """
    ids = np.concatenate(batches)
    return list(ids[: len(ids) // size * size].reshape(-1, size))


def count_real(report: Report, rows: Criteo | Avazu) -> None:
    """Distinct prefixes of the largest tables of real rows, in three orders."""
    if rows.missing:
        report.line(case=rows.folder, unavailable=f"{rows.source} lacks {', '.join(rows.missing)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        data = rows.prepared(Path(folder), seed=0, tuning=False)
        how = ReorderOptions(batch_size=REAL_BATCH)
        new = reorder(data, Path(folder) / "reordered", min_rows=REAL_MIN_ROWS, options=how)
        assert new.reordering is not None
        for table, facts in new.reordering["tables"].items():
            orders = in_orders(data, new, "test", table, REAL_BATCH)
            prefix_rows = facts["prefix_rows"]
            prefixes = {name: round(count_prefixes(ids, prefix_rows).mean(), 2) for name, ids in orders.items()}
            report.line(
                case=rows.folder,
                table=table,
                rows=data.table(table).num_rows,
                batch=REAL_BATCH,
                moved_ids=facts["num_ids"],
                prefix_rows=prefix_rows,
                unique_prefixes=prefixes,
            )

"""`benchmarks.tensor_train --quality`: what tensor-train tables cost in AUC, beside the paper's Table IV and Fig. 15.

The same data, first values of everything else and order of samples train a DLRM whose tables are all dense, and the
same with the large ones as cores, through an EmbeddingCollection under AdaGrad. Large are those that have 1 M rows or
more in the whole data set, which is the paper's rule. There is less data here, whose tables hold every id that it
shows, as the paper counts them; cores of a table are made as many times smaller as those of the whole one are at the
rank (`--footprint`).
Quoted is 100 · (AUC with cores − AUC of the dense model) on held-out samples, the mean over seeds with Student's 95 %
interval; and, as the paper's figures are, the same of accuracy.

Learning rates are the best of a grid on seeds of their own (`benchmarks.click_sets`): those of tables and network for
the dense model, then that of the large tables for each model by itself.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.click_sets import Avazu, Criteo, RealRows, Synthetic
from benchmarks.click_training import Clicks, Point, train
from benchmarks.command import Report
from benchmarks.paired import Interval
from benchmarks.tensor_train_footprint import MIN_ROWS, Footprint, sizes
from rowmesh.data import Prepared
from rowmesh.tables import TableSpec, TensorTrain
from rowmesh.tables.update_rules import AdaGrad

LARGE_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # of the rate of the other tables
RANKS = (128, 64)  # of the whole tables; the paper's on V100 and on T4
PAPER_LOSS_PERCENT = 0.06  # the largest in Table IV
NUM_POINTS = 8


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Learning rates.

    Attributes:
        tables: of those that are dense in every model.
        large: of the large tables, or their cores.
        network: of the dense layers.
    """

    tables: float
    large: float
    network: float


@dataclass(frozen=True, kw_only=True)
class Model:
    """How large tables are stored.

    Attributes:
        rank: that of the whole tables whose compression the cores have; None for dense tables.
        compressions: large table → how many times smaller than in the dense model it is.
    """

    rank: int | None
    compressions: dict[str, float]

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.rank else "dense"

    def specs(self, prepared: Prepared, dim: int, rates: Rates) -> list[TableSpec]:
        """The tables of a data set."""
        specs = []
        for table in prepared.tables:
            is_large = table.name in self.compressions
            rule = AdaGrad(lr=rates.large if is_large else rates.tables)
            spec = TableSpec(name=table.name, num_rows=table.num_rows, dim=dim, optimizer=rule)
            if is_large and self.rank:
                cores = TensorTrain(compression=self.compressions[table.name])
                spec = replace(spec, storage="tensor_train", tensor_train=cores)
            specs.append(spec)
        return specs


@dataclass(frozen=True, kw_only=True)
class Case:
    """A data set and how it is trained on.

    Attributes:
        name: as it stands in reports.
        shape: which of the paper's data sets it stands for.
        data: what makes it.
        batch_size, epochs: of training.
        seeds, tuning_seeds: how many are reported, and how many choose the learning rates.
        lrs, network_lrs: what is tried, of tables and network.
        large_factors: and of large tables, times the rate of the others.
        ranks: of the models beside the dense one.
    """

    name: str
    shape: str
    data: Synthetic | RealRows
    batch_size: int
    epochs: int = 1
    seeds: int
    tuning_seeds: int
    lrs: tuple[float, ...]
    network_lrs: tuple[float, ...]
    large_factors: tuple[float, ...] = LARGE_FACTORS
    ranks: tuple[int, ...] = RANKS

    @property
    def dim(self) -> int:
        """Of the tables, the paper's."""
        return Footprint.of(self.shape).dim

    @property
    def models(self) -> list[Model]:
        """Those that are compared; the dense one first."""
        return [self._model(None), *map(self._model, self.ranks)]

    def _model(self, rank: int | None) -> Model:
        footprint = Footprint.of(self.shape)
        found = footprint.compressions(rank or RANKS[0], MIN_ROWS[0])
        if isinstance(self.data, Synthetic):  # whose tables are C1, C2, …
            found = {f"C{list(footprint.tables).index(name) + 1}": ratio for name, ratio in found.items()}
        return Model(rank=rank, compressions=found)

    def clicks(self, seed: int, *, tuning: bool) -> AbstractContextManager[Clicks]:
        """The data of a seed."""
        return Clicks.of(self.data, seed, tuning=tuning, batch_size=self.batch_size, epochs=self.epochs)


def cases(options: argparse.Namespace) -> list[Case]:
    """What is run."""
    folder = options.quality_data
    criteo, avazu = (kind(source=folder / kind.folder, min_count=1) for kind in (Criteo, Avazu))
    if options.quick:
        few: dict[str, Any] = {
            "seeds": 2,
            "tuning_seeds": 1,
            "lrs": (0.04,),
            "network_lrs": (0.001,),
            "large_factors": (1.0,),
            "ranks": RANKS[:1],
        }
        drawn = _drawn("kaggle", 16_384, 16_384)
        return [
            Case(name="synthetic Kaggle", shape="kaggle", data=drawn, batch_size=256, **few),
            Case(name="Criteo, 1 epoch", shape="kaggle", data=criteo, batch_size=64, **few),
        ]
    some: dict[str, Any] = {
        "batch_size": 512,
        "seeds": options.quality_seeds,
        "tuning_seeds": 2,
        "lrs": (0.01, 0.02, 0.04, 0.08),
        "network_lrs": (0.001, 0.002, 0.004),
        "large_factors": LARGE_FACTORS[1:5],
    }
    many: dict[str, Any] = {
        "batch_size": 64,
        "seeds": 3 * options.quality_seeds,
        "tuning_seeds": 2,
        "lrs": tuple(0.00125 * 2**n for n in range(9)),
        "network_lrs": (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016),
    }
    kaggle, terabyte = (_drawn(shape, samples, 131_072) for shape, samples in _samples(options.quality_samples).items())
    more = [_case_of_more(options)] if options.quality_more_samples else []
    return [
        *more,
        Case(name="synthetic Kaggle", shape="kaggle", data=kaggle, **some),
        Case(name="synthetic Terabyte", shape="terabyte", data=terabyte, **some),
        Case(name="Criteo, 1 epoch", shape="kaggle", data=criteo, **many),
        Case(name="Criteo, 2 epochs", shape="kaggle", data=criteo, epochs=2, **many),
        Case(name="Avazu, 1 epoch", shape="avazu", data=avazu, **many),
    ]


def _case_of_more(options: argparse.Namespace) -> Case:
    """Whether the loss stays where tables, and with them ranks, are larger; tuned around what fewer samples chose."""
    return Case(
        name="more of synthetic Kaggle",
        shape="kaggle",
        data=_drawn("kaggle", options.quality_more_samples, 262_144),
        batch_size=512,
        seeds=options.quality_seeds,
        tuning_seeds=1,
        lrs=(0.02, 0.04),
        network_lrs=(0.001, 0.002),
        large_factors=LARGE_FACTORS[1:4],
        ranks=RANKS[:1],
    )


def _samples(most: int) -> dict[str, int]:
    """How many each shape is trained on; fewer where dim is 64, which takes longer."""
    return {"kaggle": most, "terabyte": most // 2}


def _drawn(shape: str, samples: int, held_out: int) -> Synthetic:
    """Planted clicks on as many ids as the tables of a data set have; frequent ones have effects of their own."""
    rows = tuple(Footprint.of(shape).tables.values())
    return Synthetic(samples=samples, held_out=held_out, rows=rows, head=5_000, min_count=1)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this case."""
    add = parser.add_argument
    add("--quality", action="store_true", help="instead: AUC of models with cores beside dense ones")
    add("--quality-samples", type=int, default=524_288, help="synthetic samples to train on")
    add("--quality-more-samples", type=int, default=0, help="a case of so many more, at the first rank alone")
    add("--quality-seeds", type=int, default=8, help="seeds on synthetic samples; on real rows three times as many")
    add("--quality-cases", default="", help="only those whose names contain this")
    add("--quality-data", type=Path, default=Path("../shared/data"), help="folder of criteo_kaggle and avazu")


def run(report: Report, options: argparse.Namespace) -> None:
    """Every case; a data set that is not there is said to be unavailable."""
    for case in cases(options):
        if options.quality_cases not in case.name:
            continue
        if isinstance(case.data, RealRows) and case.data.missing:
            reason = f"{case.data.source} lacks {', '.join(case.data.missing)}"
            report.line(quality="case", case=case.name, unavailable=reason)
            report.ratio(f"AUC {case.name}", None)
            continue
        _run_case(report, case, _tuned(report, case))


def _run_case(report: Report, case: Case, rates: dict[str, Rates]) -> None:
    ends: dict[str, list[Point]] = {str(model): [] for model in case.models}
    optima: list[dict[str, float]] = []
    for seed in range(case.seeds):
        with case.clicks(seed, tuning=False) as clicks:
            if seed == 0:
                _report_sizes(report, case, clicks.prepared)
            optima += [clicks.prepared.splits["test"].optimum or {}]
            for model in case.models:
                began = time.process_time()
                points = _trained(case, model, clicks, rates[str(model)], seed, NUM_POINTS)
                ends[str(model)].append(points[-1])
                report.line(
                    quality="curve",
                    case=case.name,
                    seed=seed,
                    model=str(model),
                    cpu_s=round(time.process_time() - began, 1),
                    points=[point.as_record() for point in points],
                )
    for model in case.models:
        _report_quality(report, case, model, ends, optima)


def _trained(case: Case, model: Model, clicks: Clicks, rates: Rates, seed: int, num_points: int) -> list[Point]:
    return train(model.specs(clicks.prepared, case.dim, rates), clicks, rates.network, seed, num_points)


def _report_sizes(report: Report, case: Case, prepared: Prepared) -> None:
    """Of the first seed's tables, and how many times smaller they and those of the whole data set are."""
    rows = {table.name: table.num_rows for table in prepared.tables}
    dense = sum(rows.values()) * case.dim
    footprint = Footprint.of(case.shape)
    for model in case.models[1:]:
        specs = model.specs(prepared, case.dim, Rates(tables=0.0, large=0.0, network=0.0))
        shapes = {spec.name: spec.tensor_train_shape for spec in specs if spec.storage == "tensor_train"}
        cores = sum(shape.num_parameters for shape in shapes.values())
        large = sum(shape.num_rows for shape in shapes.values()) * case.dim
        whole, smaller, _ = sizes(list(footprint.tables.values()), case.dim, model.rank or 0, MIN_ROWS[0])
        report.line(
            quality="sizes",
            case=case.name,
            model=str(model),
            dim=case.dim,
            rows=sum(rows.values()),
            train_samples=prepared.splits["train"].samples,
            held_out_samples=prepared.splits["test"].samples,
            large={name: {"rows": shape.num_rows, "ranks": shape.ranks} for name, shape in shapes.items()},
            large_times_smaller=round(large / cores, 2),
            times_smaller=round(dense / (dense - large + cores), 2),
            whole_times_smaller=round(whole / smaller, 2),
        )


def _report_quality(
    report: Report, case: Case, model: Model, ends: dict[str, list[Point]], optima: list[dict[str, float]]
) -> None:
    """Means over seeds, and differences to the dense model of the same seed."""
    found, dense = ends[str(model)], ends["dense"]
    line: dict[str, Any] = {"quality": "model", "case": case.name, "model": str(model)}
    for name in ("auc", "log_loss", "accuracy"):
        line[name] = round(float(np.mean([getattr(point, name) for point in found])), 5)
        if all(optima) and name in optima[0]:
            line[f"planted_{name}"] = round(float(np.mean([optimum[name] for optimum in optima])), 5)
    if model.rank:
        for name in ("auc", "log_loss", "accuracy"):
            interval = difference_percent(found, dense, name)
            line[f"{name}_difference_percent"] = interval.as_record()
            if name == "auc":
                line |= {"paper_loss_percent": PAPER_LOSS_PERCENT, "loses_at_most_the_papers": verdict(interval)}
                report.ratio(f"AUC {case.name}: 100 x difference of {model} to dense", round(interval.mean, 4))
    report.line(**line)


def difference_percent(points: Sequence[Point], dense: Sequence[Point], name: str) -> Interval:
    """100 · (value − value of the dense model of the same seed)."""
    return Interval.of([100 * (getattr(a, name) - getattr(b, name)) for a, b in zip(points, dense, strict=True)])


def verdict(interval: Interval) -> bool | None:
    """Whether the loss is at most the paper's; None where the interval leaves it open.

    >>> [verdict(Interval(mean, 0.02, 8)) for mean in (-0.03, -0.05, -0.1)]
    [True, None, False]
    """
    if interval.mean - interval.half >= -PAPER_LOSS_PERCENT:
        return True
    return False if interval.mean + interval.half < -PAPER_LOSS_PERCENT else None


def _tuned(report: Report, case: Case) -> dict[str, Rates]:
    """The best learning rates of each model, by mean log loss of held-out samples over the tuning seeds."""
    dense = case.models[0]
    grid = [
        Rates(tables=lr, large=lr, network=network) for lr, network in itertools.product(case.lrs, case.network_lrs)
    ]
    with ExitStack() as stack:
        clicks = [stack.enter_context(case.clicks(seed, tuning=True)) for seed in range(case.tuning_seeds)]
        common = _best(report, case, dense, clicks, grid)
        large = [replace(common, large=common.tables * factor) for factor in case.large_factors]
        return {str(model): _best(report, case, model, clicks, large) for model in case.models}


def _best(report: Report, case: Case, model: Model, clicks: list[Clicks], grid: list[Rates]) -> Rates:
    losses: dict[Rates, float] = {}
    for rates in grid:
        found = [_trained(case, model, each, rates, seed, 1)[-1].log_loss for seed, each in enumerate(clicks)]
        losses[rates] = float(np.mean(found))
    best = min(grid, key=losses.__getitem__)
    report.line(
        quality="tuning",
        case=case.name,
        model=str(model),
        **vars(best),
        seeds=case.tuning_seeds,
        at_edge=[name for name, rate in vars(best).items() if _is_at_edge(rate, [vars(r)[name] for r in grid])],
        grid=[{**vars(rates), "log_loss": round(losses[rates], 6)} for rates in grid],
    )
    return best


def _is_at_edge(rate: float, tried: Sequence[float]) -> bool:
    return min(tried) < max(tried) and rate in (min(tried), max(tried))

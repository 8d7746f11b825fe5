"""FuXi-α trained in turn, in pipelines, by micro-batches and on several ranks: the same model; with stale rows: not.

    python -m benchmarks.sequence_consistency --data ../shared/data/sequences
    python -m benchmarks.sequence_consistency --quick     few events that are drawn, one and two ranks
    python -m benchmarks.sequence_consistency --chart docs/assets/sequence_consistency.svg --lines LINES

Likes of KuaiRand, leave one out: curves of the loss of every step, and of HR@10 and NDCG@10 of the test split, where
all items are ranked but those that the user has seen. Item vectors come from an `EmbeddingCollection` with pooling
"none"; rows and network learn by Adam. The loss is a softmax over the target and negatives of the user's own, so that
it does not depend on which users are in a micro-batch. There is no dropout, whose draws do.

The control looks rows up one or two steps before they are read, and does not correct them, as asynchronous systems do.
Every way is trained on the first seed, those of the chart on all; differences to the plain loop are paired by seed,
with Student's 95 % interval. A difference where the promise allows none is an error. Source: NestPipe Fig. 6.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.command import Report
from benchmarks.contestant import Contestant
from benchmarks.curves import Points, chart
from benchmarks.paired import Interval
from benchmarks.ranks import sequence_consistency as of_rank
from benchmarks.ranks.sequence_consistency import Settings, Way
from benchmarks.workload import Workload
from rowmesh.data.events import EventSchema, prepare_events
from rowmesh.data.events.schema import Positive
from rowmesh.mesh import Mesh

FILE = "kuairand27k_likes_kcore15.tsv.gz"
LIKES = EventSchema(
    user="user_id",
    item="video_id",
    time="time_ms",
    time_unit="ms",
    delimiter="\t",
    positive=Positive(column="label"),
)
PLAIN = "plain loop"
RANKINGS = ("hr@10", "ndcg@10")
METRICS = {"loss": "training loss", "hr@10": "HR@10", "ndcg@10": "NDCG@10"}
TOLERANCE = {"float64": 1e-9, "float32": math.inf}
"""Of the loss of a step, relative: 1e-12 a step in float64, which training carries on; in float32 it may carry on to
anything."""
PAPER_ALLOWS = 0.3e-3
"""Of HR@10 and NDCG@10."""


class DifferenceError(Exception):
    """Two ways that promise the same model trained two."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way, on so many ranks.

    Attributes:
        name: as it stands in reports.
        ranks: processes.
        way: how they train.
        bits_of: the case whose model this is to the bit; "": that of the plain loop to rounding.
        is_drawn: whether it is in the chart, and so trained on all seeds.
        differs: whether it trains another model, on purpose.
    """

    name: str
    ranks: int = 1
    way: Way = field(default_factory=Way)
    bits_of: str = ""
    is_drawn: bool = False
    differs: bool = False


Ask = Callable[..., list[dict[str, Any]]]
BOTH = Way(depth=1, micro_batches=4)
CASES = (
    Case(name=PLAIN, is_drawn=True),
    Case(name="depth 1", way=Way(depth=1), bits_of=PLAIN),
    Case(name="4 micro-batches", way=Way(depth=0, micro_batches=4)),
    Case(name="depth 1, 4 micro-batches", way=BOTH, bits_of="4 micro-batches", is_drawn=True),
    Case(name="2 ranks", ranks=2),
    Case(name="2 ranks, one-sided", ranks=2, way=Way(transport="one_sided"), bits_of="2 ranks"),
    Case(name="2 ranks, depth 1", ranks=2, way=Way(depth=1), bits_of="2 ranks"),
    Case(name="2 ranks, depth 1, 4 micro-batches", ranks=2, way=BOTH),
    Case(name="4 ranks", ranks=4),
    Case(name="4 ranks, depth 1", ranks=4, way=Way(depth=1), bits_of="4 ranks"),
    Case(name="4 ranks, depth 1, 4 micro-batches", ranks=4, way=BOTH, is_drawn=True),
    Case(name="1 step stale", way=Way(stale=1), is_drawn=True, differs=True),
    Case(name="2 steps stale", way=Way(stale=2), is_drawn=True, differs=True),
)


@dataclass(frozen=True, eq=False)
class Found:
    """What a training gave: losses of all steps, metrics by step, a digest and the tensors of its model."""

    losses: list[float]
    points: list[dict[str, float]]
    digest: str
    model: list[Tensor]

    def mean(self, metric: str) -> float:
        """Over all steps, or evaluations: the height of the curve."""
        return float(np.mean(self.losses if metric == "loss" else [point[metric] for point in self.points]))

    def curves(self) -> list[dict[str, float]]:
        """At every evaluation, the loss as the mean over the steps since the one before."""
        means = np.split(self.losses, [int(point["step"]) for point in self.points])
        return [
            {"step": int(point["step"]), "loss": float(steps.mean()), **{n: point[n] for n in RANKINGS}}
            for point, steps in zip(self.points, means[:-1], strict=True)
        ]


def main(arguments: list[str] | None = None) -> None:
    """Trains all ways, or draws the chart of lines that were written."""
    options = _parse(arguments)
    if options.chart is not None:
        options.chart.write_text(draw(map(json.loads, options.lines.read_text("utf-8").splitlines())), "utf-8")
        return
    torch.set_num_threads(1)
    report = Report("sequence_consistency", options.output)
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_events([_file(options, Path(folder))], Path(folder) / "events", LIKES)
        for dtype in options.dtypes:
            settings = _settings(options, str(data.folder), dtype)
            compare(report, settings, [case for case in CASES if case.ranks <= options.most_ranks], options.seeds)
    report.finish()


def compare(report: Report, settings: Settings, cases: list[Case], seeds: int) -> None:
    """Trains every case and reports how far it is from what it is to be.

    Raises:
        DifferenceError: further than promised.
    """
    found: dict[tuple[str, int], Found] = {}
    for ranks in sorted({case.ranks for case in cases}):
        with _ranks(ranks) as ask:
            for case in (case for case in cases if case.ranks == ranks):
                for seed in range(seeds if case.is_drawn else 1):
                    found[case.name, seed] = result = train(ask, replace(settings, seed=seed), case.way)
                    about = {"dtype": settings.dtype, "seed": seed, "ranks": ranks}
                    report.line(curve=case.name, **about, points=_rounded(result.curves()))
                _judge(report, settings.dtype, case, found)
    for case in cases:
        if case.is_drawn and case.name != PLAIN:
            _differ(report, settings.dtype, case, found, seeds)


@contextmanager
def _ranks(count: int) -> Iterator[Ask]:
    """What has a rank, or several, run a training; one is this process."""
    if count == 1:
        yield lambda **arguments: [of_rank.train(Mesh(), **arguments)]
        return
    with Contestant(f"{count} ranks", of_rank.__name__, Workload(), ranks=count) as program:
        program.connect(time.monotonic() + 120.0)
        yield partial(program.ask, "train")


def train(ask: Ask, settings: Settings, way: Way) -> Found:
    """One training on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "model.pt")
        answers = ask(settings=asdict(settings), way=asdict(way), file=file)
        if any(answer != answers[0] for answer in answers):
            raise DifferenceError("ranks end with models, or metrics, that differ")
        return Found(**answers[0], model=torch.load(file))


def _judge(report: Report, dtype: str, case: Case, found: Mapping[tuple[str, int], Found]) -> None:
    """Of the first seed: how far a case is from that whose bits it has, and from the plain loop."""
    mine, plain = found[case.name, 0], found[PLAIN, 0]
    line: dict[str, Any] = {"way": case.name, "dtype": dtype, "steps": len(mine.losses)}
    if case.bits_of:
        same = found[case.bits_of, 0]
        line |= {"bits_of": case.bits_of, "is_equal": mine.digest == same.digest and mine.losses == same.losses}
    line["loss"] = max(abs(a - b) / abs(b) for a, b in zip(mine.losses, plain.losses, strict=True))
    line["parameters"] = max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine.model, plain.model, strict=True)
    )
    for metric in RANKINGS:
        pairs = zip(mine.points, plain.points, strict=True)
        line[metric] = max(abs(a[metric] - b[metric]) for a, b in pairs)
    report.line(**line)
    if not line.get("is_equal", True):
        raise DifferenceError(f"{case.name} does not train the model of {case.bits_of} to the bit")
    limits = {"loss": TOLERANCE[dtype], **dict.fromkeys(RANKINGS, PAPER_ALLOWS if dtype == "float64" else math.inf)}
    for name, limit in limits.items():
        if not case.differs and line[name] > limit:
            raise DifferenceError(f"{case.name}: {name} differs from the plain loop's by {line[name]:.2g}")


def _differ(report: Report, dtype: str, case: Case, found: Mapping[tuple[str, int], Found], seeds: int) -> None:
    """Over all seeds: how much higher or lower the curves are than the plain loop's, on the mean over steps."""
    line: dict[str, Any] = {}
    for metric in METRICS:
        pairs = [(found[case.name, seed].mean(metric), found[PLAIN, seed].mean(metric)) for seed in range(seeds)]
        line[metric] = {
            "plain": round(float(np.mean([plain for _, plain in pairs])), 5),
            **Interval.of([mine - plain for mine, plain in pairs]).as_record(),
        }
    report.line(difference=case.name, dtype=dtype, **line)
    report.ratio(f"{case.name}, {dtype}: loss minus the plain loop's", line["loss"]["mean"])


def draw(lines: Iterable[Mapping[str, Any]], dtype: str = "float64") -> str:
    """The chart of what a run wrote: means over the seeds. What is the same model is drawn on top of the plain loop."""
    found: dict[str, list[Any]] = {}
    for line in lines:
        if "curve" in line and line["dtype"] == dtype:
            found.setdefault(line["curve"], []).append(line["points"])
    drawn = [case for case in CASES if case.is_drawn and case.name in found]
    drawn.sort(key=lambda case: (case.name != PLAIN, not case.differs))
    curves: dict[str, dict[str, Points]] = {
        title: {case.name: _mean_points(found[case.name], metric) for case in drawn}
        for metric, title in METRICS.items()
    }
    return chart(curves, "steps", names="below")


def _mean_points(seeds: list[list[dict[str, float]]], metric: str) -> Points:
    steps = [point["step"] for point in seeds[0]]
    means = np.mean([[point[metric] for point in points] for points in seeds], axis=0).tolist()
    return list(zip(steps, means, strict=True))


def _rounded(points: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: round(value, 6) for name, value in point.items()} for point in points]


def _settings(options: argparse.Namespace, folder: str, dtype: str) -> Settings:
    if options.quick:
        small: dict[str, Any] = {"dim": 8, "blocks": 1, "max_length": 20, "negatives": 8, "batch_size": 8}
        return Settings(folder=folder, dtype=dtype, epochs=1, evaluate_every=2, **small)
    return Settings(folder=folder, dtype=dtype, epochs=options.epochs, lr=options.lr)


def _file(options: argparse.Namespace, folder: Path) -> Path:
    """The likes; in a quick run without them some that are drawn."""
    if options.data is not None:
        return options.data / FILE
    generator, file = np.random.default_rng(0), folder / FILE
    with gzip.open(file, "wt") as rows:
        rows.write("user_id\tvideo_id\ttime_ms\tlabel\n")
        for user in range(32):
            for step in range(int(generator.integers(5, 25))):
                rows.write(f"{user}\t{int(generator.integers(60))}\t{1000 * step}\t1\n")
    return file


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help=f"folder with {FILE}")
    add("--epochs", type=int, default=15, help="over the users, of 21 steps each")
    add("--lr", type=float, default=5e-3, help="of Adam, of rows and network")
    add("--seeds", type=int, default=5, help="trainings of each way that is in the chart")
    add("--dtypes", nargs="+", choices=list(TOLERANCE), default=list(TOLERANCE), help="of rows and network")
    add("--most-ranks", type=int, default=4, help="leave out ways with more")
    add("--quick", action="store_true", help="few events, 2 seeds, 2 ranks at most; ends within 30 s")
    add("--output", type=Path, help="also append the lines to this file")
    add("--chart", type=Path, help="only draw what --lines has, as an SVG")
    add("--lines", type=Path, help="what --output wrote")
    options = parser.parse_args(arguments)
    if (options.chart is None) != (options.lines is None):
        parser.error("--chart and --lines go together")
    if options.quick:
        options.seeds, options.most_ranks, options.dtypes = 2, 2, ["float64"]
    elif options.chart is None and options.data is None:
        parser.error(f"--data is needed: the folder with {FILE}")
    return options


if __name__ == "__main__":
    main()

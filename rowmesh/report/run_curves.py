"""How well a run learned: curves over steps, ROC and calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate

import numpy as np

from rowmesh.observe.step_clock import STAGES
from rowmesh.report.html import card, data_table, section
from rowmesh.report.line_chart import Line, Point, line_chart
from rowmesh.report.run_record import RANKING, Result, thinned
from rowmesh.report.shown import Shown
from rowmesh.run.score_bins import ScoreBins

CALIBRATION_BINS, DENSITY_CELLS = 15, 40
GIGABYTE = 1e9
CLICK_KEYS = ("base_rate", "auc", "log_loss", "normalized_entropy", "calibration")
VALUE_KEYS = ("mean_label", "mean_prediction", "rmse", "mae", "baseline_rmse", "baseline_mae")
RANKING_KEYS = {"ndcg@10": "NDCG@10", "hr@10": "HR@10", "ndcg@50": "NDCG@50", "hr@50": "HR@50", "mrr": "MRR"}
NAMES = {"loss": "loss", "log_loss": "log-loss", "auc": "AUC", "rmse": "RMSE", "mae": "MAE", **RANKING_KEYS}


def curves_section(runs: Sequence[Shown]) -> str:
    """Numbers over the steps."""
    charts = "".join(_charts(runs))
    return section("Over the steps", "", f'<div class="grid-cards">{charts}</div>') if charts else ""


def _charts(runs: Sequence[Shown]) -> Iterator[str]:
    losses = _lines(runs, "loss", "loss")
    if len(runs) == 1:
        losses += [
            Line(f"{_titled(NAMES[key], name, split)}", runs[0].record.series(name, split), style, dots=True)
            for split in runs[0].record.evaluations
            if not runs[0].record.names(RANKING, split)  # whose loss is another one: 1 − NDCG@10
            for key in ("loss", "log_loss")
            for name, style in zip(runs[0].record.names(key, split)[:3], "bcd", strict=False)
        ]
    yield card("Loss of training", line_chart("loss", losses))
    for split in dict.fromkeys(split for run in runs for split in run.record.evaluations):
        is_ranking = any(run.record.names(RANKING, split) for run in runs)
        for key in RANKING_KEYS if is_ranking else ("loss", "log_loss", "auc", "rmse", "mae"):
            for name in dict.fromkeys(name for run in runs for name in run.record.names(key, split)):
                if len(runs) > 1 or key not in ("loss", "log_loss"):
                    lines = _lines(runs, name, NAMES[key], split)
                    yield card(capital(_titled(NAMES[key], name, split)), line_chart(NAMES[key], lines))
    rates = _lines(runs, "samples_per_s", "samples/s", text="{:,.0f}")
    yield card("Samples a second", line_chart("samples a second", rates, from_zero=True))
    if any(run.record.step_ms for run in runs):
        yield card("Milliseconds a step", line_chart("milliseconds a step", _step_times(runs), from_zero=True))
    yield card("Learning rates", line_chart("learning rates", _learning_rates(runs), from_zero=True))
    memory = _lines(runs, "memory_bytes", "memory", text="{:.3g} GB", scale=1 / GIGABYTE)
    yield card("Memory of all ranks, GB", line_chart("memory", memory, from_zero=True))


def _titled(number: str, name: str, split: str) -> str:
    """As in "AUC, validation", or of one of several labels "AUC, validation, click"."""
    label = name.partition("/")[2]
    return f"{number}, {split}" + (f", {label}" if label else "")


def capital(text: str) -> str:
    """With a capital first letter."""
    return text[:1].upper() + text[1:]


def _lines(
    runs: Sequence[Shown],
    name: str,
    what: str,
    split: str | None = None,
    *,
    text: str = "{:.5f}",
    scale: float = 1.0,
) -> list[Line]:
    """A line for each run, named after it where there are two."""
    return [
        Line(
            what if len(runs) == 1 else run.name,
            [(x, scale * y) for x, y in thinned(run.record.series(name, split))],
            run.style,
            text,
            dots=split is not None,
        )
        for run in runs
    ]


def _step_times(runs: Sequence[Shown]) -> list[Line]:
    """The whole step; of one run the network too."""
    names = [f"step_ms/{stage}" for stage in STAGES]
    lines = []
    for run in runs:
        series = [dict(run.record.series(name)) for name in names]
        whole = [(step, sum(of.get(step, 0.0) for of in series)) for step in series[0]]
        name = "whole step" if len(runs) == 1 else run.name
        lines.append(Line(name, thinned(whole), run.style, "{:.3g} ms"))
    if len(runs) == 1:
        lines.append(Line("network", thinned(runs[0].record.series("step_ms/network")), "c", "{:.3g} ms"))
    return lines


def _learning_rates(runs: Sequence[Shown]) -> list[Line]:
    if len(runs) > 1:
        return _lines(runs, "lr", "network", text="{:.3g}")
    record = runs[0].record
    groups = sorted({key for line in record.train for key in line if key.startswith("embedding_lr/")})[:3]
    found = [("network", "lr"), *((key.partition("/")[2], key) for key in groups)]
    return [
        Line(name, thinned(record.series(key)), style, "{:.3g}")
        for (name, key), style in zip(found, "abcd", strict=False)
    ]


def quality_section(runs: Sequence[Shown]) -> str:
    """The metrics of the evaluated splits, and curves of the first."""
    found = [(run, _first_with_bins(run)) for run in runs if run.record.results]
    curves = [(run, result, result.score_bins) for run, result in found if result.score_bins is not None]
    charts = ""
    if curves:
        splits = " and ".join(dict.fromkeys(result.split for _, result, _ in curves))
        roc = [Line(_curve_name(run, runs, "model"), roc_curve(bins), run.style) for run, _, bins in curves]
        charts = (
            '<div class="grid-cards">'
            + card(f"ROC, {splits}", _roc_chart(roc, [result for _, result, _ in curves]))
            + card(f"Calibration, {splits}", _calibration_chart(runs, [(run, bins) for run, _, bins in curves]))
            + card(f"Predictions, {splits}", _density_chart(runs, [(run, bins) for run, _, bins in curves]))
            + "</div>"
        )
    note = (
        "ROC: of the positives, the share above a threshold, by that of the negatives. Calibration: the share of "
        "positives by the probability that was predicted, with 95 % intervals; the diagonal is right. Predictions: how "
        "they are spread over the samples of each label."
    )
    return section("Quality", note if charts else "", charts, _results_table(runs))


def _first_with_bins(run: Shown) -> Result:
    """The result of the first label that is 0 or 1; without such a label, the first result."""
    results = run.record.results
    return next((result for result in results if result.score_bins is not None), results[0])


def _curve_name(run: Shown, runs: Sequence[Shown], alone: str) -> str:
    return alone if len(runs) == 1 else run.name


def _roc_chart(lines: Sequence[Line], results: Sequence[Result]) -> str:
    named = [
        Line(f"{line.name}, AUC {result.numbers.get('auc', float('nan')):.5f}", line.points, line.style, text="")
        for line, result in zip(lines, results, strict=True)
    ]
    return line_chart("ROC curve", named, x_name="false positive rate", square=True)


def _calibration_chart(runs: Sequence[Shown], curves: Sequence[tuple[Shown, ScoreBins]]) -> str:
    lines = []
    for run, bins in curves:
        points, errors = calibration_curve(bins)
        lines.append(Line(_curve_name(run, runs, "model"), points, run.style, dots=True, text="", errors=errors))
    return line_chart("calibration", lines, x_name="predicted", square=True, legend=len(lines) > 1)


def _density_chart(runs: Sequence[Shown], curves: Sequence[tuple[Shown, ScoreBins]]) -> str:
    """How predictions of positives and negatives are spread; of two runs, those of positives."""
    lines = []
    for run, bins in curves:
        positive = [float(hits) for hits in bins.positives]
        negative = [float(n - hits) for n, hits in zip(bins.samples, bins.positives, strict=True)]
        if len(runs) > 1:
            lines.append(Line(f"{run.name}, positives", density(bins, positive), run.style, text=""))
        else:
            lines = [
                Line("negatives", density(bins, negative), "a", text=""),
                Line("positives", density(bins, positive), "b", text=""),
            ]
    return line_chart("density of predictions", lines, x_name="predicted", from_zero=True, whole=True)


def density(bins: ScoreBins, counts: Sequence[float], cells: int = DENSITY_CELLS) -> list[Point]:
    """Counts of bins over equally wide cells of predicted probability, as a density.

    >>> bins = ScoreBins(highest=(-30.0, 0.0), samples=(0, 4), positives=(0, 4), predicted=(0.0, 1.0))
    >>> [(x, round(height, 6)) for x, height in density(bins, [0.0, 4.0], cells=2)]
    [(0.125, 2.0), (0.375, 2.0)]
    """
    bounds = np.concatenate([[0.0], 1 / (1 + np.exp(-np.clip(bins.highest, -500, 500)))])
    total, top = sum(counts), float(bounds[-1])
    if not total or not top:
        return []
    cuts = np.linspace(0.0, top, cells + 1)
    below = np.interp(cuts, bounds, np.concatenate([[0.0], np.cumsum(counts)]))
    heights = np.diff(below) / total / (top / cells)
    return list(zip(((cuts[1:] + cuts[:-1]) / 2).tolist(), heights.tolist(), strict=True))


def roc_curve(bins: ScoreBins) -> list[Point]:
    """(false positive rate, true positive rate) at the thresholds between bins, from the highest down.

    Empty where one of the classes is absent.

    >>> bins = ScoreBins(highest=(0.0, 1.0), samples=(3, 2), positives=(1, 1), predicted=(1.0, 1.0))
    >>> roc_curve(bins)
    [(0.0, 0.0), (0.3333333333333333, 0.5), (1.0, 1.0)]
    """
    positives, negatives = sum(bins.positives), sum(bins.samples) - sum(bins.positives)
    if not positives or not negatives:
        return []
    true = accumulate(reversed(bins.positives), initial=0)
    seen = accumulate(reversed(bins.samples), initial=0)
    return [((all_seen - hits) / negatives, hits / positives) for hits, all_seen in zip(true, seen, strict=True)]


def calibration_curve(bins: ScoreBins, most: int = CALIBRATION_BINS) -> tuple[list[Point], list[float]]:
    """(mean prediction, share of positives) of neighbouring bins taken together, and half 95 % intervals of the shares.

    >>> bins = ScoreBins(highest=(0.0, 1.0), samples=(50, 50), positives=(10, 30), predicted=(12.0, 28.0))
    >>> calibration_curve(bins)[0], calibration_curve(bins, most=1)[0]
    ([(0.24, 0.2), (0.56, 0.6)], [(0.4, 0.4)])
    """
    total, points, errors = sum(bins.samples), [], []
    samples = positives = done = 0
    predicted = 0.0
    for n, hits, sum_ in zip(bins.samples, bins.positives, bins.predicted, strict=True):
        samples, positives, predicted, done = samples + n, positives + hits, predicted + sum_, done + n
        if done * most >= total * (len(points) + 1):
            share = positives / samples
            points.append((predicted / samples, share))
            errors.append(1.96 * (max(share * (1 - share), 0.25 / samples) / samples) ** 0.5)
            samples = positives = 0
            predicted = 0.0
    return points, errors


def _results_table(runs: Sequence[Shown]) -> str:
    rows, values, rankings = [], [], []
    for run in runs:
        for result in run.record.results:
            dot = f'<span class="dot {run.style}"></span>' if len(runs) > 1 else ""
            if result.is_ranking:
                rankings += [[f"{dot}{row[0]}", *row[1:]] for row in _ranking_rows(result)]
                continue
            if not result.is_click:
                values.append([f"{dot}{escape(result.split)}", *_cells(result.numbers, VALUE_KEYS)])
                continue
            rows.append([f"{dot}{escape(result.split)}", *_cells(result.numbers)])
            if result.optimum:
                best = {key: value for key, value in result.optimum.items() if key in ("auc", "log_loss")}
                rows.append(
                    [f'<span class="soft">{escape(result.split)}, best that can be reached</span>', *_cells(best)]
                )
    heads = ["split", "samples", "base rate", "AUC", "log-loss", "norm. entropy", "calibration"]
    value_heads = ["split", "samples", "mean", "of predictions", "RMSE", "MAE", "RMSE of the mean", "MAE of the mean"]
    ranking_heads = ["split", "predictions", *RANKING_KEYS.values(), "NDCG@10, 95 % interval"]
    tables = ((heads, rows), (value_heads, values), (ranking_heads, rankings))
    return "".join(data_table(head, each) for head, each in tables if each)


def _ranking_rows(result: Result) -> Iterator[list[str]]:
    """Yields the scores of the model, of the best ranking that can be reached, and of popularity."""
    keys, interval = tuple(RANKING_KEYS), result.intervals.get(RANKING)
    text = f"{interval[0]:.5f} to {interval[1]:.5f}" if interval else ""
    yield [escape(result.split), *_cells(result.numbers, keys), text]
    for name, numbers in (("best that can be reached", result.optimum), ("popularity", result.floor)):
        if numbers:
            yield [f'<span class="soft">{escape(result.split)}, {name}</span>', *_cells(numbers, keys), ""]


def _cells(numbers: Mapping[str, float], keys: Sequence[str] = CLICK_KEYS) -> list[str]:
    samples = f"{numbers['samples']:,.0f}" if "samples" in numbers else ""
    return [samples, *(f"{numbers[key]:.5f}" if key in numbers else "" for key in keys)]

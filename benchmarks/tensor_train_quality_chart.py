"""Draws the curves that `benchmarks.tensor_train --quality --output LINES` wrote: held-out log loss by samples seen.

    python -m benchmarks.tensor_train_quality_chart LINES CHART.svg

A panel a case, means over its seeds. Source: EL-Rec (SC'22) Fig. 15.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 3, 280, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 24, 26  # margins of a panel
SHOWN = "log_loss"
STYLE = """text{font:11px sans-serif;fill:#555}.title{font-weight:600}polyline{fill:none;stroke-width:1.6}
.grid{stroke:#999;stroke-opacity:.35}.m0{stroke:#555}.m1{stroke:#1f77b4}.m2{stroke:#e4572e;stroke-dasharray:5 3}
@media(prefers-color-scheme:dark){text{fill:#bbb}.m0{stroke:#ccc}}"""

Points = list[tuple[float, float]]


def mean_curves(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Points]]:
    """Case → model → (samples, mean over the seeds).

    >>> line = {"quality": "curve", "case": "a", "model": "dense"}
    >>> mean_curves({**line, "points": [{"samples": 8, "log_loss": loss}]} for loss in (0.25, 0.75))
    {'a': {'dense': [(8.0, 0.5)]}}
    """
    found: dict[str, dict[str, list[Any]]] = {}
    for line in lines:
        if line.get("quality") == "curve":
            points = [(point["samples"], point[SHOWN]) for point in line["points"]]
            found.setdefault(line["case"], {}).setdefault(line["model"], []).append(points)
    return {
        case: {model: [tuple(point) for point in np.mean(seeds, axis=0).tolist()] for model, seeds in models.items()}
        for case, models in found.items()
    }


def chart(curves: Mapping[str, Mapping[str, Points]]) -> str:
    """All panels as one SVG."""
    rows = -(-len(curves) // COLUMNS)
    panels = [
        f'<g transform="translate({number % COLUMNS * PANEL_WIDTH} {number // COLUMNS * PANEL_HEIGHT})">'
        f"{''.join(panel(case, models))}</g>"
        for number, (case, models) in enumerate(curves.items())
    ]
    size = f'viewBox="0 0 {COLUMNS * PANEL_WIDTH} {rows * PANEL_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{"".join(panels)}</svg>\n'


def panel(case: str, models: Mapping[str, Points]) -> Iterable[str]:
    """Title, axes, a line a model and their names."""
    every = np.array([point for points in models.values() for point in points])
    low, high = every[:, 1].min(), every[:, 1].max()
    across, down = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM

    def place(samples: float, value: float) -> tuple[float, float]:
        return LEFT + across * samples / every[:, 0].max(), TOP + down * (high - value) / ((high - low) or 1.0)

    yield f'<text class="title" x="{LEFT}" y="14">{escape(case)}</text>'
    for value in np.linspace(low, high, 4):
        _, y = place(0, value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{PANEL_WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{value:.3f}</text>'
    for number, (model, points) in enumerate(models.items()):
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        yield f'<polyline class="m{number}" points="{places}"><title>{escape(model)}</title></polyline>'
    yield from _legend(list(models), TOP + 10)
    end = f"{every[:, 0].max():,.0f} samples"
    yield f'<text x="{PANEL_WIDTH - RIGHT}" y="{PANEL_HEIGHT - 10}" text-anchor="end">{end}</text>'


def _legend(models: Sequence[str], top: float) -> Iterable[str]:
    start = PANEL_WIDTH - 92
    for number, model in enumerate(models):
        y = top + 15 * number
        yield f'<polyline class="m{number}" points="{start},{y} {start + 20},{y}"/>'
        yield f'<text x="{start + 25}" y="{y + 4}">{escape(model)}</text>'


def main(arguments: list[str] | None = None) -> None:
    """Reads lines, writes a chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("chart", type=Path)
    options = parser.parse_args(arguments)
    lines = map(json.loads, options.lines.read_text(encoding="utf-8").splitlines())
    options.chart.write_text(chart(mean_curves(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()

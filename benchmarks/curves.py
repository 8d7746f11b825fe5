"""Curves as an SVG: panels side by side, a line a model, without a plotting library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Literal

import numpy as np

COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 3, 280, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 24, 26  # margins of a panel
LINE = 15  # between names
STYLE = """text{font:11px sans-serif;fill:#555}.title{font-weight:600}polyline{fill:none;stroke-width:1.6}
.grid{stroke:#999;stroke-opacity:.35}.m0{stroke:#555}.m1{stroke:#1f77b4}.m2{stroke:#e4572e;stroke-dasharray:5 3}
.m3{stroke:#2a9d5c;stroke-dasharray:2 6}.m4{stroke:#d4a017;stroke-dasharray:2 6;stroke-dashoffset:4}
@media(prefers-color-scheme:dark){text{fill:#bbb}.m0{stroke:#ccc}}"""

Points = list[tuple[float, float]]


def chart(curves: Mapping[str, Mapping[str, Points]], unit: str, names: Literal["inside", "below"] = "inside") -> str:
    """All panels as one SVG.

    Args:
        curves: title of a panel → model → points. At most five models; the last two are dotted, so that lines below
            them stay visible.
        unit: of what is across.
        names: of models: in every panel, or once below all of them.
    """
    rows = -(-len(curves) // COLUMNS)
    panels = [
        f'<g transform="translate({number % COLUMNS * PANEL_WIDTH} {number // COLUMNS * PANEL_HEIGHT})">'
        f"{''.join(panel(case, models, unit, is_named=names == 'inside'))}</g>"
        for number, (case, models) in enumerate(curves.items())
    ]
    height = rows * PANEL_HEIGHT
    if names == "below":
        models = list(next(iter(curves.values())))
        panels += _legend(models, LEFT, height + 10)
        height += LINE * len(models) + 10
    size = f'viewBox="0 0 {COLUMNS * PANEL_WIDTH} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{"".join(panels)}</svg>\n'


def panel(case: str, models: Mapping[str, Points], unit: str, *, is_named: bool) -> Iterable[str]:
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
    if is_named:
        yield from _legend(list(models), PANEL_WIDTH - 92, TOP + 10)
    end = f"{every[:, 0].max():,.0f} {unit}"
    yield f'<text x="{PANEL_WIDTH - RIGHT}" y="{PANEL_HEIGHT - 10}" text-anchor="end">{end}</text>'


def _legend(models: Sequence[str], start: float, top: float) -> Iterable[str]:
    for number, model in enumerate(models):
        y = top + LINE * number
        yield f'<polyline class="m{number}" points="{start},{y} {start + 20},{y}"/>'
        yield f'<text x="{start + 25}" y="{y + 4}">{escape(model)}</text>'

"""Draws the curves that `benchmarks.tensor_train --quality --output LINES` wrote: held-out log loss by samples seen.

    python -m benchmarks.tensor_train_quality_chart LINES CHART.svg

A panel a case, means over its seeds. Source: EL-Rec (SC'22) Fig. 15.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from benchmarks.command import draw_file
from benchmarks.curves import Points, chart

SHOWN = "log_loss"


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


def main(arguments: list[str] | None = None) -> None:
    """Reads lines, writes a chart."""
    draw_file(__doc__, lambda lines: chart(mean_curves(lines), "samples"), arguments)


if __name__ == "__main__":
    main()

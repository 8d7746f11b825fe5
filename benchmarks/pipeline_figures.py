"""Draws what `benchmarks.pipeline --ablation --sweep --output LINES` wrote, beside the paper's numbers.

    python -m benchmarks.pipeline_figures LINES CHART.svg

Panels: the speed-up of every mode; exposed communication by micro-batches, by layers and by dimension; utilisation.
The paper's numbers are those of its text and tables; what it only draws is left out.

Source: NestPipe §VII, Table II and Fig. 8 to 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.command import draw_file

COLUMNS, WIDTH, HEIGHT = 2, 420, 210
LEFT, RIGHT, TOP, BOTTOM = 34, 10, 26, 22  # margins of a panel
LINE = 14  # between names
COLOURS = ("#1f77b4", "#e4572e", "#2a9d5c", "#8a8a8a", "#d4a017")
STYLE = """text{font:11px sans-serif;fill:#555}.title{font-weight:600}.value{font-size:9px}
.axis{stroke:#999;stroke-opacity:.5}@media(prefers-color-scheme:dark){text{fill:#bbb}}"""

# Table II. UniEmb prefetches rows, which may be stale, and hides no messages: it stands beside the look-ahead.
PAPER_STEP_MS = {
    "paper, 1,536 NPUs": {"off": 5793.83, "look-ahead": 2919.76, "both": 1895.98},
    "paper, 128 GPUs": {"off": 4207.94, "look-ahead": 3384.05, "both": 3090.45},
}
PAPER_NAIVE = {32: 0.252}  # §VII-E: micro-batches of 16 of a batch of 512, without clusters
PAPER_LAYERS = {2: 0.279, 8: 146.23 / 1169.8}  # §VII-E
PAPER_WIDEST = 0.129  # §VII-E: at the largest dimension, 1,024
PAPER_UTILISATION = {"off": 0.296, "both": 0.9}  # Fig. 8 on 1,536 workers: TorchRec, and NestPipe, "above 90 %"
OURS, PAPER = "here", "paper"

Line = Mapping[str, Any]
Values = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class Panel:
    """Bars in groups.

    Attributes:
        title: what is shown.
        groups: names below the bars.
        values: name of a series → a value for every group; None: no bar.
    """

    title: str
    groups: Sequence[str]
    values: Values


def draw(lines: Iterable[Line]) -> str:
    """All panels for which there are lines, as one SVG."""
    lines = [line for line in lines if "mode" in line]
    panels = [*_modes(lines), *_micro_batches(lines), *_layers(lines), *_dims(lines), *_utilisation(lines)]
    rows = -(-len(panels) // COLUMNS)
    parts = [
        f'<g transform="translate({number % COLUMNS * WIDTH} {number // COLUMNS * HEIGHT})">{"".join(_bars(panel))}</g>'
        for number, panel in enumerate(panels)
    ]
    size = f'viewBox="0 0 {COLUMNS * WIDTH} {rows * HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{"".join(parts)}</svg>\n'


def _modes(lines: Sequence[Line]) -> Iterator[Panel]:
    """The best of each mode."""
    found = best(line for line in lines if line["case"] == "ablation")
    if names := [name for name in ("off", "look-ahead", "window", "both", "paper") if name in found]:
        values = {OURS: [found[name]["speedup"] for name in names]}
        for source, step_ms in PAPER_STEP_MS.items():
            values[source] = [step_ms["off"] / step_ms[name] if name in step_ms else None for name in names]
        shown = ["paper's form" if name == "paper" else name for name in names]
        yield Panel("speed-up over a step in turn", shown, values)


def best(lines: Iterable[Line]) -> dict[str, Line]:
    """Mode → the line with the largest speed-up.

    >>> best([{"mode": "both", "speedup": 1.5}, {"mode": "both", "speedup": 2.0}])
    {'both': {'mode': 'both', 'speedup': 2.0}}
    """
    found: dict[str, Line] = {}
    for line in lines:
        if line["mode"] not in found or line["speedup"] > found[line["mode"]]["speedup"]:
            found[line["mode"]] = line
    return found


def _micro_batches(lines: Sequence[Line]) -> Iterator[Panel]:
    """Exposed communication by N."""
    lines = [line for line in lines if line["case"] == "ablation" and line["micro_batches"] > 1]
    if counts := sorted({line["asked_micro_batches"] for line in lines}):
        values: dict[str, list[float | None]] = {}
        for mode in ("both", "paper"):
            for is_clustered in (False, True):
                name = ("each row once" if mode == "both" else "paper's form") + ", clustered" * is_clustered
                of = [each for each in lines if (each["mode"], each["is_clustered"]) == (mode, is_clustered)]
                values[name] = [_least(each for each in of if each["asked_micro_batches"] == count) for count in counts]
        values["paper, not clustered"] = [PAPER_NAIVE.get(count) for count in counts]
        yield Panel("exposed communication by micro-batches", [f"N={count}" for count in counts], values)


def _layers(lines: Sequence[Line]) -> Iterator[Panel]:
    """Exposed communication by layers of the network."""
    lines = [line for line in lines if line["case"] == "layers" and line["mode"] == "both"]
    if layers := sorted({line["layers"] for line in lines}):
        mine = [_least(line for line in lines if line["layers"] == count) for count in layers]
        theirs = [PAPER_LAYERS.get(count) for count in layers]
        yield Panel("exposed communication by layers", [str(count) for count in layers], {OURS: mine, PAPER: theirs})


def _dims(lines: Sequence[Line]) -> Iterator[Panel]:
    """Exposed communication by dimension."""
    lines = [line for line in lines if line["case"] == "dim" and line["mode"] == "both"]
    if dims := sorted({line["dim"] for line in lines}):
        mine = [_least(line for line in lines if line["dim"] == dim) for dim in dims]
        theirs = [None] * (len(dims) - 1) + [PAPER_WIDEST]
        values: Values = {OURS: mine, "paper, dim 1,024": theirs}
        yield Panel("exposed communication by dimension", [f"dim {dim}" for dim in dims], values)


def _utilisation(lines: Sequence[Line]) -> Iterator[Panel]:
    """Utilisation in turn, and of the best of both."""
    found = best(line for line in lines if line["case"] == "ablation")
    if names := [name for name in ("off", "look-ahead", "window", "both") if name in found]:
        mine = [found[name]["utilisation"] for name in names]
        theirs = [PAPER_UTILISATION.get(name) for name in names]
        yield Panel("utilisation", names, {OURS: mine, "paper, 1,536 NPUs": theirs})


def _least(lines: Iterable[Line]) -> float | None:
    """The exposed share of the fastest line."""
    return (min(lines, key=lambda line: line["step_ms"], default={})).get("exposed")


def _bars(panel: Panel) -> Iterator[str]:
    """Title, bars with their values, names."""
    known = [value for values in panel.values.values() for value in values if value is not None]
    high, down = max([*known, 1e-9]), HEIGHT - TOP - BOTTOM - LINE * _num_rows(panel)
    group_width = (WIDTH - LEFT - RIGHT) / len(panel.groups)
    bar_width = 0.8 * group_width / len(panel.values)
    floor = TOP + LINE * _num_rows(panel) + down
    yield f'<text class="title" x="{LEFT}" y="14">{escape(panel.title)}</text>'
    yield f'<path class="axis" d="M{LEFT} {floor:.1f}H{WIDTH - RIGHT}"/>'
    for number, (name, values) in enumerate(panel.values.items()):
        colour = COLOURS[number % len(COLOURS)]
        x, y = LEFT + number % 3 * 128, TOP + LINE * (number // 3)
        yield f'<rect x="{x}" y="{y - 6}" width="8" height="8" fill="{colour}"/>'
        yield f'<text x="{x + 12}" y="{y + 2}">{escape(name)}</text>'
        for group, value in enumerate(values):
            if value is None:
                continue
            height = max(0.9 * down * value / high, 0.0)
            x = LEFT + group * group_width + 0.1 * group_width + number * bar_width
            shape = f'x="{x:.1f}" y="{floor - height:.1f}" width="{bar_width:.1f}" height="{height:.1f}"'
            yield f'<rect {shape} fill="{colour}"><title>{escape(name)}: {value:.3f}</title></rect>'
            where = f'x="{x + bar_width / 2:.1f}" y="{floor - height - 2:.1f}" text-anchor="middle"'
            yield f'<text class="value" {where}>{f"{value:.2f}".removeprefix("0")}</text>'
    for group, name in enumerate(panel.groups):
        x = LEFT + (group + 0.5) * group_width
        yield f'<text x="{x:.1f}" y="{floor + 14:.1f}" text-anchor="middle">{escape(name)}</text>'


def _num_rows(panel: Panel) -> int:
    """Rows of names, three in each."""
    return -(-len(panel.values) // 3)


def main(arguments: list[str] | None = None) -> None:
    """Reads lines, writes a chart."""
    draw_file(__doc__, draw, arguments)


if __name__ == "__main__":
    main()

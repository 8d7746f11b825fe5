"""Charts of the placement report as inline SVG: frequency curves, bars of ranks, heatmaps of links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

import numpy as np

from rowmesh.placement.plan import TablePlan
from rowmesh.placement.profile import TableProfile
from rowmesh.placement.summary import LEVEL_OF, stretches
from rowmesh.report.drawing import LogAxis, grid, svg

MAX_POINTS = 160
SHADES = 12
MAX_RANKS_WITH_TITLES = 16


def frequency_curve(table: TablePlan, profile: TableProfile, width: int = 320, height: int = 190) -> str:
    """How often each row was read, most frequent first, on logarithmic axes; colours are levels."""
    read = profile.accesses > 0
    num_read = int(profile.lengths[read].sum())
    if not num_read:
        return '<p class="note">not read at all</p>'
    least, most = float(profile.accesses[read].min()), float(profile.accesses.max())
    x = LogAxis(1, max(table.shape.num_rows, 2), 34, width - 8)
    y = LogAxis(least / 1.3, most * 1.3, height - 22, 8)
    parts = [grid(x, y, width, height)]
    if not _falls(profile):
        parts += _curve_of_sorted_rows(table, profile, x, y, height - 22)
    rare = _is_rare_row_frequent(profile)
    in_order = stretches(table) if _falls(profile) else []
    for level, runs in groupby(in_order, key=lambda stretch: LEVEL_OF[stretch.rule]):
        found = list(runs)
        start, stop = found[0].start, min(found[-1].stop, table.shape.num_rows - rare)
        if start < stop:
            parts.append(_curve_of_level(level, start, stop, profile, x, y, height - 22))
    if rare and in_order:
        parts.append(_rare_row(table, float(profile.accesses[-1]), x, y))
    title = f"{table.name}: accesses by row, from {most:,.0f} to {least:,.0f}; {num_read:,} rows were read"
    return svg(width, height, title, parts)


def _falls(profile: TableProfile) -> bool:
    """Whether rows stand in order of frequency, but for the last one, which may stand for all rare ids."""
    return bool(np.all(np.diff(profile.accesses[:-1]) <= 0))


def _curve_of_sorted_rows(
    table: TablePlan, profile: TableProfile, x: LogAxis, y: LogAxis, bottom: float
) -> Iterator[str]:
    """The curve of rows in no order, the most read first, in the colours of those that are drawn."""
    order = np.argsort(-profile.accesses, kind="stable")
    stops = np.cumsum(profile.lengths[order])
    places = np.unique(np.geomspace(1, table.shape.num_rows, MAX_POINTS).round().astype(np.int64)) - 1
    runs = order[np.searchsorted(stops, places, "right")]
    starts = np.array([part.start for part in table.ranges])
    ranges = np.searchsorted(starts, profile.starts[runs], "right") - 1
    levels = [LEVEL_OF[table.ranges[number].rule] for number in ranges.tolist()]
    for level, group in groupby(range(len(places)), key=levels.__getitem__):
        found = list(group)
        found.append(min(found[-1] + 1, len(places) - 1))  # where the next level begins
        yield _drawn(level, [(int(places[i]), float(profile.accesses[runs[i]])) for i in found], x, y, bottom)


def _is_rare_row_frequent(profile: TableProfile) -> bool:
    """Whether the last row, which stands for all rare ids, is read more than the one before it."""
    return len(profile.accesses) > 1 and profile.lengths[-1] == 1 and profile.accesses[-1] > profile.accesses[-2]


def _rare_row(table: TablePlan, accesses: float, x: LogAxis, y: LogAxis) -> str:
    last = table.shape.num_rows - 1
    level = LEVEL_OF[table.range_of(last).rule]
    return (
        f'<circle class="rare {level}" cx="{x(last + 1):.1f}" cy="{y(accesses):.1f}" r="4">'
        f"<title>row {last:,}, for all rare ids: {accesses:,.0f} accesses</title></circle>"
    )


def _curve_of_level(
    level: str, start: int, stop: int, profile: TableProfile, x: LogAxis, y: LogAxis, bottom: float
) -> str:
    rows = np.unique(np.geomspace(start + 1, stop, MAX_POINTS).round().astype(np.int64)) - 1
    rows = np.append(rows, min(stop, profile.shape.num_rows - 1))  # where the next level begins
    accesses = profile.accesses[np.searchsorted(profile.starts, np.minimum(rows, stop - 1), "right") - 1]
    return _drawn(level, list(zip(rows.tolist(), accesses.tolist(), strict=True)), x, y, bottom)


def _drawn(level: str, rows: Sequence[tuple[int, float]], x: LogAxis, y: LogAxis, bottom: float) -> str:
    """A line through (row, accesses), and the area under it."""
    points = [(x(row + 1), y(count) if count else bottom) for row, count in rows]
    line = "L".join(f"{a:.1f} {b:.1f}" for a, b in _thinned(points))
    area = f"M{points[0][0]:.1f} {bottom}L{line}L{points[-1][0]:.1f} {bottom}Z"
    return f'<path class="area {level}" d="{area}"/><path class="line {level}" d="M{line}"/>'


def _thinned(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Without points that lie on the line between their neighbours."""
    for index, point in enumerate(points):
        if 0 < index < len(points) - 1 and points[index - 1][1] == point[1] == points[index + 1][1]:
            continue
        yield point


def bars(values: Sequence[float], scale: float, texts: Sequence[str], limit: float | None = None) -> str:
    """The bars of all ranks on a common scale, with a line at the limit; a pointer shows the texts.

    Bars above the limit, or that go off the scale, have another colour.
    """
    width, height = 320, 46
    step = width / len(values)
    gap = min(1.5, step * 0.2)
    parts = []
    for rank, (value, text) in enumerate(zip(values, texts, strict=True)):
        size = height * min(value / scale, 1.0) if scale else 0.0
        over = " over" if value > (scale if limit is None else limit) else ""
        parts.append(
            f'<rect class="bar{over}" x="{rank * step:.2f}" y="{height - size:.2f}" width="{step - gap:.2f}" '
            f'height="{size:.2f}"><title>rank {rank}: {escape(text)}</title></rect>'
        )
    if limit is not None and limit <= scale:
        at = height * (1 - limit / scale)
        parts.append(f'<path class="limit" d="M0 {at:.2f}H{width}"/>')
    parts.append(f'<path class="base" d="M0 {height}H{width}"/>')
    return svg(width, height, "", parts, "bars")


def heatmap(matrix: np.ndarray, scale: float, ranks_per_node: int, text: str) -> str:
    """A heat map of the bytes that rank i (row) receives from rank j (column): shades of one colour up to `scale`."""
    W = len(matrix)
    shades = np.clip(np.ceil(matrix / scale * SHADES), 0, SHADES).astype(int) if scale else np.zeros((W, W), int)
    cells = _cells_with_titles(shades, matrix) if W <= MAX_RANKS_WITH_TITLES else _cells(shades)
    parts = [f'<rect class="cells" width="{W}" height="{W}"/>', *cells]
    if ranks_per_node < W:
        cuts = "".join(f"M{n} 0V{W}M0 {n}H{W}" for n in range(ranks_per_node, W, ranks_per_node))
        parts.append(f'<path class="nodes" d="{cuts}"/>')
    return svg(W, W, text, parts, "heat")


def _cells_with_titles(shades: np.ndarray, matrix: np.ndarray) -> Iterator[str]:
    for (i, j), shade in np.ndenumerate(shades):
        yield (
            f'<rect class="cell" x="{j}" y="{i}" width="1" height="1" fill-opacity="{shade / SHADES:.2f}">'
            f"<title>rank {i} from rank {j}: {matrix[i, j]:,.0f} B</title></rect>"
        )


def _cells(shades: np.ndarray) -> Iterator[str]:
    """The path of each shade, with a strip for every run of equal cells in a row."""
    strips: dict[int, list[str]] = {}
    for i, row in enumerate(shades.tolist()):
        column = 0
        for shade, cells in groupby(row):
            size = len(list(cells))
            strips.setdefault(shade, []).append(f"M{column} {i}h{size}v1h-{size}z")
            column += size
    for shade, found in sorted(strips.items()):
        if shade:
            yield f'<path class="cell" fill-opacity="{shade / SHADES:.2f}" d="{"".join(found)}"/>'

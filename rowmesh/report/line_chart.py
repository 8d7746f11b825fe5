"""Line charts: numbers over steps, and curves of one number over another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rowmesh.report.drawing import Axis, grid, svg

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 340, 200, 42, 8, 22, 8
MAX_HOVERED = 80
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        name: what it is.
        points: (x, y) with x ascending.
        style: a colour of the style sheet: a, b, c or d; or "limit", dashed.
        text: of its y, as in "{:,.0f}".
        dots: whether points are marked.
        errors: of each point, how far up and down it may be.
    """

    name: str
    points: Sequence[Point]
    style: str = "a"
    text: str = "{:.5g}"
    dots: bool = False
    errors: Sequence[float] = ()


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_name: str = "step",
    from_zero: bool = False,
    square: bool = False,
    whole: bool = False,
    legend: bool = True,
) -> str:
    """Lines over common axes, with what a pointer shows and a legend below; a note where there are no points.

    The y axis fits the points after the first tenth, since losses begin high; points outside it are cut off.

    Args:
        title: describes the chart to readers who do not see it.
        lines: to draw; those without points are left out.
        x_name: what x is.
        from_zero: whether y begins at 0.
        square: whether both axes go from 0 to the same number, with a diagonal.
        whole: whether no point is cut off.
        legend: whether the lines are named below.
    """
    drawn = [line for line in lines if line.points]
    if not drawn:
        return '<p class="note">not recorded</p>'
    x, y = _axes(drawn, from_zero, square, whole)
    inner = [_path(line, x, y) + _dots(line, x, y, x_name) for line in drawn]
    if square:
        inner.insert(0, f'<path class="diagonal" d="M{x(x.low):.1f} {y(y.low):.1f}L{x(x.high):.1f} {y(y.high):.1f}"/>')
    plot = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
    parts = [
        grid(x, y, WIDTH, HEIGHT, LEFT),
        # Its own frame, which cuts off what is out of range.
        f'<svg class="plot" x="{LEFT}" y="{TOP - 4}" width="{plot[0] + 4}" height="{plot[1] + 8}" '
        f'viewBox="{LEFT} {TOP - 4} {plot[0] + 4} {plot[1] + 8}">{"".join(inner)}</svg>',
    ]
    return svg(WIDTH, HEIGHT, f"{title}, by {x_name}", parts) + (_legend(drawn) if legend else "")


def _axes(lines: Sequence[Line], from_zero: bool, square: bool, whole: bool) -> tuple[Axis, Axis]:
    xs = [x for line in lines for x, _ in line.points]
    late = [y for line in lines for _, y in line.points[0 if whole else len(line.points) // 10 :]]
    low, high = min(late), max(late)
    if square:
        top = max(*xs, *(y for line in lines for _, y in line.points)) if max(xs) < 0.9 else 1.0
        return Axis(0, top, LEFT, WIDTH - RIGHT), Axis(0, top, HEIGHT - BOTTOM, TOP)
    pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = (0.0 if from_zero else low - pad), high + pad
    return Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT), Axis(low, high, HEIGHT - BOTTOM, TOP)


def _path(line: Line, x: Axis, y: Axis) -> str:
    points = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in line.points)
    kind = "limit" if line.style == "limit" else f"line {line.style}"
    return f'<path class="{kind}" d="M{points}"/>'


def _dots(line: Line, x: Axis, y: Axis, x_name: str) -> str:
    """Marks of points, or places that show a point's values to a pointer."""
    found = [
        f'<path class="line thin {line.style}" d="M{x(a):.1f} {y(b - error):.1f}V{y(b + error):.1f}"/>'
        for (a, b), error in zip(line.points, line.errors, strict=False)
    ]
    every = -(-len(line.points) // MAX_HOVERED)
    kind = f"mark {line.style}" if line.dots else "hover"
    for a, b in line.points[::every]:
        text = f"{line.name}: {line.text.format(b)} at {x_name} {a:,.5g}"
        found.append(
            f'<circle class="{kind}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="{2.6 if line.dots else 6}">'
            f"<title>{escape(text)}</title></circle>"
        )
    return "".join(found)


def _legend(lines: Sequence[Line]) -> str:
    texts = (
        f'<span><span class="dot {line.style}"></span>{escape(line.name)} '
        f"<b>{escape(line.text.format(line.points[-1][1]))}</b></span>"
        for line in lines
    )
    return f'<div class="levels">{"".join(texts)}</div>'

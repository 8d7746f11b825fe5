"""Drawing: axes with ticks, and the frame of inline SVG.

Colours are classes and custom properties of the pages' style sheet, so that one file serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_UNITS = {1e9: "G", 1e6: "M", 1e3: "k"}


@dataclass(frozen=True)
class LogAxis:
    """Positions of numbers from `low` to `high` on a logarithmic axis from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = math.log(self.high / self.low) or 1.0
        share = math.log(max(value, self.low) / self.low) / span
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 5) -> Iterator[tuple[float, str]]:
        """Powers of ten in the range, thinned out, with their labels."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        step = max(1, -(-(last - first + 1) // most))
        for power in range(first, last + 1, step):
            text = f"{10**power:g}" if -2 <= power <= 3 else "10" + str(power).translate(_SUPERSCRIPT)
            yield self(10.0**power), text


@dataclass(frozen=True)
class Axis:
    """Positions of numbers from `low` to `high` on an even axis from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.start)

    def ticks(self, most: int = 5) -> Iterator[tuple[float, str]]:
        """Round numbers in the range, with their labels.

        >>> [text for _, text in Axis(0.43, 0.7, 0, 1).ticks()]
        ['0.5', '0.6', '0.7']
        >>> [text for _, text in Axis(0, 12_500, 0, 1).ticks(4)]
        ['0', '5k', '10k']
        """
        span = self.high - self.low
        if not span > 0:
            yield self(self.low), compact(self.low, 0.0)
            return
        rough = span / most
        base = 10.0 ** math.floor(math.log10(rough))
        step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough * 0.999)
        for number in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1):
            yield self(number * step), compact(number * step, step)


def compact(value: float, step: float) -> str:
    """A number of an axis whose ticks are `step` apart.

    >>> compact(0.5, 0.25), compact(2000.0, 500.0), compact(3e6, 1e6)
    ('0.50', '2k', '3M')
    """
    unit = next((size for size in _UNITS if abs(value) >= size and step >= size / 1000), 1.0)
    if unit > 1:
        return f"{value / unit:.6g}{_UNITS[unit]}"
    places = max(0, -math.floor(math.log10(step) + 1e-9)) if step else 3
    if step and abs(step * 10**places - round(step * 10**places)) > 1e-6:
        places += 1  # 0.25
    return f"{value:.{min(places, 7)}f}"


def grid(x: Axis | LogAxis, y: Axis | LogAxis, width: int, height: int, left: int = 34) -> str:
    """Lines and labels of both axes; the plot is right of `left`, and 22 above the bottom."""
    bottom = height - 22
    lines = [
        f'<path class="grid" d="M{at:.1f} 8V{bottom}"/><text class="tick" x="{at:.1f}" y="{height - 8}" '
        f'text-anchor="middle">{label}</text>'
        for at, label in x.ticks()
    ]
    lines += [
        f'<path class="grid" d="M{left} {at:.1f}H{width - 8}"/><text class="tick" x="{left - 4}" y="{at + 3.5:.1f}" '
        f'text-anchor="end">{label}</text>'
        for at, label in y.ticks(4)
    ]
    return "".join(lines)


def svg(width: float, height: float, title: str, parts: Sequence[str], kind: str = "chart") -> str:
    """The frame; bars are stretched to the width of where they are."""
    label = f' role="img" aria-label="{escape(title)}"' if title else ' aria-hidden="true"'
    stretch = ' preserveAspectRatio="none"' if kind == "bars" else ""
    return f'<svg class="{kind}" viewBox="0 0 {width} {height}"{stretch}{label}>{"".join(parts)}</svg>'

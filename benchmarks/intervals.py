"""Intervals of time: how long something was under way, and for how long nothing else was.

Imports neither rowmesh nor a peer.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
"""Begin and end, in seconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Joins intervals that meet; returns them in order.

    >>> union([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (3.0, 3.5), (6.0, 6.0)])
    [(0.0, 3.5), (4.0, 5.0)]
    """
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif begin < end:
            joined.append((begin, end))
    return joined


def within(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """Cuts intervals off at two moments.

    >>> within([(0.0, 2.0), (3.0, 4.0)], 1.0, 3.0)
    [(1.0, 2.0)]
    """
    cut = ((max(first, begin), min(last, end)) for first, last in intervals)
    return [(first, last) for first, last in cut if first < last]


def seconds(intervals: Iterable[Interval]) -> float:
    """How long at least one of them lasts.

    >>> seconds([(0.0, 2.0), (1.0, 3.0), (4.0, 5.0)])
    4.0
    """
    return sum(end - begin for begin, end in union(intervals))


def exposed_s(intervals: Iterable[Interval], hiding: Iterable[Interval]) -> float:
    """How long intervals last while none of the others does.

    >>> exposed_s([(0.0, 3.0), (5.0, 6.0)], [(2.0, 5.5)])
    2.5
    """
    mine, others = list(intervals), list(hiding)
    return seconds([*mine, *others]) - seconds(others)

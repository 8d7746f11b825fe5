"""Ranges of row numbers, by arithmetic: no array as long as a table."""

from __future__ import annotations

import math


def intersect(saved: range, wanted: range) -> tuple[range, range] | None:
    """Where the numbers that two ascending ranges share stand in each, or None.

    >>> intersect(range(1, 20, 2), range(0, 16, 3))
    (range(1, 8, 3), range(1, 6, 2))
    >>> [range(1, 20, 2)[i] for i in range(1, 8, 3)], [range(0, 16, 3)[i] for i in range(1, 6, 2)]
    ([3, 9, 15], [3, 9, 15])
    """
    if not saved or not wanted or saved[-1] < wanted.start or wanted[-1] < saved.start:
        return None
    divisor = math.gcd(saved.step, wanted.step)
    ahead, rest = divmod(wanted.start - saved.start, divisor)
    if rest:
        return None
    saved_step, wanted_step = wanted.step // divisor, saved.step // divisor
    first = ahead * pow(wanted_step, -1, saved_step) % saved_step  # of those at or after the start of `saved`
    short = wanted.start - saved[first] if first < len(saved) else 0
    if short > 0:
        first += -(-short // (saved_step * saved.step)) * saved_step
    if first >= len(saved) or saved[first] > wanted[-1]:
        return None
    other = (saved[first] - wanted.start) // wanted.step
    count = min((len(saved) - 1 - first) // saved_step, (len(wanted) - 1 - other) // wanted_step) + 1
    return (
        range(first, first + (count - 1) * saved_step + 1, saved_step),
        range(other, other + (count - 1) * wanted_step + 1, wanted_step),
    )

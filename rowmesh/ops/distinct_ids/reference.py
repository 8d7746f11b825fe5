"""Distinct ids with dictionaries: what the kernel is compared with."""

from __future__ import annotations

from collections.abc import Sequence


def distinct(
    ids: Sequence[int], weights: Sequence[int], parts: Sequence[int], num_parts: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Ids by part, their counts, which of them each entry is, and where parts begin; `parts` has that of each entry."""
    counts: dict[int, int] = {}
    part_of = dict(zip(ids, parts, strict=True))
    for i, weight in zip(ids, weights, strict=True):
        counts[i] = counts.get(i, 0) + weight
    found = sorted(counts, key=part_of.__getitem__)
    bounds = [sum(part_of[i] < part for i in found) for part in range(num_parts + 1)]
    return found, [counts[i] for i in found], [found.index(i) for i in ids], bounds

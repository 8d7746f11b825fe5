"""Decisions and results of the window kernels, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

FINAL = 0


def choose_phases(uses: Sequence[int], form: str, num_parts: int) -> tuple[list[int], list[int]]:
    """The phases in which each row is fetched, and those in which its gradient is pushed, as masks."""
    fetches, pushes = [], []
    for mask in uses:
        used = [phase for phase in range(1, num_parts + 1) if mask >> phase & 1]
        fetched, pushed = {"delta": (used[:1], used[-1:]), "naive": (used, used)}.get(form, ([1], [num_parts]))
        fetches.append(sum(1 << phase for phase in fetched))
        pushes.append(sum(1 << phase for phase in pushed))
    return fetches, pushes


def sort_phases(masks: Sequence[int], bounds: Sequence[int], own: int, num_phases: int) -> list[list[list[int]]]:
    """The entries of each phase and member, in their order; none of this rank's own."""
    return [
        [
            [e for e in range(begin, end) if member != own and masks[e] >> phase & 1]
            for member, (begin, end) in enumerate(pairwise(bounds))
        ]
        for phase in range(num_phases)
    ]


def mark_final(slots: Sequence[int], fetches: Sequence[int], touched: dict[int, int], number: int) -> list[int]:
    """The masks of entries, those of rows that the window before does not touch replaced."""
    return [
        mask if touched.get(slot, 0) == number - 1 else 1 << FINAL for slot, mask in zip(slots, fetches, strict=True)
    ]


def intersect(keys: Sequence[int], others: Sequence[int]) -> list[int]:
    """Where each key stands among the others, or −1."""
    position = {other: index for index, other in enumerate(others)}
    return [position.get(key, -1) for key in keys]

"""What the window kernels decide and find, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

FINAL = 31


def choose_phases(uses: Sequence[int], form: str, num_parts: int) -> tuple[list[int], list[int]]:
    """The phases in which each row is fetched, and those in which its gradient is pushed, as masks."""
    fetches, pushes = [], []
    for mask in uses:
        parts = [part for part in range(num_parts) if mask >> part & 1]
        fetched, pushed = {"delta": (parts[:1], parts[-1:]), "naive": (parts, parts)}.get(form, ([0], [num_parts - 1]))
        fetches.append(sum(1 << part for part in fetched))
        pushes.append(sum(1 << part for part in pushed))
    return fetches, pushes


def mark_final(slots: Sequence[int], fetches: Sequence[int], touched: dict[int, int], number: int) -> list[int]:
    """The masks of entries, those of rows that the window before does not touch replaced."""
    return [
        mask if touched.get(slot, 0) == number - 1 else 1 << FINAL for slot, mask in zip(slots, fetches, strict=True)
    ]


def intersect(keys: Sequence[int], others: Sequence[int]) -> list[int]:
    """Where each key stands among the others, or −1."""
    position = {other: index for index, other in enumerate(others)}
    return [position.get(key, -1) for key in keys]

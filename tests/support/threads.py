"""Work in several threads at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_threads(work: Callable[[int], object], count: int) -> None:
    """`work(0)`, …, `work(count - 1)`, each in a thread of its own; raises what any of them raised."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))

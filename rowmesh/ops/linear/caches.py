"""Caches of oneDNN: how many operators it keeps, each made for matrices of one size.

oneDNN, and what torch has around it, keep 1,024 each. Where every batch has another number of rows, as with sequences
of events, none of them is used again, and they grow by half a megabyte with every product that a step computes.
"""

from __future__ import annotations

import os

VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
CAPACITY = 256
"""Enough for the products of 80 layers whose sizes do not change."""


def bound_caches() -> None:
    """Has this process keep CAPACITY operators in each cache, where the environment does not say how many.

    Both read the environment with the first product of the process: call it before.

    Example:
        >>> bound_caches()
        >>> set(VARIABLES) <= set(os.environ)
        True
    """
    for name in VARIABLES:
        os.environ.setdefault(name, str(CAPACITY))

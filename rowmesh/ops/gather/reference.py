"""Gather in plain torch."""

from torch import Tensor


def gather(table: Tensor, slots: Tensor) -> Tensor:
    """`table[slots]`."""
    return table[slots]

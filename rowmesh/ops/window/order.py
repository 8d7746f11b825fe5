"""Order: requests as they travel, sorted by phase, then by rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor


class Order:
    """The contents of each message. Both ends of a message sort alike: both know the micro-batches that use every row.

    Args:
        entries: which request travels at each place, an integer each; None where they travel in their own order.
        sizes: by phase, how many there are for each rank, or of each rank.

    Attributes: the arguments.

    Example:
        >>> Order(None, [[0, 2], [1, 0], [3, 1]]).part(2)
        slice(3, 7, None)
    """

    __slots__ = ("_ends", "entries", "sizes")

    def __init__(self, entries: Tensor | None, sizes: Sequence[list[int]]) -> None:
        self.entries, self.sizes = entries, sizes
        self._ends = list(accumulate(map(sum, sizes), initial=0))

    @classmethod
    def at_once(cls, sizes: list[int], phase: int, num_phases: int) -> Order:
        """All requests travel in one phase."""
        none = [0] * len(sizes)
        return cls(None, [sizes if each == phase else none for each in range(num_phases)])

    def part(self, phase: int) -> slice:
        """Where what travels in a phase stands."""
        return slice(self._ends[phase], self._ends[phase + 1])

    @property
    def count(self) -> int:
        """All that travels."""
        return self._ends[-1]

    @property
    def most(self) -> int:
        """The most that travels in a phase."""
        return max(end - begin for begin, end in zip(self._ends, self._ends[1:], strict=False))

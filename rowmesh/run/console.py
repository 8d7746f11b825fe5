"""Console: what a run prints for people, while its ranks are whole; survivors of a dead rank print by themselves."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from rowmesh._support.files.printable import say
from rowmesh.observe.lines import fitted
from rowmesh.observe.progress import Progress


@dataclass(frozen=True)
class Console:
    """Prints to standard output, or nothing at all.

    Attributes:
        is_on: whether it prints.

    Example:
        >>> Console().write("threads   1")
        threads   1
        >>> Console(is_on=False).write("threads   1")
    """

    is_on: bool = True

    def of_rank(self, rank: int) -> Console:
        """The console of a rank: rank 0 alone prints."""
        return replace(self, is_on=self.is_on and rank == 0)

    def write(self, *lines: str) -> None:
        """Prints lines, each cut where a terminal ends."""
        if self.is_on and lines:
            say(*fitted(lines, sys.stdout))

    def progress(self, total: int | None, *, title: str = "train") -> Progress:
        """Shows how far something is, of `total` steps; None: nobody knows how many there are."""
        return Progress(total, title=title, enabled=self.is_on)


STDOUT = Console()

"""Console: what a run prints for people, while its ranks are whole; survivors of a dead rank print by themselves."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rowmesh._support.files.printable import say
from rowmesh.observe.lines import fitted
from rowmesh.observe.progress import Progress


@dataclass(frozen=True)
class Console:
    """Prints to standard output on rank 0, and nothing on other ranks.

    Attributes:
        rank: of the process.

    Example:
        >>> Console(0).write("threads   1")
        threads   1
        >>> Console(1).write("threads   1")
    """

    rank: int

    def write(self, *lines: str) -> None:
        """Prints lines, each cut where a terminal ends."""
        if self.rank == 0 and lines:
            say(*fitted(lines, sys.stdout))

    def progress(self, total: int | None, *, title: str = "train") -> Progress:
        """Shows how far something is, of `total` steps; None: nobody knows how many there are."""
        return Progress(total, title=title, enabled=self.rank == 0)

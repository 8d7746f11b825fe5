"""Ranks are ended as a launcher does it."""

import os
from pathlib import Path

from tests.support.lives import Lives


class Rank:
    """A process that runs until it is ended, or has ended before."""

    def __init__(self, exitcode: int | None = None) -> None:
        self.exitcode = exitcode
        self.sentinel, self._end = os.pipe()
        if exitcode is not None:
            os.close(self._end)

    def terminate(self) -> None:
        """Ends it."""
        self.exitcode = 143
        os.close(self._end)


def test_a_rank_that_died_before_all_were_started_ends_the_others():
    ranks = [Rank(-9), Rank()]
    assert Lives(Path())._end(ranks, limit_s=3600.0, grace_s=3600.0) == [-9, 143]
    for rank in ranks:
        os.close(rank.sentinel)

"""Interval: what adds up between two lines of the log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Interval:
    """Sums on this rank since the last line of the log.

    Attributes:
        loss: of all samples.
        weight: of all samples; as many as there are where they have none.
        samples: how many.
        steps: since then, or since the run was resumed.
        waited_s: for data; to which what the loader has waited is added.
        started_s: when it began, or the run was resumed.
        before_s: how long it had lasted before the run was resumed.
    """

    loss: float = 0.0
    weight: float = 0.0
    samples: int = 0
    steps: int = 0
    waited_s: float = 0.0
    started_s: float = field(default_factory=time.perf_counter)
    before_s: float = 0.0

    def add(self, weight: float, samples: int, loss: float) -> None:
        """Adds a step."""
        self.loss += loss
        self.weight += weight
        self.samples += samples
        self.steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time of a block."""
        started_s = time.perf_counter()
        yield
        self.started_s += time.perf_counter() - started_s

    @property
    def resumed_s(self) -> float:
        """How long it has lasted since it began, or since the run was resumed."""
        return time.perf_counter() - self.started_s

    @property
    def elapsed_s(self) -> float:
        """How long it has lasted in all."""
        return self.before_s + self.resumed_s

    def to_plain(self, loader_waited_s: float) -> list[float]:
        """For a checkpoint."""
        return [self.loss, self.weight, self.samples, self.waited_s + loader_waited_s, self.elapsed_s]

    @classmethod
    def resumed(cls, saved: Sequence[Sequence[float]], rank: int, world_size: int) -> Interval:
        """From what all ranks saved: that of the same rank, or on another number of ranks all of it on rank 0.

        >>> saved = [[0.5, 2.0, 2, 0.0, 1.0], [0.25, 0.5, 1, 0.0, 1.0]]
        >>> Interval.resumed(saved, 0, 4).samples, Interval.resumed(saved, 1, 2).samples
        (3, 1)
        """
        of_rank = list(saved[rank]) if world_size == len(saved) else [0.0] * 5
        if world_size != len(saved) and rank == 0:
            of_rank = [sum(each) for each in zip(*saved, strict=True)]
        loss, weight, samples, waited_s = of_rank[:4]
        return cls(loss, weight, int(samples), 0, waited_s, before_s=max(each[4] for each in saved))

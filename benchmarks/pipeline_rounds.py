"""Rounds of pipelines that take turns in the processes of one contestant, and what a step of each takes.

A step is cut into what the paper reports of it:

    computed     from looking a micro-batch up to the end of its backward
    exposed      messages under way while nothing is computed; over all messages it is the exposed share
    retrieval    reading, routing and retrieval; what neither computation nor messages hide is exposed
    other        the rest of the step: updates, averaging the network's gradients, waiting

Messages that take longer in turn than all that is computed in turn cannot be hidden as a whole (`least_exposed`).
Utilisation is the share of the step in which the network is computed, or the wait that takes its place.

Source: NestPipe §VII-A, metrics (4), utilisation, and (5), exposed communication.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.contestant import Contestant
from benchmarks.hosts import PAYLOAD_SHARE, Hosts
from benchmarks.measure import cores, slowest
from benchmarks.pipeline_hosts import by_stage, mean_tasks

MESSAGES = ("open", "final", "rows", "gradients")
"""Stages that send keys, rows and gradients: the paper's All2All."""


@dataclass
class Rounds:
    """Answers of all ranks to every round of one contestant.

    Attributes:
        answers: by round and rank.
        cable_bytes: by round, what the busier direction of the cable carried a step.
    """

    answers: list[list[dict[str, Any]]] = field(default_factory=list)
    cable_bytes: list[float] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step of the slowest rank; the median over rounds."""
        return statistics.median(1e3 * slowest(each, "step")[0] for each in self.answers)

    def part_ms(self, name: str) -> float:
        """Milliseconds of a part of a step."""
        return 1e3 * self._median("parts", name)

    def disk(self, name: str) -> float:
        """A counter of the slow tier, of a step and rank."""
        return self._median("disk", name)

    def _median(self, which: str, name: str) -> float:
        """The median over rounds of the mean over ranks."""
        return statistics.median(statistics.mean(rank[which].get(name, 0.0) for rank in each) for each in self.answers)

    def total(self, name: str) -> float:
        """The median over rounds of the sum over ranks."""
        return statistics.median(sum(rank[name] for rank in each) for each in self.answers)


def describe(rounds: Rounds, off: Rounds, rate_bits_per_s: int) -> dict[str, Any]:
    """The values of a report's line.

    Args:
        rounds: of a contestant.
        off: of the step that does everything in turn.
        rate_bits_per_s: of the cable.
    """
    step_ms, computed_ms = rounds.step_ms, rounds.part_ms("computed")
    communication_ms, exposed_ms = rounds.part_ms("communication"), rounds.part_ms("exposed_communication")
    retrieval_ms = rounds.part_ms("exposed_retrieval")
    cpu_ms, cable_bytes = 1e3 * rounds.total("cpu_s"), statistics.median(rounds.cable_bytes)
    tasks = mean_tasks(rounds.answers)
    line = {
        "step_ms": step_ms,
        "speedup": off.step_ms / step_ms,
        "utilisation": rounds.part_ms("accelerated") / step_ms,
        "computed_ms": computed_ms,
        "communication_ms": communication_ms,
        "exposed_ms": exposed_ms,
        "exposed": share(exposed_ms, communication_ms),
        "exposed_of_off": share(exposed_ms, off.part_ms("communication")),
        "least_exposed": max(0.0, 1 - share(off.part_ms("computed"), off.part_ms("communication"))),
        "retrieval_ms": rounds.part_ms("retrieval"),
        "exposed_retrieval_ms": retrieval_ms,
        "retrieval_hidden": 1 - share(retrieval_ms, off.part_ms("retrieval")),
        "other_ms": step_ms - computed_ms - exposed_ms - retrieval_ms,
        "average_ms": 1e3 * tasks["average.0"],
        "sent_bytes": rounds.total("received_bytes"),
        "cable_bytes": cable_bytes,
        "cable_floor_ms": cable_ms(cable_bytes, rate_bits_per_s),
        "cpu_ms": cpu_ms / len(rounds.answers[0]),
        "processor_floor_ms": cpu_ms / cores(),
        "disk_ms": 1e3 * rounds.disk("read_s"),
        "disk_bytes": rounds.disk("bytes_read"),
    }
    return {name: round(value, 3) for name, value in line.items()} | {"tasks_ms": by_stage(tasks)}


def share(part: float, whole: float) -> float:
    """A part over the whole; 0 of nothing."""
    return part / whole if whole else 0.0


def cable_ms(num_bytes: float, rate_bits_per_s: int) -> float:
    """How long a cable needs for so many bytes.

    >>> round(cable_ms(1e6, 1_000_000_000), 2)
    8.36
    """
    return 8e3 * num_bytes / (rate_bits_per_s * PAYLOAD_SHARE)


class Player:
    """Makes pipelines in the processes of a contestant, and has them run in turns.

    Args:
        ranks: whose program is `benchmarks.ranks.pipeline`.
        hosts: where they run.
        messages: stages that are communication.
        warmup: steps before those that are timed.
        steps: that are timed.
    """

    def __init__(
        self, ranks: Contestant, hosts: Hosts, *, messages: tuple[str, ...] = MESSAGES, warmup: int, steps: int
    ) -> None:
        self._ranks, self._hosts, self._messages = ranks, hosts, messages
        self._warmup, self._steps = warmup, steps

    def hold(self, name: str, **options: Any) -> str:
        """Makes a collection; returns why there is none."""
        return next(
            (why for answer in self._ranks.ask("hold", name=name, **options) if (why := answer.get("unavailable"))), ""
        )

    def make(self, name: str, **options: Any) -> None:
        """Makes a pipeline."""
        self._ranks.ask("make", name=name, **options)

    def wait(self, wait_ms: float) -> None:
        """Sets how long computation waits from now on."""
        self._ranks.ask("wait", wait_ms=wait_ms)

    def drop(self, names: Iterable[str]) -> None:
        """Closes pipelines."""
        for name in names:
            self._ranks.ask("drop", name=name)

    def round(self, name: str, depth: int, rounds: Rounds, warmup: int | None = None, steps: int | None = None) -> None:
        """One round of a pipeline of so many batches ahead."""
        loop = {
            "warmup": self._warmup if warmup is None else warmup,
            "steps": self._steps if steps is None else steps,
            "cooldown": depth + 1,
        }
        before = self._hosts.bytes_sent()
        rounds.answers.append(self._ranks.ask("round", name=name, messages=self._messages, **loop))
        sent = max(now - then for then, now in zip(before, self._hosts.bytes_sent(), strict=True))
        rounds.cable_bytes.append(sent / sum(loop.values()))

    def interleave(self, depths: dict[str, int], repeats: int) -> dict[str, Rounds]:
        """So many rounds of all pipelines (name → batches ahead), A B A B."""
        found = {name: Rounds() for name in depths}
        for _ in range(repeats):
            for name, depth in depths.items():
                self.round(name, depth, found[name])
        return found

"""Timeline: what threads did in the last steps of a run, from its trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPUTE = "compute"
BATCHES, MAX_RANKS, MAX_SPANS = 4, 4, 600
MAX_BYTES = 200_000_000


@dataclass(frozen=True)
class Span:
    """A task that a thread did, in milliseconds since the beginning of the timeline."""

    name: str
    batch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Lane:
    """A thread or stream of a rank."""

    rank: int
    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Timeline:
    """Some batches of some ranks.

    Attributes:
        length_ms: how long they took.
        batches: the first and the last of them.
        lanes: by rank.
        num_ranks: of the trace.
    """

    length_ms: float
    batches: tuple[int, int]
    lanes: tuple[Lane, ...]
    num_ranks: int


def read_timeline(path: Path, missing: list[str]) -> Timeline | None:
    """The last whole batches of a trace; None where there is none, or it cannot be read, which is noted."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            missing.append(f"{path.name} has {size / 1e6:,.0f} MB, too many for this page; open it in Perfetto")
            return None
        return timeline_of(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    except FileNotFoundError:
        return None  # it is written only where pipeline.trace asks for it
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        missing.append(f"{path.name} cannot be read: {error!r}")
        return None


def timeline_of(events: Sequence[dict[str, Any]]) -> Timeline | None:
    """The last batches whose computation rank 0 ended; None where there are none."""
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    done = [event for event in events if event["ph"] == "X"]
    inside = _last_computed([event for event in done if event["pid"] == 0 and event["name"] == COMPUTE])
    if not inside:
        return None
    batches = [event["args"]["batch"] for event in inside]
    begin, end = min(event["ts"] for event in inside), max(event["ts"] + event["dur"] for event in inside)
    lanes: dict[tuple[int, int], list[Span]] = {}
    for event in done:
        start, stop = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        if event["pid"] < MAX_RANKS and start < stop:
            span = Span(event["name"], event["args"]["batch"], (start - begin) / 1e3, (stop - begin) / 1e3)
            lanes.setdefault((event["pid"], event["tid"]), []).append(span)
    made = tuple(
        Lane(rank, names.get((rank, thread), str(thread)), tuple(spans[-MAX_SPANS:]))
        for (rank, thread), spans in sorted(lanes.items())
    )
    num_ranks = len({event["pid"] for event in events})
    return Timeline((end - begin) / 1e3, (min(batches), max(batches)), made, num_ranks)


def _last_computed(computed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The computation of the last batches in a row; a pipeline that begins anew counts from its first batch again."""
    found: list[dict[str, Any]] = []
    batches: set[int] = set()
    for event in sorted(computed, key=lambda event: -event["ts"]):
        batch = event["args"]["batch"]
        if (batches and batch > min(batches)) or len(batches | {batch}) > BATCHES:
            break
        batches.add(batch)
        found.append(event)
    return found
